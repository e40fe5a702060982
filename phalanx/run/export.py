"""Export to other programs: safetensors, ONNX, TorchScript."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from phalanx.errors import ModelError, UsageError, first_line
from phalanx.features import feature
from phalanx.loop.evaluate import model_output, user_modes
from phalanx.model import AdapterLayer, WrapsModel, implements
from phalanx.run.weights import save_weights


class _Outputs(nn.Module):
    """Calls a model with inputs alone and returns its outputs alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Any:
        return model_output(self.model, inputs[0] if len(inputs) == 1 else inputs, with_targets=False)


def whole_model(model: nn.Module) -> nn.Module:
    """Return the model that other programs know: without a wrapper's loss, its adapters merged into a copy."""
    model = model.trained_model() if implements(model, WrapsModel) else model
    if not any(implements(module, AdapterLayer) for module in model.modules()):
        return model
    lora = feature("lora")
    merged: nn.Module = lora.remove_lora(lora.merge_lora(copy.deepcopy(model)))
    return merged


def export_model(model: nn.Module, path: Path, format: str, data: Any = None, augment: Any = None) -> None:
    """Write a whole model on the CPU.

    `data`: what a sample of inputs is taken from, for ONNX and TorchScript; `augment`: makes inputs of its batches.
    """
    model = whole_model(model)
    if format == "safetensors":
        save_weights(model, path)
        return
    inputs = example_inputs(data, augment)
    write = {"onnx": _write_onnx, "torchscript": _write_torchscript}[format]
    with user_modes(model):
        write(_Outputs(model.eval()), inputs, path)


def example_inputs(data: Any, augment: Any = None) -> tuple[torch.Tensor, ...]:
    """Return the inputs of a batch of two samples: with one, an exporter would take the batch for a constant."""
    if data is None:
        raise UsageError(
            "ONNX and TorchScript need an example of the model's inputs",
            hint="Fit first, or give data: save(path, data=...)",
        )
    batch = data
    if isinstance(data, DataLoader):
        batch = next(iter(data))
    elif (
        hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
        and not isinstance(data, (torch.Tensor, tuple, Mapping))
    ):
        batch = default_collate([data[0], data[min(1, len(data) - 1)]])
    batch = batch if augment is None else augment(batch, None)
    if isinstance(batch, Mapping):
        raise UsageError("models that are called with a dict cannot be exported yet", hint="Export hf or safetensors.")
    inputs = (batch,) if isinstance(batch, torch.Tensor) else tuple(batch)
    return inputs[:1] if len(inputs) == 1 else inputs[:-1]


def _write_onnx(model: nn.Module, inputs: tuple[torch.Tensor, ...], path: Path) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"writing ONNX needs the package {error.name}", hint="Run: pip install 'phalanx[onnx]'"
        ) from None
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it reports every package that is not installed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(
                model, inputs, dynamic_shapes=(tuple(_free_sizes(value) for value in inputs),)
            )
            torch.onnx.export(
                program,
                inputs,
                str(path),
                dynamo=True,
                external_data=False,
                verbose=False,
                dynamic_shapes=(_names_of_sizes(program),),
            )
    except Exception as error:  # torch has many errors for what it cannot express
        raise ModelError(f"the model cannot be written as ONNX: {first_line(error)}") from error


def _free_sizes(inputs: torch.Tensor) -> dict[int, Any]:
    """Return the dimensions that may have another size than the example's: the batch, and a sequence's length.

    The second dimension is a length or a number of features: torch finds out whether the model fixes it.
    """
    batch = {0: torch.export.Dim("batch")}
    return {**batch, 1: torch.export.Dim.AUTO} if inputs.ndim > 1 and inputs.shape[1] > 1 else batch


def _names_of_sizes(program: torch.export.ExportedProgram) -> tuple[dict[int, str], ...]:
    """Return the names of the sizes that are free in a program, by dimension, for each input."""
    inputs = set(program.graph_signature.user_inputs)
    shapes = [node.meta["val"].shape for node in program.graph.nodes if node.name in inputs]
    free = [[not str(size).isdecimal() for size in shape[:2]] for shape in shapes]
    return tuple({axis: ("batch", "length")[axis] for axis, is_free in enumerate(flags) if is_free} for flags in free)


def _write_torchscript(model: nn.Module, inputs: tuple[torch.Tensor, ...], path: Path) -> None:
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch.jit is deprecated, and asked for here
            jit: Any = torch.jit  # its trace has no annotations
            jit.trace(model, inputs).save(str(path))
    except Exception as error:
        raise ModelError(f"the model cannot be traced: {first_line(error)}") from error
