"""`phalanx stacks`: where the ranks of a run are, while it runs and after it has ended."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time

import pytest
from command import end, finish, start, write_script

from phalanx.diagnosis.calls import process_of
from phalanx.host.processes import began_at

SOURCE = """
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("ready", flush=True)
if dist.get_rank() == 1:
    time.sleep(600)  # asleep
dist.all_reduce(torch.ones(4))
"""


def here(folder):
    return {"cwd": folder, "TMPDIR": str(folder)}


def phalanx(*words, cwd):
    return finish(start(*words, **here(cwd)))


def test_stacks_are_shown_while_the_run_goes_on_and_after_it_was_stopped(tmp_path):
    script = write_script(tmp_path / "hang.py", SOURCE)
    run = start("train", "--script", script, "--num-workers", 3, "--device", "cpu", fresh=True, **here(tmp_path))
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
    run = start("train", "--script", script, "--num-workers", 1, "--device", "cpu", fresh=True, **here(tmp_path))
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
    from phalanx.launch.rank_files import ASK
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


def test_only_ranks_get_a_signal(tmp_path):
    """A reader of a rank's file, and a process that a link or a record of another user names, would end by it."""
    logs = tmp_path / "runs" / "a" / "logs"
    logs.mkdir(parents=True)
    (logs.parent / "run.json").write_text(json.dumps({"command": [], "directory": "/", "settings": {}}))
    (tmp_path / "server.log").write_text("")
    (logs / "rank-0.stack").write_text('Current thread (most recent call first):\n  File "train.py", line 3 in step\n')
    (logs / "rank-1.stack").symlink_to(tmp_path / "server.log")
    for rank in (2, 3, 4):
        (logs / f"rank-{rank}.stack").touch()
    with (
        subprocess.Popen(["tail", "-f", str(logs / "rank-0.stack")], stdout=subprocess.DEVNULL) as reader,
        (tmp_path / "server.log").open("a") as log,
        subprocess.Popen(["sleep", "100"], stdout=log) as server,
    ):
        try:
            record = {"pid": server.pid, "began": began_at(server.pid), "host": socket.gethostname()}
            (logs / "rank-2.process.json").write_text(json.dumps({**record, "began": 1}))
            (logs / "rank-3.process.json").write_text(json.dumps(record))
            (logs / "rank-3.process.json").chmod(0o666)
            (tmp_path / "own.json").write_text(json.dumps(record))
            (logs / "rank-4.process.json").symlink_to(tmp_path / "own.json")
            answer = phalanx("stacks", "a", cwd=tmp_path)
            assert "does not run" in answer.out, answer.text
            assert reader.poll() is None
            assert server.poll() is None
            (logs / "rank-3.process.json").chmod(0o600)
            assert process_of(logs.parent, 3) == server.pid, "a record of this user"
            if os.geteuid() == 0:
                os.chown(logs / "rank-3.process.json", 12345, -1)
                assert process_of(logs.parent, 3) is None
        finally:
            reader.kill()
            server.kill()
