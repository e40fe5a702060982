"""A verdict in words and tables. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.trainers.verify.findings import Comparison, ModuleRow, StepRow, Verdict

_MOST_MODULES = 40
_SHARP = 1e-6
_COLUMNS = ("activations", "gradients", "parameters")
_WORDS = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "activations": "outputs",
    "gradients": "gradients",
    "parameters": "weights",
}
_BATCH_NORM = (
    "Batch normalisation uses the mean and variance of each rank's own samples, so it depends on the layout by design. "
    "torch.nn.SyncBatchNorm (CUDA), GroupNorm and LayerNorm do not."
)


def write_report(verdict: Verdict) -> str:
    """Return the whole report, the verdict last."""
    lines = [f"{verdict.subject} on {verdict.layout}: {verdict.summary}"]
    parted = False
    for comparison in verdict.comparisons:
        # Weights that float32 rounds say little by themselves; where runs part is worth showing, once.
        is_sharp = max(comparison.limits.values()) < _SHARP
        lines += ["", *_section(comparison, by_module=is_sharp or not (comparison.agrees or parted))]
        parted = parted or not comparison.agrees
    return "\n".join([*lines, "", *_closing(verdict)])


def _section(comparison: Comparison, *, by_module: bool) -> list[str]:
    mine, theirs = comparison.labels
    runs = f"{mine:<18}{theirs:<18}{'difference':<13}"
    lines = [
        comparison.title,
        f"  {'step':<6}{'loss':<49}gradient norm",
        f"  {'':<6}{runs}{runs}".rstrip(),
        *(f"  {row.step:<6}{_pair(row, 'loss')}{_pair(row, 'grad_norm')}".rstrip() for row in comparison.steps),
        "",
    ]
    return [*lines, *(_modules(comparison) if by_module else []), *_largest(comparison)]


def _pair(row: StepRow, measure: str) -> str:
    first, second = getattr(row, measure)
    return f"{first:<18.12g}{second:<18.12g}{row.difference(measure):<13.1e}"


def _modules(comparison: Comparison) -> list[str]:
    """Return the modules that hold parameters or differ, in the order of the forward pass."""
    rows = [row for row in comparison.modules if row.parameters is not None or _is_apart(comparison, row)]
    if not rows:
        return []
    shown = rows[:_MOST_MODULES]
    names = max(len("module"), *(len(row.title) for row in shown)) + 2
    kinds = max(len("class"), *(len(row.kind) for row in shown)) + 2
    columns = [name for name in _COLUMNS if comparison.measures(name)]
    head = f"  {'module':<{names}}{'class':<{kinds}}" + "".join(f"{_WORDS[name]:<11}" for name in columns)
    lines = [head.rstrip()]
    for row in shown:
        cells = "".join(f"{_number(getattr(row, name)):<11}" for name in columns)
        mark = "<- differs" if _is_apart(comparison, row) else ""
        lines.append(f"  {row.title:<{names}}{row.kind:<{kinds}}{cells}{mark}".rstrip())
    if len(rows) > _MOST_MODULES:
        lines.append(f"  ... and {len(rows) - _MOST_MODULES} more (--json has all)")
    return [*lines, ""]


def _is_apart(comparison: Comparison, row: ModuleRow) -> bool:
    values = {name: getattr(row, name) for name in _COLUMNS}
    return any(value is not None and value > comparison.limits[name] for name, value in values.items())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _largest(comparison: Comparison) -> list[str]:
    measured = {name: value for name, value in comparison.worst.items() if comparison.measures(name)}
    lines = [f"  {'largest difference':<22}{'found':<11}allowed"]
    return lines + [
        f"  {_WORDS[name]:<22}{value:<11.1e}{comparison.limits[name]:.1e}" for name, value in measured.items()
    ]


def _closing(verdict: Verdict) -> list[str]:
    if verdict.agrees:
        found = ", ".join(_how_close(each) for each in verdict.comparisons)
        return [f"AGREES  {verdict.layout}: does {verdict.claim} ({found})"]
    lines = [f"DIFFERS  {verdict.layout}: does not {verdict.claim}", *(f"  {problem}" for problem in verdict.problems)]
    parted = [comparison for comparison in verdict.comparisons if not comparison.agrees]
    lines += [f"  {_short(each)}: {each.divergence or _by_steps(each)}" for each in parted]
    first = parted[0].divergence if parted else None
    return [*lines, f"  {_BATCH_NORM}"] if first is not None and first.kind.startswith("BatchNorm") else lines


def _how_close(comparison: Comparison) -> str:
    largest = max(comparison.worst.values())
    return f"{_short(comparison)} to {largest:.1e}" if largest else "no difference at all"


def _short(comparison: Comparison) -> str:
    return comparison.title.split(":")[0]


def _by_steps(comparison: Comparison) -> str:
    """Name the first step that differs, where no module's own numbers do."""
    for row in comparison.steps:
        for measure in ("loss", "grad_norm"):
            if row.difference(measure) > comparison.limits[measure]:
                return f"the {measure.replace('_', ' ')} of step {row.step} differs by {row.difference(measure):.1e}"
    raise AssertionError("something differs, for the comparison says so")
