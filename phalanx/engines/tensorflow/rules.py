"""Rules of Keras models: settings that they use, ignore or refuse, and what to write in `model_fn` instead."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.config.rules import Mistakes, rule
from phalanx.config.settings import FIELDS, Settings

_KERAS_SCHEDULES = {
    "linear": "keras.optimizers.schedules.PolynomialDecay(0.001, decay_steps=1000, end_learning_rate=0.0)",
    "cosine": "keras.optimizers.schedules.CosineDecay(0.001, decay_steps=1000)",
    "inverse-sqrt": "MySchedule(), a class of yours derived from keras.optimizers.schedules.LearningRateSchedule",
}
_IN_KERAS = {
    "gradient_clipping": "keras.optimizers.Adam(..., global_clipnorm={value})",
    "gradient_accumulation_steps": "keras.optimizers.Adam(..., gradient_accumulation_steps={value}), of Keras 3",
    "lr_schedule": "learning_rate={schedule}",
    "warmup": "learning_rate=keras.optimizers.schedules.CosineDecay(0.0, decay_steps=1000, warmup_target=0.001, "
    "warmup_steps={steps})",
    "lr_scaling": "the scaled rate itself: keras.optimizers.Adam(0.001 * workers)",
    "scaler_init_scale": "keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale={value})",
    "scaler_growth_interval": "keras.mixed_precision.LossScaleOptimizer(optimizer, dynamic_growth_steps={value})",
    "compile": "model.compile(..., jit_compile=True)",
    "on_nonfinite": "keras.mixed_precision.LossScaleOptimizer(optimizer), which skips steps that are not finite",
    "deterministic": "tf.config.experimental.enable_op_determinism()",
    "early_stopping": "model.fit(..., callbacks=[keras.callbacks.EarlyStopping(...)])",
    "ema_decay": "keras.optimizers.Adam(..., use_ema=True, ema_momentum={value})",
    "lora_rank": "layer.enable_lora({value}) for layers of Keras 3",
}
"""What to write in `model_fn`, where Keras has the same thing; rates and numbers of steps are examples."""
_FOLLOWED = frozenset({
    "num_workers", "num_nodes", "node_rank", "rdzv_endpoint", "device", "threads_per_rank", "backend", "strategy",
    "batch_size", "epochs", "max_steps", "learning_rate", "optimizer", "momentum", "weight_decay", "seed", "drop_last",
    "mixed_precision", "timeout", "num_servers", "checkpoint_dir", "checkpoint_frequency", "resume_from_checkpoint",
    "run_dir", "name", "tensorboard", "mlflow", "wandb", "sinks", "log_every_n_steps", "verbosity", "progress",
    "console_ranks", "max_restarts", "start_timeout", "stop_grace",
})  # fmt: skip
"""The settings that training a Keras model follows."""
IGNORED = frozenset({
    "lr_schedule", "warmup", "lr_scaling", "base_batch_size", "deterministic", "eval_every", "limit_val_batches",
    "sanity_val_batches", "fast_dev_run", "max_time", "early_stopping", "patience", "min_delta",
    "gradient_accumulation_steps", "gradient_clipping", "compile", "capture", "channels_last", "sync_batch_norm",
    "activation_checkpointing", "activation_offload", "ema_decay", "decay_norms", "on_nonfinite", "loss_weighting",
    "communication_backend", "find_unused_parameters", "bucket_cap_mb", "nccl_env", "keep_last", "keep_best",
    "load_best_at_end", "profile", "reference_throughput", "scaler_init_scale", "scaler_growth_interval",
})  # fmt: skip
"""Settings without effect, which a file that several backends share may have; any other is refused."""
_UNUSED = "with backend = 'tensorflow', which does not follow it: "


@rule("backend", "strategy")
def keras(settings: Settings) -> Mistakes:
    """Report settings that no Keras model can use."""
    for name in settings.changed(*FIELDS):
        if name not in _FOLLOWED and name not in IGNORED:
            yield settings.mistake(name, f" {_UNUSED}leave {name} out.")


RULES = (keras,)
FOR_SCRIPTS = frozenset({"strategy", "num_servers"})
"""They decide the roles of the ranks, which `TF_CONFIG` tells a script."""


def unused(settings: Settings) -> Mistakes:
    """Yield (setting, what to write instead) for settings that Keras has its own way for."""
    for name in settings.changed(*FIELDS):
        if name in IGNORED:
            line = _line(settings, name)
            advice = f"Keras has its own. Leave {name} out, and write in model_fn, by your model's Keras: {line}"
            yield settings.mistake(name, f" {_UNUSED}{advice if line else f'leave {name} out.'}")


def instead(settings: Settings, names: Iterable[str]) -> str:
    """Return what to write for settings that are not used, as one sentence after a list of them."""
    lines = sorted(filter(None, (_line(settings, name) for name in names)))
    return f" Write in model_fn, by your model's Keras: {'; '.join(lines)}" if lines else ""


def _line(settings: Settings, name: str) -> str:
    """Return what to write in `model_fn`; empty where Keras has no such thing."""
    value = getattr(settings, name)
    steps = value if isinstance(value, int) else 100
    schedule = _KERAS_SCHEDULES.get(str(value), "")
    return _IN_KERAS.get(name, "").format(value=value, steps=steps, schedule=schedule)
