"""Settings that do not go together, as a table: when, which setting is refused, because, and what to write instead.

What needs more than a comparison is a function, in `rules`. Engines have their own tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from phalanx.config.fields import HYBRID, TORCH_SHARDING, ZERO_SHARDING
from phalanx.config.rules import RANKS, STRATEGY, Mistakes, Rule
from phalanx.config.settings import FIELDS, Settings
from phalanx.config.strategies import AXES, ROWS, strategies_that

Condition = Callable[[Any], bool]


class Pair(NamedTuple):
    """One row. `because` and `write` may name settings: {s.strategy!r}."""

    refuse: str
    when: Mapping[str, Any]
    """Settings, or what follows from them (`facts.shards`), each with a value, or with a condition; `on`: changed."""
    because: str
    write: str = ""

    def rule(self) -> Rule:
        """Return the rule: it runs if all that it looks at is correct."""
        return Rule(self.check, frozenset(name for path in (self.refuse, *self.when) for name in _read_by(path)))

    def check(self, settings: Settings) -> Mistakes:
        """Yield the mistake where the row applies."""
        if not settings.changed(self.refuse):  # most are not, and a search of plans asks thousands of times
            return
        if all(_holds(settings, path, value) for path, value in self.when.items()):
            text = self.because + (f": {self.write}" if self.write else "")
            yield settings.mistake(self.refuse, f"{text.format(s=settings)}.")


def on(value: Any) -> bool:
    """Whether a property is set; for a setting: whether it differs from its default."""
    return bool(value)


def off(value: Any) -> bool:
    """The opposite of `on`."""
    return not value


def above(limit: float) -> Condition:
    """Return the condition of a number above a limit."""
    return lambda value: value is not None and value > limit


def among(*values: Any) -> Condition:
    """Return the condition of one of several values."""
    return lambda value: value in values


def other_than(*values: Any) -> Condition:
    """Return the condition of a value that is none of these."""
    return lambda value: value not in values


_FOLLOWS_FROM = {
    "facts": STRATEGY,
    "resolved_strategy": STRATEGY,
    "framework": ("backend",),
    "total_ranks": RANKS,
    "recovery": (*STRATEGY, *AXES),
    "axis": AXES,
    "best_metric": ("keep_best", "early_stopping"),
    "evaluate_every": ("eval_every",),
    "recompute": ("activation_checkpointing",),
    "resolved_server_mode": ("server_mode", "staleness"),
    "resolved_sharding": ("sharding", "zero_stage"),
}
"""Properties of `Settings`, and the settings that they are computed from."""


def _read_by(path: str) -> Iterable[str]:
    return _FOLLOWS_FROM.get(first := path.partition(".")[0], (first,))


def _holds(settings: Settings, path: str, condition: Any) -> bool:
    if condition in (on, off) and path in FIELDS:
        return bool(settings.changed(path)) == (condition is on)
    value: Any = settings
    for name in path.split("."):
        value = getattr(value, name, None)
    return bool(condition(value)) if callable(condition) else bool(value == condition)


def _is_uneven(value: Any) -> bool:
    """Whether a number is not a power of two."""
    return value is not None and value.bit_count() != 1


def _is_neither(value: Any) -> bool:
    """Whether a number is neither a share nor a number of steps."""
    return isinstance(value, float) and value >= 1 and not value.is_integer()


def _measured(name: Any) -> bool:
    """Whether evaluation measures a metric."""
    return str(name).startswith("val/")


_NEEDS_NO_RESTARTS = {"max_restarts": off, "min_workers": off}
_TORCH_WITHOUT_AVERAGES = {"framework": "torch", "facts.averages_gradients": False}
_AVERAGES = ", ".join(repr(name) for name in strategies_that("averages_gradients") if not ROWS[name].backend)
_REPLICATES = ", ".join(strategies_that("replicates"))
_OWN_STEPS = "with strategy = {s.resolved_strategy!r}, whose ranks take their own steps"

PAIRS = (
    # Sharding.
    *(
        Pair(
            "zero_stage",
            {"zero_stage": stage, "facts.replicates": True, "facts.axes": on, "facts.shards_by_engine": False},
            " shards, but strategy = {s.strategy!r} replicates",
            "leave strategy out, or write 'fsdp'",
        )
        for stage in ZERO_SHARDING
    ),
    *(
        Pair(
            "zero_stage",
            {
                "zero_stage": stage,
                "sharding": among(*({*TORCH_SHARDING.values()} - {meant, HYBRID[meant]})),
                "facts.shards_by_engine": False,
            },
            f" means sharding = {meant!r}, but sharding = {{s.sharding!r}} was given",
            "leave one of them out",
        )
        for stage, meant in ZERO_SHARDING.items()
    ),
    Pair(
        "activation_checkpointing",
        {"pipeline_parallel": above(1), "pipeline_schedule": "zero-bubble"},
        " with pipeline_schedule = 'zero-bubble', which computes the gradient of every weight apart and would "
        "recompute the block for each",
        "write pipeline_schedule = 'interleaved', or leave one of them out",
    ),
    # Numbers, optimizers.
    Pair(
        "mixed_precision",
        {"mixed_precision": "fp8", "framework": other_than("torch")},
        " with {s.backend}, which has no products in fp8",
        "write bf16",
    ),
    Pair(
        "momentum",
        {"optimizer": among("adam", "adamw", "adamw8bit", "lamb"), "momentum": lambda value: value >= 1},
        ": it is beta1 of {s.optimizer}, and must be below 1",
    ),
    Pair("momentum", {"optimizer": "lars", "momentum": lambda value: value >= 1}, ": with lars it must be below 1"),
    Pair("warmup", {"warmup": _is_neither}, ": a share of the run is below 1 (0.1), a number of steps is whole (500)"),
    Pair(
        "limit_val_batches",
        {"limit_val_batches": lambda value: isinstance(value, float) and value > 1},
        ": a share is up to 1.0 (0.1), a number of batches is whole (50)",
    ),
    *(
        Pair(
            name,
            {"framework": "torch", "mixed_precision": other_than("fp16", True)},
            " with mixed_precision = {s.mixed_precision!r}, which scales no loss",
            f"write 'fp16', or leave {name} out",
        )
        for name in ("scaler_init_scale", "scaler_growth_interval")
    ),
    Pair(
        "compression",
        {"fixed_order": True, "resolved_strategy": among(*FIELDS["fixed_order"].metadata["strategies"])},
        " with fixed_order: what is rounded off depends on the number of ranks, so the bits would too. Leave one of "
        "them out",
    ),
    Pair(
        "fixed_order",
        {"total_ranks": _is_uneven, "resolved_strategy": among(*FIELDS["fixed_order"].metadata["strategies"])},
        " needs 1, 2, 4, 8, ... ranks, and num_workers = {s.total_ranks}: the order of additions is a tree that is "
        "halved with every doubling",
    ),
    Pair(
        "ema_decay",
        {"framework": "torch", "pipeline_parallel": above(1)},
        " with pipeline_parallel = {s.pipeline_parallel}: stages are not averaged. Leave one out",
    ),
    Pair(
        "ema_decay",
        _TORCH_WITHOUT_AVERAGES,
        " with strategy = {s.resolved_strategy!r}, which does not hold the run's weights on the ranks after every step",
        f"write strategy = {_AVERAGES}, or leave ema_decay out",
    ),
    # Layouts of models.
    Pair(
        "lora_rank",
        {"tensor_parallel": above(1)},
        " with tensor_parallel = {s.tensor_parallel}: adapters are not split over ranks. Use strategy = 'fsdp', which "
        "shards the frozen model",
    ),
    Pair(
        "lora_base",
        {"pipeline_parallel": above(1)},
        " with pipeline_parallel = {s.pipeline_parallel}: a stage is sent weights, not their 4 bits. Use strategy = "
        "'fsdp', which shards them",
    ),
    Pair(
        "activation_checkpointing",
        {"recompute.budget": other_than(None), "compile": False},
        " needs compiled blocks",
        "write compile = true, or activation_checkpointing = true (whole blocks)",
    ),
    Pair(
        "activation_checkpointing",
        {"recompute.budget": other_than(None), "activation_offload": True},
        " with activation_offload",
        "leave one of them out",
    ),
    Pair("debug", {"compile": True}, " with compile: a compiled model runs as a whole. Leave compile out"),
    Pair(
        "channels_last",
        {"framework": "torch", "axis": on},
        " with {s.axis}, which needs contiguous weights",
        "leave one of them out",
    ),
    Pair(
        "channels_last",
        {"framework": "torch", "facts.needs_contiguous": True},
        " with strategy = {s.resolved_strategy!r}, which needs contiguous weights",
        "write strategy = 'ddp', or leave channels_last out",
    ),
    Pair(
        "sync_batch_norm",
        {"framework": "torch", "axis": on},
        " with {s.axis}, where ranks hold parts of a model or share samples",
        "leave one of them out",
    ),
    *(
        Pair(
            "sync_batch_norm",
            {"framework": "torch", fact: True},
            f" {_OWN_STEPS}",
            "write strategy = 'ddp', or leave sync_batch_norm out",
        )
        for fact in ("facts.drifts", "facts.has_servers")
    ),
    Pair(
        "sync_batch_norm",
        {"framework": "torch", "fixed_order": True},
        " with fixed_order: sums over the samples of several ranks have other bits than those of one. Leave one of "
        "them out",
    ),
    # Parameter servers.
    *(
        Pair(
            name,
            {"facts.has_servers": False},
            " without parameter servers",
            f"write strategy = 'parameter-server', or leave {name} out",
        )
        for name in ("num_servers", "server_mode", "staleness")
    ),
    *(
        Pair(
            name,
            {"facts.has_servers": True},
            " does not go with strategy = 'parameter-server', whose shards hold whole parameters for ranks that each "
            "run the whole model",
            "leave one of them out",
        )
        for name in (*AXES, "zero_stage")
    ),
    Pair(
        "mixed_precision",
        {"facts.has_servers": True, "mixed_precision": "fp16"},
        " needs loss scaling, which parameter servers do not have",
        "write 'bf16', or leave it out",
    ),
    Pair(
        "loss_weighting",
        {"facts.has_servers": True, "loss_weighting": "tokens", "resolved_server_mode": other_than("sync")},
        " synchronizes all ranks in every step, which server_mode = {s.resolved_server_mode!r} avoids",
        "write 'samples', or server_mode = 'sync'",
    ),
    *(
        Pair(
            "staleness",
            {"facts.has_servers": True, "server_mode": mode},
            f" with server_mode = {mode!r}, in which {meaning}",
            "write server_mode = 'bounded', or leave staleness out",
        )
        for mode, meaning in (
            ("sync", "all workers step together"),
            ("async", "workers do not wait for each other"),
        )
    ),
    Pair(
        "server_mode",
        {"facts.has_servers": True, "server_mode": "bounded", "staleness": None},
        " needs a bound",
        "write staleness = 2, for example",
    ),
    # GPUs that ranks share.
    Pair(
        "share_gpus",
        {"device": "cpu"},
        " with device = 'cpu'",
        "leave share_gpus out: --device cpu is enough for any number of ranks",
    ),
    Pair(
        "share_gpus",
        {"communication_backend": other_than(None, "nccl")},
        " with communication_backend = {s.communication_backend!r}: it is for nccl; gloo needs nothing for several "
        "ranks on one GPU. Leave one of them out",
    ),
    Pair(
        "share_gpus",
        {"facts.shards_by_engine": True},
        " with strategy = {s.resolved_strategy!r}: not tried. The same stages on shared GPUs: leave it out and set "
        "zero_stage",
    ),
    # The course of a run.
    Pair("load_best_at_end", {"best_metric": None}, " with keep_best = false", "leave keep_best out"),
    Pair(
        "load_best_at_end",
        {"best_metric.name": _measured, "evaluate_every": None},
        " with eval_every = 0: nothing is measured. Leave one out",
    ),
    Pair(
        "fast_dev_run",
        {"resume_from_checkpoint": on},
        " with resume_from_checkpoint: it begins at step 1. Leave one out",
    ),
    Pair(
        "name",
        {"name": lambda value: value is not None and ("/" in value or value.startswith("."))},
        ": a name has no '/', and does not begin with '.'. For a folder: run_dir",
    ),
    # Lost and slow ranks.
    *(
        pair
        for name in ("check_replicas_every", "straggler_factor")
        for pair in (
            Pair(name, {"axis": on}, " with {s.axis}: ranks hold different parts"),
            Pair(
                name,
                {"facts.replicates": False},
                f" compares ranks that take each step with equal weights ({_REPLICATES}), not "
                "{s.resolved_strategy!r}",
            ),
        )
    ),
    *(
        Pair(
            name,
            {name: "replace", "max_restarts": off},
            " without max_restarts, which says how many ranks may be replaced",
        )
        for name in ("on_corruption", "on_straggler")
    ),
    Pair(
        "spares",
        {"recovery": "restart"},
        " with strategy = {s.resolved_strategy!r}, where all ranks start again after a loss. Leave spares out",
    ),
    *(
        Pair(
            name,
            {"recovery": "restart"},
            " with backend = {s.backend!r} and strategy = {s.resolved_strategy!r}, where all ranks start again after a "
            f"loss. Leave {name} out",
        )
        for name in ("heartbeat_timeout", "stall_timeout", "memory_frequency")
    ),
    *(
        Pair(name, _NEEDS_NO_RESTARTS, " without max_restarts: no lost rank is replaced. Set it, such as 3")
        for name in ("spares", "heartbeat_timeout", "stall_timeout", "memory_frequency")
    ),
    Pair(
        "spares",
        {"num_nodes": above(1)},
        " with num_nodes = {s.num_nodes}: they wait on one node only",
    ),
    Pair(
        "memory_frequency",
        {"recovery": other_than("replace")},
        " with strategy = {s.resolved_strategy!r}, whose ranks hold whole copies",
        "leave memory_frequency out",
    ),
)
PAIR_RULES = tuple(pair.rule() for pair in PAIRS)
