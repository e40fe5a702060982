"""Write a trained model for other programs: safetensors, a Hugging Face folder, ONNX or TorchScript."""

from __future__ import annotations

import copy
import json
import logging
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from phalanx.data.sets.chat_template import PLAIN, read_template
from phalanx.errors import ModelError, UsageError, first_line
from phalanx.loop.evaluate import model_output, own_modes
from phalanx.models.contract import WrapsModel, implements
from phalanx.models.hf import save_pretrained
from phalanx.models.hf.files import end_tokens_of, read_json
from phalanx.models.lora import adapters, merge_lora, remove_lora
from phalanx.recipes import CONVERSATIONS, Recipe
from phalanx.recipes.token_data import TEXT_FILES, read_token_manifest
from phalanx.trainers.weights import save_weights

_TOKENIZER_CONFIG = "tokenizer_config.json"


class _Outputs(nn.Module):
    """Calls a model with inputs alone and returns its outputs alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Any:
        return model_output(self.model, inputs[0] if len(inputs) == 1 else inputs, with_targets=False)


def export_model(
    model: nn.Module,
    path: Path,
    format: str,
    data: Any = None,
    augment: Any = None,
    recipe: Recipe | None = None,
    classes: Sequence[str] = (),
) -> None:
    """Write a whole model on the CPU, its adapters merged, which other programs do not know.

    `data`: what a sample of inputs is taken from, for ONNX and TorchScript; `augment`: makes inputs of its batches.
    `recipe`: that of the run; a Hugging Face folder gets the tokenizer and the template of its conversations.
    `classes`: the names of the labels, which a Hugging Face folder keeps as id2label.
    """
    chat = _chat_of(recipe) if format == "hf" and recipe is not None else None
    model = model.trained_model() if implements(model, WrapsModel) else model
    if adapters(model):
        model = remove_lora(merge_lora(copy.deepcopy(model)))
    if format == "safetensors":
        save_weights(model, path)
    elif format == "hf":
        write_folder: Any = getattr(model, "save_pretrained", None)  # models of transformers have it
        if write_folder is not None:
            write_folder(path)
        else:
            save_pretrained(model, path)
        # The folder that the model was read from: set by transformers, and for our own models.
        _copy_tokenizer(Path(str(getattr(model, "name_or_path", "") or path)), path)
        if chat is not None:
            chat.write(path)
        if classes:
            _name_labels(path / "config.json", classes)
    else:
        inputs = example_inputs(data, augment)
        write = {"onnx": _write_onnx, "torchscript": _write_torchscript}[format]
        with own_modes(model):
            write(_Outputs(model.eval()), inputs, path)


def _name_labels(config: Path, classes: Sequence[str]) -> None:
    """Write the names of labels as transformers has them, where the model has as many outputs."""
    document = read_json(config)
    if len(document.get("id2label", classes)) == len(classes):
        document["id2label"] = {str(number): name for number, name in enumerate(classes)}
        document["label2id"] = {name: number for number, name in enumerate(classes)}
        config.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _copy_tokenizer(source: Path, target: Path, *, replace: bool = False) -> None:
    """Copy the tokenizer of a folder, if it is one: without it the model's tokens have no meaning."""
    for pattern in TEXT_FILES if source.is_dir() else ():
        for file in source.glob(pattern):
            if file.is_file() and (replace or not (target / file.name).exists()):
                shutil.copy(file, target / file.name)
    if (document := read_token_manifest(source)) is not None and not (target / _TOKENIZER_CONFIG).exists():
        from phalanx.data.sets.token_shards import read_tokenizer  # few exports need it

        end = read_tokenizer(source / "tokenizer.json").id_to_token(document["tokenizer"]["end"])
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
        (target / _TOKENIZER_CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


class _Chat(NamedTuple):
    """What a run made tokens of conversations with."""

    tokenizer: Path
    template: str | None
    """Jinja's text, where it is not the tokenizer's own."""
    end_tokens: frozenset[int]

    def write(self, folder: Path) -> None:
        """Write it where transformers, `phalanx serve` and the next run look for it."""
        _copy_tokenizer(self.tokenizer, folder, replace=True)
        if self.template is not None:
            (folder / "chat_template.jinja").write_text(self.template, encoding="utf-8")
        path = folder / "generation_config.json"
        settings = read_json(path) if path.is_file() else {}
        settings["eos_token_id"] = sorted(self.end_tokens | end_tokens_of(settings))
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _chat_of(recipe: Recipe) -> _Chat | None:
    """Return the tokenizer and template of a run on conversations; of bytes there is none that others could read."""
    data = recipe.fitted().data if recipe.data.get("name") in CONVERSATIONS else {}
    tokenizer, template = data.get("tokenizer"), data.get("template")
    if tokenizer is None:
        return None
    ends = frozenset(read_template(tokenizer, template).end_tokens)
    if template not in (None, "plain"):
        return _Chat(Path(tokenizer), Path(template).expanduser().read_text(encoding="utf-8"), ends)
    return _Chat(Path(tokenizer), None if template is None else PLAIN, ends)


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
            program = torch.export.export(model, inputs, dynamic_shapes=(tuple(_free_sizes(each) for each in inputs),))
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
    given = set(program.graph_signature.user_inputs)
    shapes = [node.meta["val"].shape for node in program.graph.nodes if node.name in given]
    free = [[not str(size).isdecimal() for size in shape[:2]] for shape in shapes]
    return tuple({place: ("batch", "length")[place] for place, is_free in enumerate(each) if is_free} for each in free)


def _write_torchscript(model: nn.Module, inputs: tuple[torch.Tensor, ...], path: Path) -> None:
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch.jit is deprecated, and asked for here
            jit: Any = torch.jit  # its trace has no annotations
            jit.trace(model, inputs).save(str(path))
    except Exception as error:
        raise ModelError(f"the model cannot be traced: {first_line(error)}") from error
