"""Any `nn.Module` as a shape that can be planned: built without memory, its forward pass run on fake tensors.

Counted are parameters, operations, what autograd saves for backward, and the traffic of each kernel, all for tensors in
half precision. Transformers of Phalanx and of Hugging Face are described by their dimensions instead. This is the one
file of the planner that imports torch.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from phalanx import torch_compat
from phalanx.errors import UsageError, a_type
from phalanx.recipes.imports import call_with, load_import
from phalanx.strategies.tensors import find_blocks
from phalanx.tools.plan.hf_config import shape_of
from phalanx.tools.plan.model import ModelShape, TracedShape
from phalanx.torch_compat import pytree

_BATCH = 2
"""Samples that are traced: a batch norm needs more than one."""
_TOKENS, _PIXELS = 1024, 224
_HINT = "Give the shape of one sample: '3x224x224' for images, 'tokens:1024' for a language model, '64' for features."
_METHODS = {"tensor": "tensor_plan", "pipeline": "pipeline_units", "expert": "expert_modules"}
"""Axis to the method that a model must have for it (phalanx.model)."""

Example = str | tuple[int, ...] | Tensor | tuple[Tensor, ...] | None


def trace_import(
    path: str, example: Example = None, options: Mapping[str, Any] | None = None
) -> ModelShape | TracedShape:
    """Build the module `package.module:Class` on the meta device and return its shape; `options`: its arguments."""
    make = load_import(path, "model")
    try:
        with torch.device("meta"):
            module = call_with(make, options or {}, f"model '{path}'")
    except UsageError:
        raise
    except Exception as error:  # a constructor of the user may fail in any way
        raise _blocked(f"model '{path}' cannot be built on the meta device", error) from error
    if not isinstance(module, nn.Module):
        raise UsageError(f"model '{path}' gives {a_type(module)}, not a torch.nn.Module")
    return trace_module(module, example, name=path.rpartition(":")[2])


def trace_module(module: nn.Module, example: Example = None, *, name: str = "") -> ModelShape | TracedShape:
    """Return the shape of a module.

    `example` is one sample ("3x224x224", "tokens:1024", (3, 224, 224)), or the batch that forward takes as a tensor or
    a tuple of tensors. Without it the module's `example_inputs()` is used, or the usual input of its first layer.
    """
    name = name or type(module).__name__
    shape = shape_of(module, name)
    if shape is not None and shape.parameters == _size(module):
        return shape
    inputs, described = _inputs(module, example)
    blocks = find_blocks(module)
    trace = _run(module, inputs, blocks, f"{name} cannot be traced with an input of {described}")
    samples = len(inputs[0])
    parameters = list(module.parameters())
    return TracedShape(
        name=name,
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        forward_flops_per_sample=trace.flops / samples,
        activation_bytes_per_sample=trace.saved / samples,
        traffic_bytes_per_sample=trace.traffic / samples,
        output_bytes_per_sample=trace.output / samples,
        blocks=max(1, len(blocks)),
        largest_block_parameters=max((_size(block) for block in blocks.values()), default=_size(module)),
        block_boundary_bytes_per_sample=trace.boundaries / samples,
        buffers=sum(buffer.numel() for buffer in module.buffers()),
        supports=supports(module),
        example=described,
    )


def supports(module: nn.Module) -> tuple[str, ...]:
    """Return the axes, besides those of data, that a module's own methods allow."""
    axes = [axis for axis, method in _METHODS.items() if callable(getattr(module, method, None))]
    if any(getattr(part, "ring_ready", False) for part in module.modules()):
        axes.append("context")
    return tuple(axes)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _half_bytes(tensor: Tensor, elements: int | None = None) -> int:
    """Return the bytes of a tensor if its fractions were in half precision."""
    count = tensor.numel() if elements is None else elements
    return count * (2 if tensor.is_floating_point() else tensor.element_size())


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int:
    """Return what tensors in the same memory have in common."""
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)  # type: ignore[no-untyped-call]


