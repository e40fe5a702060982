"""Rules of the settings for evaluation, early stopping, averaged weights and the length of a run."""

from __future__ import annotations

from phalanx.config.rules import RANKS, STRATEGY, Mistakes, Rule, rule
from phalanx.config.settings import Settings
from phalanx.config.strategies import AXES, ROWS, strategies_that


@rule("keep_best", "early_stopping", "eval_every")
def watched_metrics(settings: Settings) -> Mistakes:
    """Check the names of metrics, and that they are measured."""
    for name in ("keep_best", "early_stopping"):
        given = getattr(settings, name)
        if given is True:  # keep_best follows early_stopping, which is checked too
            continue
        try:
            watched = settings.best_metric if name == "keep_best" else settings.stopping_metric
        except ValueError as error:
            yield settings.mistake(name, f": {error}")
            continue
        if isinstance(given, str) and watched and watched.name.startswith("val/") and settings.evaluate_every is None:
            yield settings.mistake(
                name, f" with eval_every = 0, which never measures it: leave eval_every out, or {name}."
            )


@rule("load_best_at_end", "keep_best", "eval_every")
def load_best_at_end(settings: Settings) -> Mistakes:
    """Report that no checkpoint will be the best."""
    if not settings.load_best_at_end:
        return
    watched = settings.best_metric
    if watched is None:
        yield settings.mistake("load_best_at_end", " with keep_best = false: leave keep_best out.")
    elif watched.name.startswith("val/") and settings.evaluate_every is None:
        yield settings.mistake("load_best_at_end", " with eval_every = 0: nothing is measured. Leave one out.")


@rule("fast_dev_run", "resume_from_checkpoint")
def fast_dev_run(settings: Settings) -> Mistakes:
    """Report a checkpoint that has taken more steps than are tried out."""
    if settings.fast_dev_run and settings.resume_from_checkpoint:
        yield settings.mistake("fast_dev_run", " with resume_from_checkpoint: it begins at step 1. Leave one out.")


@rule("name")
def run_name(settings: Settings) -> Mistakes:
    """Report a name that reads as a path: it becomes a part of a folder's name."""
    if settings.name is not None and ("/" in settings.name or settings.name.startswith(".")):
        yield settings.mistake("name", ": a name has no '/', and does not begin with '.'. For a folder: run_dir.")


@rule("limit_val_batches")
def limit_val_batches(settings: Settings) -> Mistakes:
    """Check that it is a share or a number of batches."""
    given = settings.limit_val_batches
    if isinstance(given, float) and given > 1:
        yield settings.mistake("limit_val_batches", ": a share is up to 1.0 (0.1), a number of batches is whole (50).")


@rule("debug", "compile")
def debug(settings: Settings) -> Mistakes:
    """Report a check of modules that a compiled model does not call one by one."""
    if settings.debug is not None and settings.compile:
        yield settings.mistake("debug", " with compile: a compiled model runs as a whole. Leave compile out.")


@rule(
    "check_replicas_every",
    "on_corruption",
    "straggler_factor",
    "on_straggler",
    *STRATEGY,
    *AXES,
)
def rank_checks(settings: Settings) -> Mistakes:
    """Report checks of replicas where ranks hold none, or do not step together."""
    axis = next((axis for axis in AXES if getattr(settings, axis) > 1), None)
    strategy = settings.resolved_strategy
    for name in settings.changed("check_replicas_every", "straggler_factor"):
        if axis is not None:
            yield settings.mistake(name, f" with {axis} = {getattr(settings, axis)}: ranks hold different parts.")
        elif not settings.facts.replicates:
            equal = ", ".join(strategies_that("replicates"))
            yield settings.mistake(
                name, f" compares ranks that take each step with equal weights ({equal}), not {strategy!r}."
            )
    for name in ("on_corruption", "on_straggler"):
        if getattr(settings, name) == "replace" and not settings.max_restarts:
            yield settings.mistake(name, " without max_restarts, which says how many ranks may be replaced.")


