"""Rules of Keras models: settings that they use, ignore or refuse, and what to write in `model_fn` instead."""

from __future__ import annotations

from typing import Any

from phalanx.config.rules import Mistakes, rule
from phalanx.config.run_fields import OPTIONS
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
_ALL = {**FIELDS, **OPTIONS}
_UNUSED = "with backend = 'tensorflow', which does not follow it: "


@rule("backend", "strategy", "engine_options")
def keras(settings: Settings) -> Mistakes:
    """Report settings that no Keras model can use."""
    for name in settings.changed(*_ALL):
        if not _ALL[name].metadata["keras"]:
            yield settings.mistake(name, f" {_UNUSED}leave {name} out.")


RULES = (keras,)
FOR_SCRIPTS = frozenset({"strategy", "num_servers"})
"""They decide the roles of the ranks, which `TF_CONFIG` tells a script."""


def unused(settings: Settings) -> Mistakes:
    """Yield (setting, what to write instead) for settings that Keras has its own way for."""
    for name in settings.changed(*_ALL):
        if _ALL[name].metadata["keras"] == "ignored":
            yield settings.mistake(name, f" {_UNUSED}{_instead(name, settings.value(name))}")


def _instead(name: str, value: Any) -> str:
    if name not in _IN_KERAS:
        return f"leave {name} out."
    steps = value if isinstance(value, int) else 100
    line = _IN_KERAS[name].format(value=value, steps=steps, schedule=_KERAS_SCHEDULES.get(str(value), ""))
    return f"Keras has its own. Leave {name} out, and write in model_fn, by your model's Keras: {line}"
