"""A worker of pytest-xdist that breaks off costs the test that it was running, and not the rest of the run."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import pytest

# Before these CPython counts the depth of the syntax trees of all threads in one place (python/cpython#106905): a
# failure that is formatted while another thread parses is a "SystemError: AST constructor recursion depth mismatch".
_COUNTS_PER_CALL = {(3, 11): 8, (3, 12): 2}


def pytest_configure(config: pytest.Config) -> None:
    """Show failures without parsing where CPython may not; have the workers of a run leave as this module says."""
    first_good = _COUNTS_PER_CALL.get(sys.version_info[:2], 0)
    if config.option.tbstyle == "auto" and sys.version_info[2] < first_good:
        config.option.tbstyle = "native"
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(_Leaves(config))


class _Leaves:
    """Ends a worker at once after an internal error of pytest, or a Ctrl-C that a test let through.

    xdist takes it for killed: that test has failed, and a new worker takes the others. Otherwise xdist ends the run,
    without the failures that it had found.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(self, excrepr: object) -> None:
        self._leave(str(excrepr))

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._leave(f"KeyboardInterrupt at {excinfo.traceback[-1]}")

    def _leave(self, why: str) -> NoReturn:
        self._config.pluginmanager.getplugin("capturemanager").stop_global_capturing()
        print(f"\n{os.environ['PYTEST_XDIST_WORKER']} breaks off: {why}", file=sys.stderr, flush=True)
        os._exit(3)
