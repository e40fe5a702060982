"""What a training step reads and changes on the host: a step that is recorded once and replayed must do neither."""

from __future__ import annotations

import itertools
import linecache
import random
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from phalanx import torch_compat

_PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = frozenset(vars(nn.Module()))
_WAITS = "called a synchronizing CUDA operation"
"""How torch's warning begins where code waits for the device."""
_ABOUT_WAITS = "Synchronization debug mode"
"""How its warning about these warnings begins: they do not tell of all waits. A capture does."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MOST_ITEMS = 100
"""Of a list or a dict that are compared."""

State = dict[str, Any]
"""By name: values that can be compared."""


def seen(value: Any, depth: int = 3) -> Any:
    """Return what can be compared of a value: plain values, places of tensors, states of generators, what it holds."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return id(value)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, (nn.Module, type)) or depth == 0:
        return id(value)
    if isinstance(value, Mapping):
        return [(str(key), seen(item, depth - 1)) for key, item in itertools.islice(value.items(), _MOST_ITEMS)] + [
            len(value)
        ]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [seen(item, depth - 1) for item in itertools.islice(value, _MOST_ITEMS)] + [len(value)]
    return {name: seen(item, depth - 1) for name, item in _inside(value).items()}


def _inside(value: Any) -> dict[str, Any]:
    """Return what an object or a function holds: attributes, variables of a closure, arguments of a partial."""
    contents = dict(getattr(value, "__dict__", {}))
    cells = getattr(value, "__closure__", None) or ()
    names = value.__code__.co_freevars if cells else ()
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    contents |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    for name, cell in zip(names, cells, strict=True):
        with suppress(ValueError):  # an empty cell
            contents[name] = cell.cell_contents
    if isinstance(value, partial):
        contents |= {"func": value.func, "args": value.args, "keywords": value.keywords}
    elif isinstance(value, MethodType):
        contents["self"] = value.__self__
    return contents


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def model_state(model: nn.Module, loss_fn: Any = None) -> State:
    """Return what a model's modules and a loss hold on the host, and where their tensors lie."""
    state: State = {}
    if loss_fn is not None and not isinstance(loss_fn, nn.Module):
        state |= {f"loss_fn.{name}": seen(value) for name, value in _inside(loss_fn).items()}
    losses = [("loss_fn", inner) for inner in _modules_in(loss_fn)]
    for path, module in [*model.named_modules(), *losses]:
        prefix = f"{path or type(module).__name__}."
        for name, value in vars(module).items():
            if type(value) in _PLAIN:
                state[prefix + name] = value
            elif name not in _OF_TORCH and name != "forward":  # compiled, or recomputed: made by this package
                state[prefix + name] = seen(value)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        state[name] = (tensor.data_ptr(), tensor.requires_grad)
    return state


def _modules_in(loss_fn: Any) -> list[nn.Module]:
    """Return the modules of a loss, also if it is wrapped in partials."""
    if isinstance(loss_fn, nn.Module):
        return list(loss_fn.modules())
    if isinstance(loss_fn, partial):
        return [
            module for part in (loss_fn.func, *loss_fn.args, *loss_fn.keywords.values()) for module in _modules_in(part)
        ]
    return []


def optimizer_state(optimizer: torch.optim.Optimizer) -> State:
    """Return what an optimizer keeps on the host: its settings, counters, and tensors of one number; not its rates."""
    kind = type(optimizer).__name__
    values = {f"{kind}.{name}": value for name, value in vars(optimizer).items() if type(value) in _PLAIN}
    for number, group in enumerate(optimizer.param_groups):
        settings = {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
        values |= {f"{kind}.{name} of group {number}": value for name, value in settings.items() if _is_plain(value)}
    for number, state in enumerate(optimizer.state.values()):
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
                values[f"{kind}'s {name} of parameter {number}"] = value.item()
            elif _is_plain(value):
                values[f"{kind}'s {name} of parameter {number}"] = value
    return values


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(item, _PLAIN) for item in value))


def random_state() -> State:
    """Return the states of the generators of random numbers on the host."""
    numpy: Any = np.random.get_state()
    torch_state = torch.default_generator.get_state().numpy().tobytes()
    return {
        "random": random.getstate(),
        "numpy.random": (numpy[1].tobytes(), numpy[2]),
        "torch (on the CPU)": torch_state,
    }


def change(before: State, after: State) -> str:
    """Return the first name whose value differs; empty where all are equal."""
    names = (*after, *(name for name in before if name not in after))
    return next((name for name in names if name not in before or after.get(name) != before[name]), "")