@rule("spares", "max_restarts", "min_workers", "num_nodes", *STRATEGY, *AXES)
def spares(settings: Settings) -> Mistakes:
    """Report spare ranks that would never be used."""
    if not settings.spares:
        return
    if settings.recovery == "restart":
        how = f"strategy = {settings.resolved_strategy!r}"
        yield settings.mistake("spares", f" with {how}, where all ranks start again after a loss. Leave spares out.")
    elif not settings.max_restarts and settings.min_workers is None:
        yield settings.mistake("spares", " without max_restarts: no lost rank is replaced. Set it, such as 3.")
    elif settings.num_nodes > 1:
        yield settings.mistake("spares", f" with num_nodes = {settings.num_nodes}: they wait on one machine only.")


@rule("heartbeat_timeout", "max_restarts", "min_workers", *STRATEGY, *AXES)
def lost_ranks(settings: Settings) -> Mistakes:
    """Report settings of recovery in place where no lost rank is replaced, or none needs its state from another."""
    for name in settings.changed("heartbeat_timeout", "stall_timeout", "memory_frequency"):
        if settings.recovery == "restart":
            how = f"backend = {settings.backend!r} and strategy = {settings.resolved_strategy!r}"
            yield settings.mistake(name, f" with {how}, where all ranks start again after a loss. Leave {name} out.")
        elif not settings.max_restarts and settings.min_workers is None:
            yield settings.mistake(name, " without max_restarts: no lost rank is replaced. Set it, such as 3.")
        elif name == "memory_frequency" and settings.recovery != "replace":
            how = f"strategy = {settings.resolved_strategy!r}, whose ranks hold whole copies"
            yield settings.mistake(name, f" with {how}: leave {name} out.")


@rule("mixed_precision")
def loss_scale(settings: Settings) -> Mistakes:
    """Report settings of fp16's loss scale for another precision; true may be fp16, by the device."""
    if settings.mixed_precision in ("fp16", True) or settings.framework != "torch":
        return
    for name in settings.changed("scaler_init_scale", "scaler_growth_interval"):
        precision = f" with mixed_precision = {settings.mixed_precision!r}"
        yield settings.mistake(name, f"{precision}, which scales no loss: write 'fp16', or leave {name} out.")


@rule("ema_decay", *STRATEGY, "pipeline_parallel", "min_workers")
def ema_decay(settings: Settings) -> Mistakes:
    """Check that this rank's weights are those of the run after every step."""
    strategy, name = settings.resolved_strategy, "ema_decay"
    if settings.ema_decay is None or settings.framework != "torch":
        return
    if settings.pipeline_parallel > 1:
        yield settings.mistake(
            name, f" with pipeline_parallel = {settings.pipeline_parallel}: stages are not averaged. Leave one out."
        )
    elif not settings.facts.averages_gradients:
        names = ", ".join(repr(one) for one in strategies_that("averages_gradients") if not ROWS[one].backend)
        yield settings.mistake(
            name,
            f" with strategy = {strategy!r}, which does not hold the run's weights on the ranks after every step: "
            f"write strategy = {names}, or leave ema_decay out.",
        )


@rule("profile", "max_steps", *RANKS)
def profile(settings: Settings) -> Mistakes:
    """Check the words, and that the run has these steps and ranks where that is known."""
    try:
        wanted = settings.profiling
    except ValueError as error:
        yield settings.mistake("profile", f": {error}")
        return
    if wanted is None:
        return
    if settings.max_steps is not None and wanted.first > settings.max_steps:
        yield settings.mistake(
            "profile",
            f" records from step {wanted.first} on, but the run has {settings.max_steps} steps (max_steps): write "
            f"steps=1:{settings.max_steps}, for example.",
        )
    ranks = settings.total_ranks
    if ranks is not None and wanted.ranks and wanted.ranks[-1] >= ranks:
        yield settings.mistake(
            "profile", f": there is no rank {wanted.ranks[-1]}; the {ranks} ranks of this run are 0 to {ranks - 1}."
        )


