"""Events as text: the same on a terminal, in a log file and in the summary; how fast a run goes, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from phalanx.observe.events import (
    CheckpointSaved,
    EpochDone,
    MetricsReported,
    RankLost,
    Recovered,
    RunEnded,
    RunStarted,
    ServersReported,
    StepDone,
)
from phalanx.observe.goodput import CATEGORIES

_TITLES = {
    "finished": "Training finished",
    "stopped": "Training stopped",
    "preempted": "Training preempted",
    "interrupted": "Training interrupted",
    "failed": "Training failed",
}


def start_line(run: RunStarted) -> str:
    """Return what runs where, and how the global batch is composed."""
    per_step = run.batch_size * run.accumulation
    parts = [*_layout(run), run.precision]
    if per_step:
        replicas = run.global_batch // per_step
        parts.append(f"global batch {run.global_batch} = {run.batch_size} x {run.accumulation} x {replicas}")
    return " · ".join([*parts, _parameters(run)])


def _layout(run: RunStarted) -> tuple[str, str]:
    """Return the ranks and how they share the model: `4 ranks on cuda`, `fsdp 2 x tensor 2`."""
    ranks = "1 rank" if run.world_size == 1 else f"{run.world_size} ranks"
    return f"{ranks} on {run.device}", run.layout or run.strategy


def _parameters(run: RunStarted) -> str:
    """Return how many parameters the model has, and how many are trained where those are fewer."""
    words, trained = f"{run.parameters:,} parameters", run.trained_parameters
    return words if trained in (None, run.parameters) else f"{trained:,} of {words} trained"


def speed_note(ranks_per_gpu: int) -> str:
    """Return what must be said beside each figure of speed where ranks share a GPU; else nothing."""
    return f"{ranks_per_gpu} ranks per GPU: speed is not representative" if ranks_per_gpu > 1 else ""


def step_parts(event: StepDone, run: RunStarted | None, logged: Mapping[str, float] | None = None) -> list[str]:
    """Return the figures of a step, the most important first: a narrow terminal drops from the end.

    `logged`: the values that the user logged.
    """
    shared = " (shared GPU)" if run and run.ranks_per_gpu > 1 else ""
    parts = [] if event.loss is None else [f"loss {event.loss:.4f}"]
    parts += [f"{name} {value:.4g}" for name, value in (logged or {}).items() if name != "loss" or event.loss is None]
    parts.append(f"lr {event.learning_rate:.1e}")
    if event.grad_norm is not None:
        parts.append(f"grad {event.grad_norm:.2f}")
    if event.tokens_per_second is not None:
        parts.append(f"{rate(event.tokens_per_second)} tokens/s{shared}")
    elif event.samples_per_second:
        parts.append(f"{rate(event.samples_per_second)} samples/s{shared}")
    elif event.step_seconds:
        parts.append(f"{rate(1 / event.step_seconds)} steps/s{shared}")
    if event.mfu is not None:
        parts.append(f"MFU {event.mfu:.1%}")
    if event.memory_bytes:
        parts.append(f"mem {size(event.memory_bytes)}")
    return parts


def step_line(event: StepDone, run: RunStarted | None, logged: Mapping[str, float] | None = None) -> str:
    """Write a step as one line of a stable form: `step 120/450 epoch 2/5 loss 0.4312 lr 1.0e-03 ...`."""
    step = of_total(event.step, run.total_steps if run else None)
    epoch = [f"epoch {of_total(event.epoch, run.epochs if run else None)}"] if event.epoch else []
    return " ".join([f"step {step}", *epoch, *step_parts(event, run, logged)])


def metrics_line(event: MetricsReported, run: RunStarted | None) -> str:
    """Write what was measured on a split of the data."""
    values = " ".join(f"{name} {value:.4f}" for name, value in event.values.items())
    epoch = f" epoch {of_total(event.epoch, run.epochs if run else None)}" if event.epoch else ""
    return f"{event.split} step {event.step}{epoch} {values}"


def epoch_line(event: EpochDone, run: RunStarted | None) -> str:
    """Write an epoch as one line: what was learnt, what was measured, how long it took."""
    parts = [f"epoch {of_total(event.epoch, run.epochs if run else None)}", f"train loss {event.train_loss:.4f}"]
    parts += [f"val {name} {value:.4f}" for name, value in event.val.items()]
    return " · ".join([*parts, f"step {event.step}", duration(event.seconds)])


def checkpoint_line(event: CheckpointSaved) -> str:
    """Return where a checkpoint is, its size and its time."""
    written = f"{size(event.bytes)} in {event.seconds:.2f} s"
    if event.written is not None and event.written < event.bytes / 2:
        written = f"{size(event.written)} of {written}"
    waited = f", waited {event.stall:.2f} s" if event.stall >= 0.01 else ""
    return f"{'best ' * event.best}checkpoint {event.path} ({written}{waited})"


def lost_line(event: RankLost) -> str:
    """Return which rank was lost, and what is done about it."""
    action = "a new rank takes its place" if event.action == "replace" else f"going on with {_ranks(event.size)}"
    return f"rank {event.lost} {event.how}; {action} ({event.why})"


def recovered_line(event: Recovered) -> str:
    """Return how long the ranks needed to go on, and from where."""
    again = f", {event.lost_steps} step{'s' * (event.lost_steps > 1)} done again" if event.lost_steps else ""
    goes = "goes" if event.world_size == 1 else "go"
    took = f"{event.seconds:.2f} s{again}"
    return f"{_ranks(event.world_size)} {goes} on after step {event.step} ({took}): {event.reason}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def servers_lines(event: ServersReported) -> list[str]:
    """Return the staleness of gradients, the speed of updates, and the load of each shard."""
    parts = [f"parameter server: {event.mode}", f"{event.updates:,} updates, {rate(event.updates_per_second)}/s"]
    if event.mode != "sync":
        parts.append(f"staleness {event.staleness_mean:.1f} updates, at most {event.staleness_max}")
        parts.append(f"at most {event.ahead_max} steps ahead")
    if event.lost:
        parts.append(f"{event.lost} updates lost when a shard came back")
    lines = [" · ".join(parts)]
    for number, shard in enumerate(event.shards):
        traffic = f"{size(shard['bytes_in'])} in, {size(shard['bytes_out'])} out"
        lines.append(f"  shard {number}: {traffic}, {shard['requests']:,} requests, {shard['busy']:.0%} busy")
    hidden = f"{duration(event.exchange_seconds)}, of which it waited {duration(event.waited_seconds)}"
    return [*lines, f"  messages of the main rank: {hidden}"]


_MIN_SHOWN_SECONDS = 0.5
_MIN_SHOWN_SHARE = 0.005
_MIN_GOODPUT_SECONDS = 60.0
"""The time of a shorter run is mostly its start, which says nothing of a long one."""


def summary_title(end: RunEnded) -> str:
    """Return the headline of the summary: how the run ended, and why."""
    title = _TITLES.get(end.status, f"Training {end.status}")
    return f"{title}: {end.reason}" if end.reason else title


def summary_rows(end: RunEnded, run: RunStarted | None, *, detailed: bool = True) -> list[tuple[str, str]]:
    """Return the rows of the summary; what is unknown has no row. Those of `detailed` are on `phalanx runs show`."""
    steps = f"{end.step:,}" + (f" of {run.total_steps:,}" if run and run.total_steps else "")
    speed = f"{rate(end.throughput)} samples/s"
    if end.tokens_per_second is not None:
        speed += f", {rate(end.tokens_per_second)} tokens/s"
    if end.speedup is not None:
        speed += f", {end.speedup:.2f}x the reference"
    if end.whole_throughput is not None:
        speed += f" ({rate(end.whole_throughput)} samples/s over the whole run)"
    rows = [("time", duration(end.total_time)), ("steps", steps), ("throughput", speed)]
    if end.mfu is not None:
        whole = "" if end.whole_mfu is None else f" ({end.whole_mfu:.1%} over the whole run)"
        rows.append(("MFU", f"{end.mfu:.1%}{whole}"))
    if end.goodput and (detailed or end.goodput.get("lost") or sum(end.goodput.values()) >= _MIN_GOODPUT_SECONDS):
        rows.append(("goodput", goodput_words(end.goodput)))
    if end.first_steps_seconds is not None and end.first_steps_seconds >= _MIN_SHOWN_SECONDS:
        rows.append(("first step", f"{duration(end.first_steps_seconds)}, not in the throughput"))
    if end.compile_seconds >= _MIN_SHOWN_SECONDS:
        graphs = f"{end.compile_graphs} graph{'s' * (end.compile_graphs != 1)}"
        rows.append(("compilation", f"{duration(end.compile_seconds)} ({graphs}), not in the throughput"))
    if end.slow_laps and end.slow_seconds >= _MIN_SHOWN_SECONDS:
        laps = f"{end.slow_laps} of {end.laps} laps"
        rows.append(("slow steps", f"{duration(end.slow_seconds)} in {laps}, in the throughput"))
    if end.checkpoint_stall >= _MIN_SHOWN_SECONDS:
        rows.append(("checkpoints", f"waited {duration(end.checkpoint_stall)} for them, not in the throughput"))
    if run is not None:
        rows += [("", note)] if (note := speed_note(run.ranks_per_gpu)) else []
        rows.append(("layout", ", ".join(_layout(run))))
        rows += [("parameters", _parameters(run).removesuffix(" parameters"))] if detailed else []
    if end.sent_bytes is not None and detailed:
        rows.append(("sent", sent_words(end.sent_bytes, end.plain_bytes)))
    if end.exchange_hidden is not None and end.exchange_waited is not None and detailed:
        hidden = f"{end.exchange_hidden:.2f} s of communication during computation"
        rows.append(("exchange", f"{hidden}, {end.exchange_waited:.2f} s waited for"))
    rows += [(f"best {name}", f"{value:.4f}") for name, value in end.best.items()]
    best = end.best_checkpoint
    if best is not None and end.best_value is not None:
        best += f" ({end.best_metric} {end.best_value:.4f})" + ": the model has its weights" * end.loaded_best
    places = [
        ("best checkpoint", best),
        ("last checkpoint", end.checkpoint if detailed or end.checkpoint != end.best_checkpoint else None),
        ("TensorBoard", run.tensorboard_dir if run and detailed else None),
        ("logs", (run.log_dir or run.run_dir) if run else None),
    ]
    return rows + [(label, path) for label, path in places if path]


def goodput_words(seconds: Mapping[str, float]) -> str:
    """Return what the wall time was spent on: `91.2% productive, 5.1% start-up: import, 1.0% data wait`."""
    total = sum(seconds.values()) or 1.0
    shares = {CATEGORIES.get(name, name): spent / total for name, spent in seconds.items()}
    first = f"{seconds.get('productive', 0.0) / total:.1%} productive"
    rest = sorted(((share, name) for name, share in shares.items() if name != "productive"), reverse=True)
    return ", ".join([first, *(f"{share:.1%} {name}" for share, name in rest if share >= _MIN_SHOWN_SHARE)])


def summary_sentence(end: RunEnded, run: RunStarted | None) -> str:
    """Return the summary as one line."""
    best = [f"best {name} {value:.4f}" for name, value in end.best.items()]
    run_dir = [run.run_dir] if run and run.run_dir else []
    parts = [f"{end.step:,} steps in {duration(end.total_time)}", *best, *run_dir]
    return f"{summary_title(end)}: {', '.join(parts)}"


def table(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Return rows of equal length as aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"{indent}{line}".rstrip() for line in lines)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in words: "rank 3", "ranks 0-2, 5"."""
    ordered = sorted(ranks)
    parts: list[list[int]] = []
    for rank in ordered:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    spans = [f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts]
    return f"rank{'s' * (len(ordered) > 1)} {', '.join(spans)}"


