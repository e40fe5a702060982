"""Settings that a trainer's loop acts on: a loop of the user's has code in their place."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.config import DistributedConfig
from phalanx.errors import UsageError

_SCHEDULE = "make a torch scheduler and prepare it: scheduler = f.prepare(scheduler)"
_EVALUATE = "evaluate in your loop, with f.prepare_loader(data, training=False)"
INSTEAD = {
    "gradient_clipping": "call f.clip_grad_norm(1.0) before optimizer.step()",
    "lr_schedule": _SCHEDULE,
    "warmup": _SCHEDULE,
    "lr_scaling": "scale the rate that you give the optimizer by f.world_size",
    "ema_decay": "average the weights by torch.optim.swa_utils.AveragedModel",
    "loss_weighting": "give each loss its weight: f.backward(loss, weight=number_of_labels)",
    "early_stopping": "leave your loop when the metric no longer improves",
    "patience": "leave your loop when the metric no longer improves",
    "keep_best": "call f.save(directory) when the metric is the best",
    "load_best_at_end": "call f.load(directory) after your loop",
    "checkpoint_frequency": "call f.save(directory) in your loop",
    "eval_every": _EVALUATE,
    "limit_val_batches": _EVALUATE,
    "sanity_val_batches": _EVALUATE,
    "max_time": "leave your loop when the time is over",
    "fast_dev_run": "leave your loop after a few batches",
}
"""By setting: what to write."""


def refuse_trainer_settings(given: Iterable[str]) -> None:
    """Raise for settings that are given to a `Formation` and would have no effect there."""
    unused = [name for name in given if name in INSTEAD]
    if unused:
        names = ", ".join(unused)
        verb = "is a setting" if len(unused) == 1 else "are settings"
        hints = dict.fromkeys(f"{name}: {INSTEAD[name]}" for name in unused)
        raise UsageError(f"{names} {verb} of the trainer's loop, and this loop is yours", hint="\n  ".join(hints))


def unused_note(config: DistributedConfig) -> str:
    """Return a warning about such settings in a config, which a trainer may share; empty if there are none."""
    unused = config.changed(*INSTEAD)
    if not unused:
        return ""
    shown = "; ".join(f"{name} = {getattr(config, name)!r}: {INSTEAD[name]}" for name in unused)
    return f"not used by a loop of your own: {shown}"