_TEXTS = {
    "checkpoint_frequency": "checkpoint_every",
    "eval_every": "evaluate_every",
    "max_time": "max_seconds",
    "metrics_port": "metrics_address",
    "activation_checkpointing": "recompute",
}
"""Settings that are read from text, and the property that reads one: its ValueError says what to write."""


def _text_rule(name: str) -> Rule:
    """Return the rule that a setting's text can be read."""

    def check(settings: Settings) -> Mistakes:
        try:
            getattr(settings, _TEXTS[name])
        except ValueError as error:
            yield settings.mistake(name, f": {error}")

    return Rule(check, frozenset({name}))


@rule("activation_checkpointing", "compile", "activation_offload")
def budget(settings: Settings) -> Mistakes:
    """Report a share of activations that only compiled code can keep."""
    recompute = settings.recompute
    if recompute is not None and recompute.budget is not None:
        if not settings.compile:
            yield settings.mistake(
                "activation_checkpointing",
                " needs compiled blocks: write compile = true, or activation_checkpointing = true (whole blocks).",
            )
        elif settings.activation_offload:
            yield settings.mistake("activation_checkpointing", " with activation_offload: leave one of them out.")


@rule("channels_last", *STRATEGY, *AXES)
def channels_last(settings: Settings) -> Mistakes:
    """Report a layout of weights that the strategy would not keep."""
    if not settings.channels_last or settings.framework != "torch":
        return
    axis = next((axis for axis in AXES if getattr(settings, axis) > 1), None)
    if axis is not None or settings.facts.needs_contiguous:
        given = f"{axis} = {getattr(settings, axis)}" if axis else f"strategy = {settings.resolved_strategy!r}"
        instead = f"leave {axis} or channels_last out" if axis else "write strategy = 'ddp', or leave channels_last out"
        yield settings.mistake("channels_last", f" with {given}, which needs contiguous weights: {instead}.")


@rule("sync_batch_norm", "fixed_order", *STRATEGY, *AXES)
def sync_batch_norm(settings: Settings) -> Mistakes:
    """Report statistics over ranks that do not step together, or that share the samples."""
    if not settings.sync_batch_norm or settings.framework != "torch":
        return
    axis = next((axis for axis in AXES if getattr(settings, axis) > 1), None)
    if axis is not None:
        why = f"{axis} = {getattr(settings, axis)}, where ranks hold parts of a model or share samples"
        yield settings.mistake("sync_batch_norm", f" with {why}: leave one of them out.")
    elif settings.facts.drifts or settings.facts.has_servers:
        why = f"strategy = {settings.resolved_strategy!r}, whose ranks take steps of their own"
        yield settings.mistake("sync_batch_norm", f" with {why}: write strategy = 'ddp', or leave sync_batch_norm out.")
    elif settings.fixed_order:
        why = "fixed_order: sums over the samples of several ranks have other bits than those of one"
        yield settings.mistake("sync_batch_norm", f" with {why}. Leave one of them out.")


@rule("name")
def name_of_run(settings: Settings) -> Mistakes:
    """Report a path as a name: it would be the name of a folder in ./runs."""
    if settings.name is not None and "/" in settings.name:
        yield settings.mistake("name", ": a name has no '/'. The folder of a run is run_dir.")


RUN_RULES = (
    *map(_text_rule, _TEXTS),
    watched_metrics,
    load_best_at_end,
    fast_dev_run,
    run_name,
    limit_val_batches,
    debug,
    rank_checks,
    spares,
    lost_ranks,
    loss_scale,
    ema_decay,
    profile,
    budget,
    channels_last,
    sync_batch_norm,
    name_of_run,
)
