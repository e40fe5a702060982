"""What a comparison found, as plain data: how far apart, how far allowed, and where it began. No torch here."""

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
        mine, theirs = getattr(self, measure)
        if mine == theirs:
            return 0.0
        apart = abs(mine - theirs) / max(abs(mine), math.ulp(0.0))
        return math.inf if math.isnan(apart) else apart


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


@dataclass(frozen=True)
class Divergence:
    """Where two runs part, as early as it can be seen."""

    module: str
    kind: str
    measure: str
    difference: float
    limit: float

    def __str__(self) -> str:
        seen = {
            "activations": "its outputs of the first step differ, and nothing that ran before it does",
            "gradients": "its gradients of the first step differ, and nothing that backward reached before it does",
            "parameters": "the first step agrees, and its weights after the last one differ",
        }[self.measure]
        where = f"{self.module} ({self.kind})" if self.module != f"({self.kind})" else f"the model ({self.kind})"
        return f"{where}: {seen}: {self.difference:.1e}, allowed {self.limit:.1e}"


@dataclass(frozen=True)
class Comparison:
    """One run beside another."""

    title: str
    labels: tuple[str, str]
    steps: list[StepRow]
    modules: list[ModuleRow]
    limits: dict[str, float]

    @property
    def worst(self) -> dict[str, float]:
        """The largest difference of each measure."""
        found = {measure: [row.difference(measure) for row in self.steps] for measure in ("loss", "grad_norm")}
        for measure in ("activations", "gradients", "parameters"):
            values = [getattr(row, measure) for row in self.modules]
            found[measure] = [value for value in values if value is not None]
        return {measure: max(found[measure], default=0.0) for measure in MEASURES}

    def measures(self, measure: str) -> bool:
        """Whether both runs tell this measure at all."""
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
            "steps": [_step(row) for row in self.steps],
            "modules": [_module(row) for row in self.modules],
        }


def _step(row: StepRow) -> dict[str, Any]:
    found: dict[str, Any] = {"step": row.step}
    for measure in ("loss", "grad_norm"):
        found[measure] = [_json_number(value) for value in getattr(row, measure)]
        found[f"{measure}_difference"] = _json_number(row.difference(measure))
    return found


def _module(row: ModuleRow) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in ("activations", "gradients", "parameters")}
    return {"module": row.name, "class": row.kind, **{name: _json_number(value) for name, value in values.items()}}


def _json_number(value: float | None) -> float | str | None:
    """JSON has no infinity and no NaN."""
    return value if value is None or math.isfinite(value) else str(value)


@dataclass(frozen=True)
class Verdict:
    """The outcome of `verify`: true when the layout gives what it must."""

    subject: str
    layout: str
    claim: str
    """What is to be proved of the layout."""
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
        from phalanx.trainers.verify.report import write_report  # words about findings; findings need none

        return write_report(self)

    @property
    def first_diverging_module(self) -> str | None:
        """The module where the first comparison that differs begins to."""
        found = (comparison.divergence for comparison in self.comparisons if not comparison.agrees)
        return next((divergence.module for divergence in found if divergence is not None), None)

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
