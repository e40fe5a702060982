"""The repeated blocks of a model: what is gathered, recomputed or placed on a stage as one unit."""

from __future__ import annotations

from torch import nn

from phalanx.errors import UsageError, unknown_name


def blocks_of_class(model: nn.Module, name: str) -> dict[str, nn.Module]:
    """Return the modules of the class called `name`; an unknown name is refused with the nearest one."""
    found = {path: module for path, module in model.named_modules() if path and type(module).__name__ == name}
    if not found:
        classes = {type(module).__name__ for path, module in model.named_modules() if path}
        raise UsageError(unknown_name(f"class of modules in {type(model).__name__}", name, classes))
    return found


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks: children of one class inside the outermost list or sequence that has several."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{block}.") for block in found):
            continue  # inside a block already
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            children = [(f"{name}.{key}".lstrip("."), child) for key, child in module.named_children()]
            wide = [(key, child) for key, child in children if _is_block(child)]
            kinds = [type(child) for _, child in wide]
            found.update((key, child) for key, child in wide if kinds.count(type(child)) > 1)
    return found


def _is_block(module: nn.Module) -> bool:
    """A block has parameters and an inner structure; recomputing a bare layer would save nothing."""
    return any(True for _ in module.children()) and any(True for _ in module.parameters())
