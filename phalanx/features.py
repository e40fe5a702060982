"""What the heart asks of the rooms above it: functions and modules by name, imported when they are asked for.

The heart trains a user's own model on the user's own data. It never imports a tool, the zoo (`phalanx/zoo/`: reference
models, data sets, recipes) or a feature (`phalanx/recovery/`, `phalanx/diagnosis/`, `phalanx/speed/`,
`phalanx/trackers/`): this table is the only place that names one. The launcher finds here what its ranks run.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from phalanx.errors import UsageError

FEATURES = {
    "adamw8bit": "phalanx.speed:AdamW8bit",
    "captured-step": "phalanx.speed:captured_step",
    "check-metrics": "phalanx.trackers:check_metrics",
    "choose-strategy": "phalanx.tools.plan.auto:choose_strategy",
    "compile-parts": "phalanx.speed:compile_parts",
    "compile-watch": "phalanx.speed:CompileWatch",
    "compiled-calls": "phalanx.speed:CompiledCalls",
    "count-steps": "phalanx.loop.script:count_steps",
    "diagnosis": "phalanx.diagnosis",
    "fp8-layers": "phalanx.speed:use_fp8",
    "histograms": "phalanx.trackers:histogram_callbacks",
    "hub": "phalanx.zoo.hub:hub_path",
    "lora": "phalanx.zoo.models.lora",
    "metrics": "phalanx.trackers:open_metrics",
    "nf4": "phalanx.zoo.models.lora.nf4",
    "own-stream": "phalanx.speed:own_stream",
    "recipe": "phalanx.zoo.recipe:recipe_job",
    "recovery": "phalanx.recovery",
    "register-backend": "phalanx.comm:register_backend",
    "run-job": "phalanx.worker:run_job",
    "spare-activations": "phalanx.speed:spare_activations",
    "step-profile": "phalanx.tools.profile.record:StepProfile",
    "token-recipe": "phalanx.zoo.token_data:fitted_to_tokens",
    "trackers": "phalanx.trackers:open_trackers",
    "verify-rank": "phalanx.tools.verify.execute:run_request",
    "why-no-fp8": "phalanx.speed:why_no_fp8",
}
"""`module:function`, or a module."""


def feature(name: str) -> Any:
    """Return what a name of the table stands for."""
    module, _, function = FEATURES[name].partition(":")
    try:
        target = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):  # a package that the feature itself needs
            raise
        raise UsageError(
            f"this run needs {module}, which is not installed", hint="Install phalanx as a whole: pip install phalanx"
        ) from error
    return getattr(target, function) if function else target