class _Traffic(torch_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what each operation reads and writes per batch, besides parameters; views move nothing."""

    def __init__(self, parameters: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self._parameters = parameters

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not func.is_view and func.namespace == "aten":  # others ask for a device or a size
            moved = {
                id(tensor): tensor
                for tensor in _tensors((args, kwargs, output))
                if _key(tensor) not in self._parameters
            }
            self.total += sum(map(_half_bytes, moved.values()))
        return output


class _Trace:
    """What one forward pass showed, in operations and bytes."""

    def __init__(self) -> None:
        self.flops = 0
        self.traffic = 0
        self.output = 0
        self.boundaries = 0
        self._storages: dict[int, Any] = {}
        self.saved = 0

    def keep(self, tensor: Tensor, parameters: set[int]) -> Tensor:
        """Count a saved tensor, once for all tensors that share its memory; parameters do not count."""
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key not in parameters and key not in self._storages:
            self._storages[key] = storage  # held, so that its number is not given to another
            self.saved += _half_bytes(tensor, storage.nbytes() // tensor.element_size())
        return tensor

    def enter_block(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Count the inputs of a block."""
        self.boundaries += sum(map(_half_bytes, _tensors(inputs)))


def _run(module: nn.Module, inputs: tuple[Tensor, ...], blocks: Mapping[str, nn.Module], problem: str) -> _Trace:
    """Run forward on fake tensors in place of the parameters, and return what it needs."""
    trace, counter = _Trace(), FlopCounterMode(display=False)
    hooks = [block.register_forward_pre_hook(trace.enter_block) for block in blocks.values()]
    mode = torch_compat.fake_mode()
    log = logging.getLogger(type(mode).__module__)
    was_training, was_silent = module.training, log.disabled
    log.disabled = True  # it prints a traceback of torch before the error that is reported here
    try:
        with mode:
            state = _fake_state(module)
            fakes = [torch.zeros_like(argument, device="cpu") for argument in inputs]
            parameters = set(map(_key, state.values()))
            traffic = _Traffic(parameters)
            with ExitStack() as stack:
                stack.enter_context(_FakeAttributes(module))
                stack.enter_context(
                    saved_tensors_hooks(lambda tensor: trace.keep(tensor, parameters), lambda tensor: tensor)
                )
                stack.enter_context(counter)
                stack.enter_context(traffic)
                output = functional_call(module.train(), state, tuple(fakes))
    except Exception as error:  # forward of the user may fail in any way
        raise _blocked(problem, error, f" {_HINT}") from error
    finally:
        log.disabled = was_silent
        module.train(was_training)
        for hook in hooks:
            hook.remove()
    trace.flops, trace.traffic = counter.get_total_flops(), traffic.total
    trace.output = sum(map(_half_bytes, _tensors(output)))
    return trace


def _fake_state(module: nn.Module) -> dict[str, Tensor]:
    """Return fake tensors in place of parameters and buffers; called under a fake mode."""
    state: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        state[name] = torch.empty_like(parameter, device="cpu").requires_grad_(parameter.requires_grad)
    state |= {name: torch.empty_like(buffer, device="cpu") for name, buffer in module.named_buffers()}
    return state


class _FakeAttributes:
    """Replaces tensors that a module holds as plain attributes; they are put back at the end."""

    def __init__(self, module: nn.Module) -> None:
        self._storages_held = [
            (part, name, value)
            for part in module.modules()
            for name, value in vars(part).items()
            if isinstance(value, Tensor)
        ]

    def __enter__(self) -> None:
        for part, name, value in self._storages_held:
            setattr(part, name, torch.empty_like(value, device="cpu"))

    def __exit__(self, *_: object) -> None:
        for part, name, value in self._storages_held:
            setattr(part, name, value)


def _inputs(module: nn.Module, example: Example) -> tuple[tuple[Tensor, ...], str]:
    """Return the arguments of forward for a batch, without memory, and their description."""
    if isinstance(example, Tensor):
        example = (example,)
    if isinstance(example, tuple) and example and isinstance(example[0], Tensor):
        tensors = tuple(tensor for tensor in example if isinstance(tensor, Tensor))
        return tensors, " and ".join("x".join(map(str, tensor.shape)) for tensor in tensors)
    make_inputs = getattr(module, "example_inputs", None)
    if example is None and callable(make_inputs):
        return _inputs(module, tuple(tensor.repeat(_BATCH, *[1] * (tensor.ndim - 1)) for tensor in make_inputs()))
    kind, sizes = _parse(example) if example is not None else _usual_input(module)
    if kind == "tokens" or (kind == "" and isinstance(_first_layer(module), nn.Embedding)):
        tokens = torch.empty(_BATCH, *sizes, dtype=torch.long, device="meta")
        return (tokens,), f"tokens:{'x'.join(map(str, sizes))}"
    return (torch.empty(_BATCH, *sizes, device="meta"),), "x".join(map(str, sizes))


def _parse(example: Any) -> tuple[str, tuple[int, ...]]:
    """Return the kind ("tokens" or "") and the sizes of one sample."""
    kind, _, text = example.rpartition(":") if isinstance(example, str) else ("", "", "")
    try:
        sizes = tuple(int(size) for size in (text.split("x") if isinstance(example, str) else example))
    except (TypeError, ValueError):
        sizes = ()
    if kind not in ("", "tokens") or not sizes or min(sizes) < 1:
        raise UsageError(f"example = {example!r} is not the shape of a sample", hint=_HINT)
    return kind, sizes


def _first_layer(module: nn.Module) -> nn.Module | None:
    kinds = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    return next((part for part in module.modules() if isinstance(part, kinds)), None)


def _usual_input(module: nn.Module) -> tuple[str, tuple[int, ...]]:
    """Return the input that a module's first layer usually has: an image, tokens, or features."""
    first = _first_layer(module)
    if isinstance(first, nn.Conv2d):
        size = getattr(getattr(module, "config", None), "image_size", _PIXELS)
        return "", (first.in_channels, size, size)
    if isinstance(first, nn.Embedding):
        return "tokens", (_TOKENS,)
    if isinstance(first, nn.Linear):
        return "", (first.in_features,)
    raise UsageError(f"the input of {type(module).__name__} is not known", hint=_HINT)


def _blocked(problem: str, error: Exception, more: str = "") -> UsageError:
    """Return the error that names the operation that failed, and the user's line that called it."""
    message = str(error).strip().splitlines()
    cause = f"{type(error).__name__}: {message[0]}" if message else type(error).__name__
    caller = _place(traceback.extract_tb(error.__traceback__))
    return UsageError(
        f"{problem}: {cause}{f' ({caller})' if caller else ''}",
        hint=f"Modules are traced without values: building and calling them must not read any.{more}",
    )


def _place(frames: Iterable[traceback.FrameSummary]) -> str:
    """Return file, line and text of the innermost line outside torch and Phalanx."""
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
    outside = [frame for frame in frames if not frame.filename.startswith(inside)]
    return f"{outside[-1].filename}:{outside[-1].lineno}: {outside[-1].line}" if outside else ""
