"""Waiting in tests: until something holds, for as long as a busy machine may need.

A limit here is not a promise to users: it ends a test that would wait for ever, and is several times what a quiet
machine needs. What a user is promised about time is asserted where it is promised.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_SECONDS = 240.0


def until(holds: Callable[[], object], otherwise: Callable[[], object] = str, seconds: float = LIMIT_SECONDS) -> None:
    """Wait until `holds()`; fail after `seconds` with what `otherwise()` says."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not after {seconds:.0f} s: {otherwise()}"
        time.sleep(0.1)
