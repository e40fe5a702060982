"""Comparisons and verdicts as plain data, and their report. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

MEASURES = ("loss", "grad_norm", "activations", "gradients", "parameters")


@dataclass(frozen=True)
class StepRow:
    """Loss and gradient norm of one step, in the reference and in the other run."""

    step: int
    loss: tuple[float, float]
    grad_norm: tuple[float, float]

    def difference(self, measure: str) -> float:
        """Return the relative difference of `loss` or `grad_norm`."""
        first, second = getattr(self, measure)
        if first == second:
            return 0.0
        apart = abs(first - second) / max(abs(first), math.ulp(0.0))
        return math.inf if math.isnan(apart) else apart

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold."""
        row: dict[str, Any] = {"step": self.step}
        for measure in ("loss", "grad_norm"):
            row[measure] = [_json_number(value) for value in getattr(self, measure)]
            row[f"{measure}_difference"] = _json_number(self.difference(measure))
        return row


@dataclass(frozen=True)
class ModuleRow:
    """Largest relative differences of a module: outputs and gradients of the first step, weights after the last."""

    name: str
    kind: str
    activations: float | None
    gradients: float | None
    parameters: float | None

    @property
    def title(self) -> str:
        """The module's path in the model, or its class for the model itself."""
        return self.name or f"({self.kind})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold."""
        values = {name: _json_number(getattr(self, name)) for name in ("activations", "gradients", "parameters")}
        return {"module": self.name, "class": self.kind, **values}


@dataclass(frozen=True)
class Divergence:
    """The first difference of two runs."""

    module: str
    kind: str
    measure: str
    difference: float
    limit: float

    def __str__(self) -> str:
        measure = {
            "activations": "its outputs of the first step differ, and nothing that ran before it does",
            "gradients": "its gradients of the first step differ, and nothing that backward reached before it does",
            "parameters": "the first step agrees, and its weights after the last one differ",
        }[self.measure]
        where = f"{self.module} ({self.kind})" if self.module != f"({self.kind})" else f"the model ({self.kind})"
        return f"{where}: {measure}: {self.difference:.1e}, allowed {self.limit:.1e}"


