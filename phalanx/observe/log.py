"""The standard library's logging, with the rank in front of each line where there is more than one."""

from __future__ import annotations

import logging
import sys


def rank_logger(label: str, world_size: int = 1, *, level: int = logging.INFO) -> logging.Logger:
    """Return the "phalanx" logger, which writes to standard error, with a prefix such as `[r3 dp1]` among many ranks.

    Calling it again changes the prefix rather than adding a second handler.
    """
    logger = logging.getLogger("phalanx")
    logger.setLevel(level)
    logger.propagate = False
    for handler in logger.handlers[:]:
        if isinstance(handler, _RankHandler):
            logger.removeHandler(handler)
    logger.addHandler(_RankHandler(f"[{label}] " if world_size > 1 and label else ""))
    return logger


class _RankHandler(logging.StreamHandler):  # type: ignore[type-arg]  # generic for the type checker alone
    """Writes to whatever standard error is at the time, so that captured and redirected output stays so."""

    def __init__(self, prefix: str) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter(prefix.replace("%", "%%") + "%(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
