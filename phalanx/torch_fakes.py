"""The private torch APIs of fake ranks: tensors without memory, and a process group without other ranks.

They are listed in `torch_compat.PRIVATE` with all others.
"""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]


def fake_mode() -> Any:
    """Return a mode in which tensors have shapes, dtypes and devices, but no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)
