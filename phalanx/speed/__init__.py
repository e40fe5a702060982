"""How steps get faster or smaller: CUDA graphs, compilation, activations, 8-bit products and states, fused kernels.

Settings switch each of them on. The rest of the package gets them here (`phalanx.features`): each module is imported
when one of its functions is first called for, once per run and never per step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.lazy import lazy_names

if TYPE_CHECKING:
    from phalanx.speed import kernels
    from phalanx.speed.activations import spare_activations
    from phalanx.speed.adamw8bit import AdamW8bit
    from phalanx.speed.capture import captured_step, own_stream
    from phalanx.speed.compilation import CompiledCalls, CompileWatch, compile_parts
    from phalanx.speed.fp8 import use_fp8, why_no_fp8

_NAMES = {
    ".activations": "spare_activations",
    ".adamw8bit": "AdamW8bit",
    ".capture": "captured_step own_stream",
    ".compilation": "CompiledCalls CompileWatch compile_parts",
    ".fp8": "use_fp8 why_no_fp8",
    ".kernels": "kernels",
}
__getattr__ = lazy_names(__name__, _NAMES)

__all__ = [
    "AdamW8bit",
    "CompileWatch",
    "CompiledCalls",
    "captured_step",
    "compile_parts",
    "kernels",
    "own_stream",
    "spare_activations",
    "use_fp8",
    "why_no_fp8",
]
