"""The ring of collectives: the line that called is right also where the stack differs from the last time."""

from __future__ import annotations

import inspect
import threading

import pytest

from phalanx.observe import call_ring
from phalanx.observe.call_ring import CallRing

WHAT = b"all_reduce sum of (4,) float32"


class Group:
    """Calls a ring through two frames of "communication", as collectives do."""

    def __init__(self) -> None:
        self.ring = CallRing(8)
        self._calls = self.ring.group("g", [0])

    def reduce(self, what: bytes = WHAT) -> None:
        self._meet(what)

    def _meet(self, what: bytes) -> None:
        self._calls.enter(what)

    @property
    def lines(self) -> list[int]:
        return [int(call["where"].rpartition(":")[2]) for call in self.ring.to_dicts()]


def here() -> int:
    return inspect.currentframe().f_back.f_lineno


def through(call, depth=1):
    return call() if depth == 1 else through(call, depth - 1)


@pytest.mark.parametrize("is_users", [True, False], ids=["a script", "a trainer"])
def test_the_line_is_that_of_this_call_and_not_of_the_last_one_like_it(monkeypatch, is_users):
    monkeypatch.setitem(call_ring._USERS, __file__, is_users)
    monkeypatch.setattr(call_ring, "is_loops", lambda file: file == __file__)
    group, expected = Group(), []

    def one() -> None:
        group.reduce(); expected.append(here())  # fmt: skip  # noqa: E702

    def other() -> None:
        group.reduce(); expected.append(here())  # fmt: skip  # noqa: E702

    for call in (one, one, other, one):
        call()
    through(one, 5)
    through(other, 2)
    group.reduce(); expected.append(here())  # fmt: skip  # noqa: E702
    assert group.lines == expected


def test_calls_from_several_depths_in_turn_walk_through_the_stack_once_each(monkeypatch):
    monkeypatch.setitem(call_ring._USERS, __file__, False)
    group, walks, walk = Group(), [], call_ring._walk
    monkeypatch.setattr(call_ring, "_walk", lambda *args: walks.append(1) or walk(*args))
    lines = [through(lambda: (group.reduce(), here())[1], depth) for depth in (1, 4) * 4]
    assert (group.lines, len(walks)) == (lines, 2)


def test_the_users_callback_is_named_where_the_loop_makes_the_same_call(monkeypatch):
    """The frame of the loop is where it was the last time; only the stack around it is another one."""
    monkeypatch.setattr(call_ring, "_USERS", call_ring._UsersFiles({__file__: False}))
    group = Group()
    program = {"reduce": group.reduce, "__name__": "program"}
    exec(compile("def loop():\n    reduce()\n", "loop.py", "exec"), program)
    monkeypatch.setattr(call_ring, "is_loops", lambda file: file == "loop.py")
    call_ring._USERS.update({"loop.py": False, "callback.py": True, **dict.fromkeys(_files_outside(), False)})
    exec(compile("\ndef callback():\n    loop()\n", "callback.py", "exec"), program)
    for name in ("loop", "loop", "callback", "loop"):
        program[name]()
    assert [call["where"] for call in group.ring.to_dicts()] == ["loop.py:2", "loop.py:2", "callback.py:3", "loop.py:2"]


def _files_outside() -> list[str]:
    return [frame.filename for frame in inspect.stack()]


def test_a_background_thread_records_the_line_of_the_main_thread(monkeypatch):
    group = Group()
    program = {"reduce": group.reduce}
    exec(compile("def job():\n    reduce()\n", "job.py", "exec"), program)
    monkeypatch.setitem(call_ring._USERS, "job.py", False)
    monkeypatch.setitem(call_ring._USERS, __file__, False)
    exec(compile("def main(thread):\n    thread.start()\n    thread.join()\n", "train.py", "exec"), program)
    program["main"](threading.Thread(target=program["job"]))
    (call,) = group.ring.to_dicts()
    assert call["where"] in ("train.py:2", "train.py:3")
