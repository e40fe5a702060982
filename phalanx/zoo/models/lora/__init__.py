"""LoRA: small trained matrices next to the frozen linear layers of any model (Hu et al., 2021).

A layer's output W x becomes W x + (alpha / rank) B A x. Only A and B are trained; B starts at zero, so that training
starts from the model as it was. An adapter is a module named `lora` in its layer, whose own class and names stay.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx import torch_compat
from phalanx.errors import UsageError, nearest
from phalanx.zoo.models.lora.nf4 import NF4Linear, restore_base

Model = TypeVar("Model", bound=nn.Module)


class Adapter(nn.Module):
    """The two matrices of one layer. In half-precision models they are float32: small updates would be rounded away."""

    def __init__(self, layer: nn.Module, *, rank: int, scale: float, dropout: float) -> None:
        super().__init__()
        weight: Any = layer.weight
        outputs, inputs = reversed(weight.shape) if is_transposed(layer) else weight.shape
        if isinstance(layer, NF4Linear):  # whose weight is bytes
            outputs, inputs = layer.out_features, layer.in_features
        kind = {"dtype": torch.promote_types(weight.dtype, torch.float32), "device": weight.device}
        self.A = nn.Parameter(torch.empty(rank, inputs, **kind))
        self.B = nn.Parameter(torch.empty(outputs, rank, **kind))
        self.dropout = nn.Dropout(dropout)
        self.scale = scale
        self.merged = self.off = False
        self.register_state_dict_post_hook(_hide_merged)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_note_loaded)  # type: ignore[no-untyped-call]

    @property
    def rank(self) -> int:
        """The inner size of the two matrices."""
        return self.A.shape[0]

    def reset_adapter(self, generator: torch.Generator | None = None) -> None:
        """Initialise: A uniform as in torch's linear layers, B zero. Drawn on the CPU where a generator is given."""
        drawn = self.A.detach() if generator is None else torch.empty(self.A.shape, dtype=self.A.dtype)
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        with torch.no_grad():
            self.A.copy_(drawn)
            self.B.zero_()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the term that is added to the layer's output."""
        inputs = self.dropout(inputs)
        if not torch.is_autocast_enabled(inputs.device.type):
            inputs = inputs.to(self.A.dtype)
        return F.linear(F.linear(inputs, self.A), self.B) * self.scale

    def extra_repr(self) -> str:
        """Return the text for `print(model)`."""
        return f"rank={self.rank}, scale={self.scale:g}{', merged' if self.merged else ''}"


