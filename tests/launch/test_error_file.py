"""A rank's traceback: without frames of the package before the user's first one, unless it has only those."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import phalanx
from phalanx.host.processes import is_ending, stat_fields
from phalanx.launch import error_file
from phalanx.launch.error_file import is_launchers, name_loader, users_traceback

LIBRARY = Path(phalanx.__file__).parent / "loop" / "stand_in.py"


def _call_from_the_library(function):
    """Call through a frame whose file lies in the package."""
    scope = {}
    exec(compile("def step(function):\n    return function()\n", str(LIBRARY), "exec"), scope)
    scope["step"](function)


def _caught(call):
    try:
        call()
    except ValueError as error:
        # In a rank: the launcher's frames are removed, the library's come first.
        error.__traceback__ = error.__traceback__.tb_next.tb_next.tb_next
        return error
    raise AssertionError("nothing was raised")


def _files(lines):
    return [Path(line.split('"')[1]).name for line in lines if line.startswith("  File")]


def _bad_model():
    raise ValueError("bad batch")


def test_leading_frames_of_the_library_are_cut():
    error = _caught(lambda: _call_from_the_library(_bad_model))
    lines = users_traceback(error)
    assert lines[0] == "Traceback (most recent call last):"
    assert _files(lines) == ["test_error_file.py"]
    assert lines[-1] == "ValueError: bad batch"
    # The exception itself, which the log shows, is whole.
    assert error.__traceback__.tb_frame.f_code.co_filename == str(LIBRARY)


def test_frames_of_the_library_between_the_users_stay():
    def users_loop():
        _call_from_the_library(_bad_model)

    error = _caught(lambda: _call_from_the_library(users_loop))
    own = "test_error_file.py"
    assert _files(users_traceback(error)) == [own, own, "stand_in.py", own]


def test_an_error_of_the_package_itself_is_shown_whole():
    error = _caught(lambda: _call_from_the_library(lambda: int("x")))
    error.__traceback__.tb_next = None
    assert _files(users_traceback(error)) == ["stand_in.py"]


def test_the_exception_before_is_cut_too():
    def chained():
        try:
            _call_from_the_library(_bad_model)
        except ValueError as first:
            first.__traceback__ = first.__traceback__.tb_next.tb_next
            raise ValueError("second") from first

    lines = users_traceback(_caught(lambda: _call_from_the_library(chained)))
    assert "ValueError: bad batch" in lines
    assert _files(lines) == ["test_error_file.py", "test_error_file.py"]


@pytest.mark.parametrize(
    ("file", "is_around"),
    [
        ("launch/rank.py", True),
        ("engines/any/worker.py", True),
        ("engines/any/data.py", False),
        ("loop/step.py", False),
    ],
)
def test_files_around_every_target_are_known_without_an_engines_name(file, is_around):
    assert is_launchers(str(Path(phalanx.__file__).parent / file)) is is_around


class Hoard(Dataset):
    """Samples of a worker that takes long to end: its memory has to be freed."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        self.held = torch.ones(64 << 20)
        return torch.ones(1)


def lose_a_worker_that_ends_slowly() -> str:
    error_file._POLLS, error_file._POLL_SECONDS = 2, 0.001
    batches = iter(DataLoader(Hoard(), num_workers=1))
    next(batches)
    worker = batches._workers[0].pid
    try:
        os.kill(worker, signal.SIGKILL)
        while not is_ending(worker) and stat_fields(worker)[0] != "Z":
            pass
        return str(name_loader(ConnectionResetError("Connection reset by peer")))
    except RuntimeError as late:  # torch's handler of SIGCHLD
        return str(name_loader(late))


def test_a_worker_that_takes_long_to_end_is_named(ranks):
    assert "It loads Hoard.__getitem__ (test_error_file.py:" in ranks(lose_a_worker_that_ends_slowly, world_size=1)[0]
