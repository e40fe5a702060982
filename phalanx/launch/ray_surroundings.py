"""Protect the calling process from Ray: environment variables and the handler of SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@contextmanager
def surroundings(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set, and unset them afterwards."""
    ours = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextmanager
def own_sigterm() -> Iterator[None]:
    """Restore the handler of SIGTERM: Ray's ends the process silently."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Any = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