def sent_words(sent: int, plain: int | None) -> str:
    """Return how many bytes a rank sent, and what share of ddp's: `1.2 MB per rank, 2.0% of ddp's 60 MB`."""
    words = f"{size(sent)} per rank"
    is_less = plain is not None and sent < 0.999 * plain
    return f"{words}, {sent / plain:.1%} of ddp's {size(plain)}" if plain and is_less else words


def of_total(value: int, total: int | None) -> str:
    """Write `120/450`, or `120` when the total is unknown."""
    return f"{value}/{total}" if total else str(value)


def rate(value: float) -> str:
    """Write a rate; below 10 with two decimals."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def size(count: float, *, binary: bool = False) -> str:
    """Write a number of bytes, as `312 MB`; `binary`: as `298 MiB`, the unit of the planner."""
    for unit in ("bytes", "KiB", "MiB", "GiB") if binary else ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if count >= 10 or unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024 if binary else 1000
    return f"{count:.1f} {'TiB' if binary else 'TB'}"


def duration(seconds: float) -> str:
    """Write a duration: `4.2 s`, `3:07`, `2:03:07`."""
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)


def span(seconds: float) -> str:
    """Write a duration that may be long in one unit: `47.7 days`, `7.9 h`, `5:53`, `0.4 s`."""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.1f} days"
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else duration(seconds)


def clock(seconds: float) -> str:
    """Write a duration as minutes and seconds, from an hour on with hours."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Pace:
    """Estimates the remaining time from the first step or batch that was seen: what came before it was start-up."""

    def __init__(self, done: int, total: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`done`: how many were done at the beginning, of `total` where that is known."""
        self.total = total
        self._clock = clock
        self._began = clock()
        self._before = done
        self._first: tuple[float, int] | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._began

    def remaining(self, done: int) -> float | None:
        """Return the seconds that are left when `done` are done; None where nothing can be said yet."""
        now = self._clock()
        if self._first is None and done > self._before:
            self._first = (now, done)
        if self.total is None or self._first is None:
            return None
        since, count = now - self._first[0], done - self._first[1]
        if count <= 0:  # only the first is done: it counts although it has the start-up in it
            since, count = now - self._began, max(1, done - self._before)
        return since / count * max(0, self.total - done)