@dataclass(frozen=True)
class Comparison:
    """The differences of two runs, and their limits."""

    title: str
    labels: tuple[str, str]
    steps: list[StepRow]
    modules: list[ModuleRow]
    limits: dict[str, float]

    @property
    def worst(self) -> dict[str, float]:
        """The largest difference of each measure."""
        differences = {measure: [row.difference(measure) for row in self.steps] for measure in ("loss", "grad_norm")}
        for measure in ("activations", "gradients", "parameters"):
            values = [getattr(row, measure) for row in self.modules]
            differences[measure] = [value for value in values if value is not None]
        return {measure: max(differences[measure], default=0.0) for measure in MEASURES}

    def measures(self, measure: str) -> bool:
        """Whether both runs have this measure."""
        if measure in {"loss", "grad_norm"}:
            return bool(self.steps)
        return any(getattr(row, measure) is not None for row in self.modules)

    @property
    def agrees(self) -> bool:
        """Whether nothing is further apart than allowed."""
        return all(value <= self.limits[measure] for measure, value in self.worst.items())

    @property
    def divergence(self) -> Divergence | None:
        """The first module that differs, in the order of computation.

        Forward passes run down the list; the gradients of a batch come up it, so the last one of the list is the first.
        """
        for measure, rows in (
            ("activations", self.modules),
            ("gradients", self.modules[::-1]),
            ("parameters", self.modules),
        ):
            limit = self.limits[measure]
            for row in rows:
                value = getattr(row, measure)
                if value is not None and value > limit:
                    return Divergence(row.title, row.kind, measure, value, limit)
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold."""
        first = self.divergence
        return {
            "title": self.title,
            "runs": list(self.labels),
            "agrees": self.agrees,
            "limits": self.limits,
            "worst": {name: _json_number(value) for name, value in self.worst.items()},
            "first_diverging_module": None if first is None else first.module,
            "first_diverging_measure": None if first is None else first.measure,
            "steps": [row.to_dict() for row in self.steps],
            "modules": [row.to_dict() for row in self.modules],
        }


def _json_number(value: float | None) -> float | str | None:
    """JSON has no infinity and no NaN."""
    return value if value is None or math.isfinite(value) else str(value)


@dataclass(frozen=True)
class Verdict:
    """The outcome of `verify`: true when the layout gives what it must."""

    subject: str
    layout: str
    claim: str
    """What is to be proved."""
    summary: str
    comparisons: list[Comparison]
    problems: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Whether every comparison agrees."""
        return not self.problems and all(comparison.agrees for comparison in self.comparisons)

    def __bool__(self) -> bool:
        return self.agrees

    def __str__(self) -> str:
        return write_report(self)

    @property
    def first_diverging_module(self) -> str | None:
        """The first module that differs, in the first comparison that does."""
        divergences = (comparison.divergence for comparison in self.comparisons if not comparison.agrees)
        return next((divergence.module for divergence in divergences if divergence is not None), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold."""
        return {
            "subject": self.subject,
            "layout": self.layout,
            "claim": self.claim,
            "summary": self.summary,
            "agrees": self.agrees,
            "first_diverging_module": self.first_diverging_module,
            "problems": self.problems,
            "comparisons": [comparison.to_dict() for comparison in self.comparisons],
        }


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
    "sync_batch_norm = true, GroupNorm and LayerNorm do not."
)


def write_report(verdict: Verdict) -> str:
    """Return the whole report, the verdict last."""
    lines = [f"{verdict.subject} on {verdict.layout}: {verdict.summary}"]
    differing = False
    for comparison in verdict.comparisons:
        # Weights that float32 rounds are shown only for the first comparison that differs.
        is_sharp = max(comparison.limits.values()) < _SHARP
        lines += ["", *_section(comparison, by_module=is_sharp or not (comparison.agrees or differing))]
        differing = differing or not comparison.agrees
    return "\n".join([*lines, "", *_closing(verdict)])


def _section(comparison: Comparison, *, by_module: bool) -> list[str]:
    first, second = comparison.labels
    runs = f"{first:<18}{second:<18}{'difference':<13}"
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
    listed = rows[:_MOST_MODULES]
    names = max(len("module"), *(len(row.title) for row in listed)) + 2
    kinds = max(len("class"), *(len(row.kind) for row in listed)) + 2
    columns = [name for name in _COLUMNS if comparison.measures(name)]
    head = f"  {'module':<{names}}{'class':<{kinds}}" + "".join(f"{_WORDS[name]:<11}" for name in columns)
    lines = [head.rstrip()]
    for row in listed:
        values = [getattr(row, name) for name in columns]
        cells = "".join(f"{'-' if value is None else f'{value:.1e}':<11}" for value in values)
        mark = "<- differs" if _is_apart(comparison, row) else ""
        lines.append(f"  {row.title:<{names}}{row.kind:<{kinds}}{cells}{mark}".rstrip())
    if len(rows) > _MOST_MODULES:
        lines.append(f"  ... and {len(rows) - _MOST_MODULES} more (--json has all)")
    return [*lines, ""]


def _is_apart(comparison: Comparison, row: ModuleRow) -> bool:
    values = {name: getattr(row, name) for name in _COLUMNS}
    return any(value is not None and value > comparison.limits[name] for name, value in values.items())


def _largest(comparison: Comparison) -> list[str]:
    measured = {name: value for name, value in comparison.worst.items() if comparison.measures(name)}
    lines = [f"  {'largest difference':<22}{'found':<11}allowed"]
    return lines + [
        f"  {_WORDS[name]:<22}{value:<11.1e}{comparison.limits[name]:.1e}" for name, value in measured.items()
    ]


def _closing(verdict: Verdict) -> list[str]:
    if verdict.agrees:
        largest = [(max(compared.worst.values()), _short(compared)) for compared in verdict.comparisons]
        differences = ", ".join(f"{value:.1e} in {name}" for value, name in largest if value)
        summary = f"largest difference {differences}" if differences else "no difference at all"
        verb, _, rest = verdict.claim.partition(" ")
        return [f"AGREES  {verdict.layout}: it {verb}{'es' if verb == 'go' else 's'} {rest} ({summary})"]
    lines = [
        f"DIFFERS  {verdict.layout}: it does not {verdict.claim}",
        *(f"  {problem}" for problem in verdict.problems),
    ]
    differing = [comparison for comparison in verdict.comparisons if not comparison.agrees]
    lines += [f"  {_short(compared)}: {compared.divergence or _by_steps(compared)}" for compared in differing]
    first = differing[0].divergence if differing else None
    return [*lines, f"  {_BATCH_NORM}"] if first is not None and first.kind.startswith("BatchNorm") else lines


def _short(comparison: Comparison) -> str:
    return comparison.title.split(":")[0]


def _by_steps(comparison: Comparison) -> str:
    """Return the first step that differs, where no module does."""
    for row in comparison.steps:
        for measure in ("loss", "grad_norm"):
            if row.difference(measure) > comparison.limits[measure]:
                return f"the {measure.replace('_', ' ')} of step {row.step} differs by {row.difference(measure):.1e}"
    raise AssertionError("the comparison has a difference")
