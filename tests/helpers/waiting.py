"""Time in tests: waiting as long as a busy machine may need, and a measure of the machine's speed.

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
        time.sleep(0.02)


def plain_python_seconds() -> float:
    """Return the processor time of a fixed piece of Python, 0.18 s on an idle core: the unit for other code's time.

    A shared or throttled core slows both, so a ratio holds where seconds do not.
    """
    begin = time.process_time()
    found: dict[int, float] = {}
    for number in range(1_000_000):
        found[number & 1023] = found.get(number & 511, 0.0) * 0.5 + number
    return time.process_time() - begin
