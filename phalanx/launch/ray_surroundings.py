"""What Ray finds and changes in the process around it: environment variables and the handler of SIGTERM."""

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
    """Set environment variables that the user has not set, and take them back."""
    ours = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextmanager
def own_sigterm() -> Iterator[None]:
    """Keep the handler of SIGTERM that was there: Ray's ends the process without a word."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Any = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