def _hide_merged(adapter: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Save a merged adapter as one that adds nothing: the weights have it already, and a state does not say so."""
    if adapter.merged:
        state[f"{prefix}B"] = torch.zeros_like(adapter.B)


def _note_loaded(adapter: Any, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Expect weights without the adapter, as they are in a state that has the adapter's matrices."""
    if f"{prefix}B" in state:
        adapter.merged = False


def lora(
    model: Model,
    rank: int = 8,
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: str | Iterable[str] | None = None,
    seed: int = 0,
) -> Model:
    """Freeze a model and give its linear layers adapters, in place; return the model.

    `targets` are last parts of names ("query,value") or patterns ("layers.*.feed.*"); default: the linear layers of
    attention. `alpha` (default: 2 x rank) over rank scales what the adapters add.
    """
    if adapters(model):
        raise UsageError(f"{type(model).__name__} has adapters already", hint="remove_lora(model) takes them off.")
    if rank < 1 or not 0 <= dropout < 1:
        raise UsageError(f"lora: rank = {rank} must be 1 or more, dropout = {dropout} from 0 to below 1.")
    chosen = target_layers(model, targets)
    scale = (2 * rank if alpha is None else alpha) / rank
    add_adapters(model, dict.fromkeys(chosen, (rank, scale)), dropout=dropout)
    generator = torch.Generator().manual_seed(seed)
    for adapter in adapters(model).values():
        if not adapter.A.is_meta:  # else they are drawn with the model's own weights, once there is memory
            adapter.reset_adapter(generator)
    return model


def add_adapters(model: nn.Module, shapes: Mapping[str, tuple[int, float]], *, dropout: float) -> None:
    """Freeze the model and give each named layer an adapter of a rank and a scale, with no values yet."""
    model.requires_grad_(False)
    for name, (rank, scale) in shapes.items():
        layer = model.get_submodule(name)
        layer.lora = Adapter(layer, rank=rank, scale=scale, dropout=dropout)
        layer.register_forward_hook(_add_output)


def _add_output(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    adapter: Any = layer.lora
    return output if adapter.merged or adapter.off else output + adapter(inputs[0]).to(output.dtype)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let a model compute as it did before it had adapters, inside the context."""
    modules = adapters(model).values()
    try:
        for adapter in modules:
            adapter.off = True
        yield
    finally:
        for adapter in modules:
            adapter.off = False


def adapters(model: nn.Module) -> dict[str, Adapter]:
    """Return the adapters by the names of their layers."""
    pairs = ((name, module) for name, module in model.named_modules() if isinstance(module, Adapter))
    return {name.removesuffix(".lora"): module for name, module in pairs}


def merge_lora(model: Model) -> Model:
    """Add the adapters to the weights, in place: the same outputs without the extra work.

    Call `unmerge_lora` before you continue training. 4-bit weights become plain ones, because the sums need more bits.
    """
    restore_base(model)
    for name, adapter in adapters(model).items():
        if not adapter.merged:
            _refuse_shared(model, name)
            _add_to_weight(model.get_submodule(name), adapter, 1.0)
            adapter.merged = True
    return model


def unmerge_lora(model: Model) -> Model:
    """Subtract the adapters from the weights again, up to rounding."""
    for name, adapter in adapters(model).items():
        if adapter.merged:
            _add_to_weight(model.get_submodule(name), adapter, -1.0)
            adapter.merged = False
    return model


def remove_lora(model: Model) -> Model:
    """Remove the adapters and unfreeze the model: after `merge_lora` it is a plain, trained model."""
    for name in adapters(model):
        layer: Any = model.get_submodule(name)
        for key, hook in list(torch_compat.forward_hooks(layer).items()):
            if hook is _add_output:
                del torch_compat.forward_hooks(layer)[key]
        del layer.lora
    model.requires_grad_(True)
    return model


def _add_to_weight(layer: Any, adapter: Adapter, sign: float) -> None:
    with torch.no_grad():
        update = adapter.B @ adapter.A * (sign * adapter.scale)
        layer.weight.copy_(layer.weight.to(update.dtype) + (update.t() if is_transposed(layer) else update))


def _refuse_shared(model: nn.Module, layer: str) -> None:
    weight: Any = model.get_submodule(layer).weight
    names = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is weight]
    if len(names) > 1:
        raise UsageError(
            f"the adapter of '{layer}' cannot be merged: {' and '.join(names)} are one tensor, and all would change",
            hint="Do not merge this adapter, or leave the layer out of the targets.",
        )


def is_transposed(layer: nn.Module) -> bool:
    """Whether a layer's weight is [inputs, outputs]: Hugging Face's Conv1D, in GPT-2."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def linear_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that can have an adapter."""
    # MultiheadAttention reads the weight of its output layer and never calls it.
    unused = {name + ".out_proj" for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)}
    return [
        name
        for name, module in model.named_modules()
        if name and name not in unused and (isinstance(module, (nn.Linear, NF4Linear)) or is_transposed(module))
    ]


def target_layers(model: nn.Module, targets: str | Iterable[str] | None) -> list[str]:
    """Return the names of the layers that match `targets`; raise, with the nearest name, where one matches none."""
    layers = linear_layers(model)
    if targets is None:
        return _attention_layers(model, layers)
    patterns = [part.strip() for part in targets.split(",")] if isinstance(targets, str) else list(targets)
    chosen: set[str] = set()
    for pattern in patterns:
        if "*" in pattern:
            matches = fnmatch.filter(layers, pattern)
        else:
            matches = [name for name in layers if f".{name}".endswith(f".{pattern}")]
        if not matches:
            raise _no_such_layer(model, pattern, layers)
        chosen.update(matches)
    return [name for name in layers if name in chosen]


def _no_such_layer(model: nn.Module, pattern: str, layers: list[str]) -> UsageError:
    last_parts = list(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    close = nearest(pattern, [*last_parts, *layers])
    guess = f"Did you mean '{close}'? " if close else ""
    return UsageError(
        f"lora_targets: no linear layer of {type(model).__name__} is called '{pattern}'",
        hint=f"{guess}Its layers end in: {', '.join(last_parts) or 'there are none'}.",
    )


def _attention_layers(model: nn.Module, layers: list[str]) -> list[str]:
    """Return the layers inside modules that are named or classed as attention."""
    classes = {name: type(module).__name__.lower() for name, module in model.named_modules()}

    def is_attention(name: str) -> bool:
        parts = name.split(".")
        above = [".".join(parts[:depth]) for depth in range(1, len(parts))]
        return any(word in path.lower() or word in classes[path] for path in above for word in ("attention", "attn"))

    names = [name for name in layers if is_attention(name)]
    if not names:
        last_parts = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in layers)) or "there are none"
        raise UsageError(
            f"lora: {type(model).__name__} has no attention whose linear layers could have adapters",
            hint=f"Name the layers: lora_targets='...'. Its linear layers end in: {last_parts}.",
        )
    return names
