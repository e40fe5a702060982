"""Write a trained model for other programs: safetensors, a Hugging Face folder, ONNX or TorchScript."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from phalanx.errors import ModelError, UsageError
from phalanx.loop.evaluate import model_output
from phalanx.models.hf import save_pretrained
from phalanx.trainers.weights import save_weights


class _Outputs(nn.Module):
    """Calls a model with inputs alone and returns its outputs alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Any:
        return model_output(self.model, inputs[0] if len(inputs) == 1 else inputs, with_targets=False)


def export_model(model: nn.Module, path: Path, format: str, data: Any = None) -> None:
    """Write a whole model on the CPU; `data`: what a sample of inputs is taken from, for ONNX and TorchScript."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if format == "safetensors":
        save_weights(model, path)
    elif format == "hf":
        write_folder: Any = getattr(model, "save_pretrained", None)  # models of transformers have it
        if write_folder is not None:
            write_folder(path)
        else:
            save_pretrained(model, path)
    else:
        inputs = example_inputs(data)
        was_training = model.training
        try:
            write = {"onnx": _write_onnx, "torchscript": _write_torchscript}[format]
            write(_Outputs(model.eval()), inputs, path)
        finally:
            model.train(was_training)


def example_inputs(data: Any) -> tuple[torch.Tensor, ...]:
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
    batch = torch.export.Dim("batch")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it reports every package that is not installed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model,
                inputs,
                str(path),
                dynamo=True,
                external_data=False,
                verbose=False,
                dynamic_shapes=(tuple({0: batch} for _ in inputs),),
            )
    except Exception as error:  # torch has many errors for what it cannot express
        raise ModelError(f"the model cannot be written as ONNX: {str(error).splitlines()[0]}") from error


def _write_torchscript(model: nn.Module, inputs: tuple[torch.Tensor, ...], path: Path) -> None:
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch.jit is deprecated, and asked for here
            jit: Any = torch.jit  # its trace has no annotations
            jit.trace(model, inputs).save(str(path))
    except Exception as error:
        raise ModelError(f"the model cannot be traced: {str(error).splitlines()[0]}") from error