_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def hooked(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return what has hooks of the user, which the host calls in every step; empty where nothing has."""
    for name in _STEP_HOOKS:
        if _users(getattr(optimizer, name, {})):
            return f"a hook on the step of {type(optimizer).__name__}"
    for path, module in model.named_modules():
        if any(_users(getattr(module, name, {})) for name in _HOOKS):
            return f"a hook on the module {path or type(module).__name__}"
    return ""


def _users(hooks: Mapping[Any, Any]) -> bool:
    """Whether some hooks are neither torch's nor of this package."""
    homes = (getattr(hook, "__module__", None) or type(hook).__module__ for hook in hooks.values())
    return any(home.partition(".")[0] not in ("torch", "phalanx") for home in homes)


class HostWatch:
    """Tells whether what a recorded step depends on has changed since: cheap enough to be asked after every step.

    Watched are the attributes of the model's and the loss's modules, what lists, dicts and objects in them hold, the
    variables of closures, and plain values of a class or a module that the user's functions name.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any = None) -> None:
        watched = _WatchList()
        for path, module in model.named_modules():
            watched.add_module(path or type(module).__name__, module)
        watched.add("loss_fn", loss_fn, _DEPTH)
        self._groups = optimizer.param_groups
        self._tables = [
            *watched.tables,
            *(_Table(group, apart=("params", "lr", "initial_lr")) for group in self._groups),
        ]
        self._tables.append(
            _ValueCopy(lambda: [id(parameter) for group in optimizer.param_groups for parameter in group["params"]])
        )
        self.unwatched = watched.unwatched
        """What holds too much to be watched; empty: nothing does."""
        self._tensors = [
            (tensors, name, tensor, tensor.data_ptr(), tensor.requires_grad)
            for module in model.modules()
            for tensors in (torch_compat.direct_parameters(module), torch_compat.direct_buffers(module))
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        self._optimizer = optimizer
        self._first = optimizer.param_groups[0]["params"][0]
        self._state = optimizer.state.get(self._first)

    def has_changed(self) -> bool:
        """Whether a setting, a counter, a tensor's memory or what is trained is not what it was."""
        if (
            self._optimizer.param_groups is not self._groups
            or self._optimizer.state.get(self._first) is not self._state
        ):
            return True  # a state was loaded
        if any(table.has_changed() for table in self._tables):
            return True
        for tensors, name, tensor, address, trained in self._tensors:
            if tensors.get(name) is not tensor or tensor.data_ptr() != address or tensor.requires_grad is not trained:
                return True
        return False


_DEPTH = 4
"""So deep the objects within a module's attributes are watched."""
_MOST_WATCHED = 4096
"""Items of one container; a step that depends on a larger one is not recorded."""


class _Table:
    """The items of a dict: the same objects under the same names, or equal plain values."""

    def __init__(
        self, attributes: Mapping[str, Any], *, apart: Collection[str] = (), names: Collection[str] = ()
    ) -> None:
        """`apart`: left out, such as learning rates, which a recording follows; `names`: only these."""
        self._attributes, self._size = attributes, None if names else len(attributes)
        self._items = [(name, attributes[name]) for name in (names or attributes) if name not in apart]

    def has_changed(self) -> bool:
        attributes = self._attributes
        if self._size is not None and len(attributes) != self._size:
            return True
        for name, value in self._items:
            now = attributes.get(name, _NOTHING)
            if now is not value and not (type(now) is type(value) and _is_plain(value) and now == value):
                return True
        return False


_NOTHING = object()


class _ValueCopy:
    """What has no dict to look into: it is read again and compared."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read, self._before = read, read()

    def has_changed(self) -> bool:
        return bool(self._read() != self._before)


class _WatchList:
    """Collects what is to be watched."""

    def __init__(self) -> None:
        self.tables: list[_Table | _ValueCopy] = []
        self.unwatched = ""
        self._known_ids: set[int] = set()
        self._objects: list[Any] = []

    def add_module(self, path: str, module: nn.Module) -> None:
        """Watch a module's own attributes and hooks, not its children."""
        if self._is_known(module):
            return
        attributes = vars(module)
        of_torch = [
            name for name in attributes if name in _OF_TORCH and name not in _HOOKS and not _is_plain(attributes[name])
        ]
        self.tables.append(_Table(attributes, apart=of_torch))
        self.tables += [_Table(attributes[name]) for name in _HOOKS if name in attributes]
        for name, value in attributes.items():
            if name not in _OF_TORCH:
                self.add(f"{path}.{name}", value, _DEPTH)
        self._add_class(type(module))

    def add(self, path: str, value: Any, depth: int) -> None:
        """Watch what a value holds, however it is named."""
        kind = type(value)
        if kind in _PLAIN or isinstance(value, (torch.Tensor, type, ModuleType)) or self._is_known(value):
            return
        if isinstance(value, nn.Module):
            for name, module in value.named_modules():
                self._known_ids.discard(id(value) if module is value else 0)
                self.add_module(f"{path}.{name}" if name else path, module)
        elif isinstance(value, (random.Random, np.random.Generator, torch.Generator)):
            self.tables.append(_ValueCopy(partial(seen, value)))
        elif depth:
            self._add_inside(path, value, depth - 1)

    def _add_inside(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, (dict, list, tuple, set, frozenset, deque)) and len(value) > _MOST_WATCHED:
            self.unwatched = self.unwatched or f"{path} holds {len(value):,} items"
            return
        if isinstance(value, dict):
            self.tables.append(_Table(value))
            items = {str(key): item for key, item in value.items()}
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            if not isinstance(value, (tuple, frozenset)):
                self.tables.append(_ValueCopy(lambda: [seen(item, 0) for item in value]))
            items = {str(position): item for position, item in enumerate(value)}
        else:
            items = self._of_object(value)
        for name, item in items.items():
            self.add(f"{path}.{name}", item, depth)

    def _of_object(self, value: Any) -> dict[str, Any]:
        """Watch the attributes of an object or a function; return what is inside of it."""
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self.tables.append(_Table(attributes))
        contents = _inside(value)
        if attributes is None or contents.keys() != attributes.keys():  # slots, a closure, a partial
            self.tables.append(_ValueCopy(lambda: {name: seen(item, 0) for name, item in _inside(value).items()}))
        if isinstance(value, FunctionType):
            self._add_globals(value)
        elif not isinstance(value, (partial, MethodType, BuiltinFunctionType)):
            self._add_class(type(value))
        return contents

    def _add_class(self, kind: type) -> None:
        """Watch the plain values of the user's class, and those that its functions name."""
        for base in kind.__mro__:
            if base.__module__.partition(".")[0] in _NOT_USERS or self._is_known(base):
                continue
            attributes = vars(base)
            if names := [name for name, value in attributes.items() if _is_plain(value) and not name.startswith("__")]:
                self.tables.append(_Table(attributes, names=names))
            for value in attributes.values():
                if isinstance(value, FunctionType):
                    self._add_globals(value)

    def _add_globals(self, function: FunctionType) -> None:
        space = function.__globals__
        names = [name for name in function.__code__.co_names if name in space and _is_plain(space[name])]
        if names and str(space.get("__name__", "")).partition(".")[0] not in _NOT_USERS:
            self.tables.append(_Table(space, names=names))

    def _is_known(self, value: Any) -> bool:
        """Whether a value was found before; keeps it, so that its id stays its own."""
        if id(value) in self._known_ids:
            return True
        self._known_ids.add(id(value))
        self._objects.append(value)
        return False


_NOT_USERS = ("builtins", "torch", "phalanx", "transformers", "collections", "typing")


class HostProbe:
    """Watches one step: afterwards `reason` says what of it needs the host; empty where nothing does."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any = None) -> None:
        self._model, self._optimizer, self._loss_fn = model, optimizer, loss_fn
        self.reason = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Compare what the host holds before and after, and note where code waits for the device."""
        states = model_state(self._model, self._loss_fn), optimizer_state(self._optimizer), random_state()
        with _noted_waits(self._model) as waits:
            yield
        drawn = change(states[2], random_state())
        changed = change(states[0], model_state(self._model, self._loss_fn))
        counted = change(states[1], optimizer_state(self._optimizer))
        hook = hooked(self._model, self._optimizer)
        if hook:
            self.reason = f"{hook} is called in every step"
        elif waits:
            self.reason = f"{waits[0]} waits for the device"
        elif drawn:
            self.reason = f"the model draws random numbers of {drawn}"
        elif changed:
            self.reason = f"the model changes {changed} on the host in a step"
        elif counted:
            fused = "; write fused=True in it" if "fused" in self._optimizer.defaults else ""
            self.reason = f"the optimizer changes {counted} on the host{fused}"


@contextmanager
def _noted_waits(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list that gets the places where code has waited for a CUDA device."""
    places: list[str] = []
    if not any(parameter.is_cuda for parameter in model.parameters()):
        yield places
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        if str(warning.message).startswith(_WAITS):
            places.append(_place(warning.filename, warning.lineno))
        elif not str(warning.message).startswith(_ABOUT_WAITS):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _place(filename: str, line: int) -> str:
    """Return a line of code in words: where it stands, and its text."""
    text = linecache.getline(filename, line).strip()
    return f"{Path(filename).name}:{line}" + (f" ({text})" if text else "")
