"""Which settings a Keras model follows, and what to write in Keras instead of those that are torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from phalanx.config.distributed import DistributedConfig

_FOLLOWED = {
    *("num_workers", "num_gpus", "num_nodes", "gpus_per_node", "node_rank", "rdzv_endpoint", "device"),
    *("threads_per_rank", "backend", "strategy", "batch_size", "epochs", "max_steps", "learning_rate", "optimizer"),
    *("momentum", "weight_decay", "seed", "drop_last", "data_dir", "mixed_precision", "timeout", "start_timeout"),
    *("num_servers", "checkpoint_dir", "checkpoint_frequency", "resume_from_checkpoint", "run_dir", "name"),
    *("tensorboard", "tensorboard_dir", "mlflow_tracking", "mlflow_experiment", "log_every_n_steps", "progress"),
    *("console_ranks", "max_restarts", "stop_grace"),
}

_NOTED = {
    *("gradient_accumulation_steps", "gradient_clipping", "scaler_init_scale", "scaler_growth_interval", "compile"),
    *("activation_checkpointing", "activation_offload", "on_nonfinite", "loss_weighting", "lr_schedule", "warmup"),
    *("lr_scaling", "base_batch_size", "deterministic", "eval_every", "communication_backend"),
    *("find_unused_parameters", "bucket_cap_mb", "nccl_env", "keep_last", "reference_throughput"),
}
"""What a config that is shared by several backends may hold; not what decides how a model is split over ranks."""

_SCHEDULES = {
    "linear": "keras.optimizers.schedules.PolynomialDecay(0.001, decay_steps=1000, end_learning_rate=0.0)",
    "cosine": "keras.optimizers.schedules.CosineDecay(0.001, decay_steps=1000)",
    "inverse-sqrt": "MySchedule(), a class of yours derived from keras.optimizers.schedules.LearningRateSchedule",
}
_INSTEAD = {
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
    "lora_rank": "layer.enable_lora({value}) for layers of Keras 3",
}
"""What to write in `model_fn`, where Keras has the same thing; rates and numbers of steps are examples."""


_UNUSED = "with backend = 'tensorflow', which does not follow it: "


def keras_mistakes(
    config: DistributedConfig, defaults: Mapping[str, Any], known: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield the settings that no Keras model can follow, apart from what is known to be wrong already."""
    for name, default in defaults.items():
        if name not in _FOLLOWED | _NOTED and name not in known and getattr(config, name) != default:
            yield name, f"{name} = {getattr(config, name)!r} {_UNUSED}leave {name} out."


def keras_unused(config: DistributedConfig, defaults: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (setting, why and what to write instead) for settings that Keras passes over and trains without."""
    for name in defaults:
        value = getattr(config, name)
        if name not in _NOTED or value == defaults[name]:
            continue
        instead = f"leave {name} out."
        if name in _INSTEAD:
            steps = value if isinstance(value, int) else 100
            line = _INSTEAD[name].format(value=value, steps=steps, schedule=_SCHEDULES.get(str(value), ""))
            instead = f"Keras has its own. Leave {name} out, and write in model_fn, by your model's Keras: {line}"
        yield name, f"{name} = {value!r} {_UNUSED}{instead}"
