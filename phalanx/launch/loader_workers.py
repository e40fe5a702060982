"""Which DataLoader a killed worker process belonged to: torch names only its process id.

torch raises the error of a killed worker wherever the main thread is at that moment, often far from the loader. It may
also come after an error about a connection to the worker, which breaks before the process has ended.
"""

from __future__ import annotations

import functools
import re
import sys
import time
import traceback
from pathlib import Path
from types import CodeType
from typing import Any

from phalanx.observe.collectives import is_users

_KILLED = re.compile(r"DataLoader worker \(pid\S* (\d+)")
_POLLS, _POLL_SECONDS = 10, 0.05
_loaders: dict[int, str] = {}
"""The data set and the loop of each worker process."""


def note_loaders() -> None:
    """Remember from now on which data set each worker process loads, and the user's line that began the loop."""
    from phalanx.torch_compat import LoaderIterator

    original = LoaderIterator.__init__

    @functools.wraps(original)
    def begin(self: Any, loader: Any) -> None:
        original(self, loader)
        places = traceback.walk_stack(sys._getframe())
        users = (_place(frame.f_code, line) for frame, line in places if is_users(frame.f_code.co_filename))
        loop = f", iterated at {found}" if (found := next(users, "")) else ""
        _loaders.update(dict.fromkeys((worker.pid for worker in self._workers), f"{_reader(loader.dataset)}{loop}"))

    LoaderIterator.__init__ = begin  # type: ignore[method-assign]


def name_loader(error: BaseException) -> BaseException:
    """Return the error of a killed worker with its loader, also where another error came first, else the same error."""
    for _ in range(_POLLS if _loaders else 0):
        if isinstance(error, RuntimeError) and (worker := _KILLED.match(str(error))) is not None:
            place = _loaders.get(int(worker[1]), "an unknown data set")
            error.args = (f"{str(error).rstrip(' .')}. It loads {place}.",)
            return error
        if (killed := _killed_worker()) is not None:
            killed.add_note(f"It was first seen as {type(error).__name__}: {error}")
            killed.__context__ = None
            error = killed.with_traceback(error.__traceback__)
        elif not isinstance(error, (OSError, EOFError)):
            return error
        else:
            time.sleep(_POLL_SECONDS)
    return error


def _killed_worker() -> RuntimeError | None:
    """Return, once, the error of a worker that was killed or failed."""
    from phalanx.torch_compat import raise_for_killed_worker

    try:
        raise_for_killed_worker()
    except RuntimeError as error:  # also where the handler of SIGCHLD raises it at this moment
        return error
    return None


def _reader(dataset: Any) -> str:
    """Return the name and line of the method that loads a sample: the user's, also inside of other data sets."""
    kind = type(dataset)
    methods = [getattr(getattr(kind, name, None), "__code__", None) for name in ("__getitem__", "__iter__")]
    codes = [code for code in methods if code is not None]
    users = next((code for code in codes if is_users(code.co_filename)), None)
    if users is None and hasattr(dataset, "dataset"):
        return _reader(dataset.dataset)
    code = users or next(iter(codes), None)
    return f"{kind.__qualname__}.{code.co_name} ({_place(code, code.co_firstlineno)})" if code else kind.__qualname__


def _place(code: CodeType, line: int) -> str:
    return f"{Path(code.co_filename).name}:{line}"
