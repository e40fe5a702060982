"""`phalanx stacks`: where the ranks of a run are, while it runs and after it has ended."""

from __future__ import annotations

import re
import time

import pytest
from command import end, finish, start, write_script

SOURCE = """
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("ready", flush=True)
if dist.get_rank() == 1:
    time.sleep(60)  # asleep
dist.all_reduce(torch.ones(4))
"""


def phalanx(*words, cwd):
    return finish(start(*words, cwd=cwd, TMPDIR=str(cwd)))


def test_stacks_are_shown_while_the_run_goes_on_and_after_it_was_stopped(tmp_path):
    script = write_script(tmp_path / "hang.py", SOURCE)
    run = start("train", "--script", script, "--num-workers", 3, "--device", "cpu", cwd=tmp_path, TMPDIR=str(tmp_path))
    try:
        while "ready" not in run.stdout.readline():
            assert run.poll() is None
        time.sleep(0.5)
        shown = phalanx("stacks", "last", cwd=tmp_path)
        native = phalanx("stacks", "last", "--native", cwd=tmp_path)
    finally:
        end(run)
        run.communicate()
    first, second = shown.out.strip().split("\n\n")
    assert re.match(r"ranks 0, 2:\n  .*in all_reduce\n", first), shown.text
    assert re.search(r"hang.py:9 in <module>$", first)
    assert re.fullmatch(r"rank 1:\n  .*hang.py:8 in <module>", second)
    assert "time_sleep" in native.text or "hang.py:8" in native.text or "ptrace_scope" in native.text, native.text
    after = phalanx("stacks", "last", cwd=tmp_path)
    assert "does not run" in after.out
    assert first in after.out


@pytest.mark.parametrize("library", ["PyDLL", "CDLL"])
def test_a_rank_that_waits_in_c_with_or_without_the_interpreter_lock_shows_its_main_thread(tmp_path, library):
    """Without the lock as in torch.cuda.synchronize(): no Python code runs in the main thread, so no signal handler."""
    lines = [
        "import ctypes",
        f"hold = ctypes.{library}(None).sleep",
        "print('ready', flush=True)",
        "while True: hold(60)",
    ]
    script = write_script(tmp_path / "lock.py", "\n".join(lines))
    run = start("train", "--script", script, "--num-workers", 1, "--device", "cpu", cwd=tmp_path, TMPDIR=str(tmp_path))
    try:
        while "ready" not in run.stdout.readline():
            assert run.poll() is None
        shown = phalanx("stacks", "last", cwd=tmp_path)
    finally:
        end(run)
        run.communicate()
    assert re.fullmatch(r"rank 0:\n  .*lock.py:4 in <module>", shown.out.strip()), shown.text


def test_a_file_of_the_program_that_took_the_number_of_the_closed_file_of_stacks_is_not_overwritten(tmp_path):
    source = """
    import os, time
    from phalanx.launch.collectives import ASK
    paths = {int(each): os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")}
    ((stack, path),) = [(each, path) for each, path in paths.items() if path.endswith("rank-0.stack")]
    os.dup2(os.open("mine", os.O_WRONLY | os.O_CREAT), stack)
    os.write(stack, b"my data")
    os.kill(os.getpid(), ASK)
    while not os.path.exists(path.replace(".stack", ".collectives.json")):
        time.sleep(0.05)
    """
    script = write_script(tmp_path / "close.py", source)
    answer = phalanx("train", "--script", script, "--num-workers", 1, "--device", "cpu", cwd=tmp_path)
    assert answer.code == 0, answer.text
    assert (tmp_path / "mine").read_bytes() == b"my data"


@pytest.mark.parametrize(
    ("name", "words"), [("nowhere", "there is no run 'nowhere'"), (".", "is not the folder of a run")]
)
def test_what_is_not_a_run_is_refused(tmp_path, name, words):
    answer = phalanx("stacks", name, cwd=tmp_path)
    assert (answer.code, words in answer.err) == (2, True), answer.text


def test_a_run_that_left_no_stacks_says_so(tmp_path):
    script = write_script(tmp_path / "quick.py", "print('done')")
    assert phalanx("train", "--script", script, "--num-workers", 2, cwd=tmp_path).code == 0
    answer = phalanx("stacks", "last", cwd=tmp_path)
    assert (answer.code, "left no stacks" in answer.err) == (2, True), answer.text
