"""Output that fails does not end a run: closed pipes and terminals, full disks. And it goes where the user sent it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import resource
import select
import signal
import struct
import subprocess
import termios
import time

import programs
from command import COMMAND, clean_environment, end, finish, start, write_script

RECIPE = (
    "train",
    "synthetic",
    "--device",
    "cpu",
    "--num-workers",
    "2",
    "--max-steps",
    "40",
    "--checkpoint-dir",
    "kept",
)


def _wait(process, seconds=240):
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        end(process)
        raise


def _run_with_output(words, cwd, **streams):
    process = programs.Popen([*COMMAND, *words], cwd=cwd, env=clean_environment(), text=True, **streams)
    with process:
        err = process.stderr.read() if process.stderr else ""
        return _wait(process), err


def test_a_closed_pipe_does_not_end_training(tmp_path):
    process = start(*RECIPE, cwd=tmp_path)
    assert process.stdout.readline()
    process.stdout.close()
    with process:
        err = process.stderr.read()
        assert _wait(process) == 0, err
    assert err.count("standard output failed (Broken pipe)") == 1
    assert list((tmp_path / "kept").glob("step-*40")), err


def test_a_full_disk_under_standard_output_does_not_end_training(tmp_path):
    with open("/dev/full", "w") as full:
        code, err = _run_with_output(RECIPE, tmp_path, stdout=full, stderr=subprocess.PIPE)
    assert code == 0, err
    assert err.splitlines() == [
        "phalanx: standard output failed (No space left on device): nothing more is written there, the run continues"
    ]
    assert list((tmp_path / "kept").glob("step-*40"))


def test_an_answer_that_cannot_be_written_is_a_failure(tmp_path):
    with open("/dev/full", "w") as full:
        code, err = _run_with_output(["--version"], tmp_path, stdout=full, stderr=subprocess.PIPE)
    assert (code, err) == (1, "phalanx: standard output failed (No space left on device).\n")


def test_a_full_disk_under_the_logs_does_not_end_a_script(tmp_path):
    """A limit on the size of files stands in for the full disk: every write beyond it fails."""
    limit = 1 << 18
    script = write_script(
        tmp_path / "train.py",
        f"""
        import os
        for _ in range({limit // 500}):
            print("x" * 999)
        print("end of rank", os.environ["RANK"], flush=True)
        open("done-" + os.environ["RANK"], "w").close()
        """,
    )
    process = programs.Popen(
        [*COMMAND, "train", "--script", str(script), "--num-workers", "2", "--device", "cpu"],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    answer = finish(process)
    assert answer.code == 0, answer.out[-2000:]
    assert "end of rank 0" in answer.out
    assert {path.name for path in tmp_path.glob("done-*")} == {"done-0", "done-1"}
    assert answer.out.count("the log of rank 0") == 1
    assert answer.out.count("rank 1: the log of this rank failed (File too large)") == 1


def _in_terminal(words, cwd, *, err=None, rows=30, columns=91):
    """Start a command on a new terminal; return the process and the terminal's other end."""
    near, far = pty.openpty()
    fcntl.ioctl(near, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def take_terminal():
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = programs.Popen(
        [*COMMAND, *map(str, words)],
        cwd=cwd,
        env=clean_environment(TERM="xterm"),
        stdin=far,
        stdout=far,
        stderr=far if err is None else err,
        preexec_fn=take_terminal,
    )
    os.close(far)
    return process, near


def _read_until(descriptor, words, seconds=240.0):
    """Read from a terminal until `words` have come, or its end."""
    shown, deadline = b"", time.monotonic() + seconds
    while words not in shown and time.monotonic() < deadline:
        if select.select([descriptor], [], [], 0.2)[0]:
            with contextlib.suppress(OSError):
                if chunk := os.read(descriptor, 1 << 16):
                    shown += chunk
                    continue
            break
    return shown


def test_a_closed_terminal_ends_in_a_checkpoint(tmp_path):
    words = ("train", "synthetic", "--device", "cpu", "--num-workers", "2", "--epochs", "4000", "--max-steps", "100000")
    process, terminal = _in_terminal((*words, "--checkpoint-dir", "kept", "--log-every-n-steps", "1"), tmp_path)
    shown = _read_until(terminal, b"loss")
    assert b"loss" in shown
    os.close(terminal)
    assert _wait(process) == 75
    assert list((tmp_path / "kept").glob("step-*"))


def test_a_script_on_a_terminal_has_a_terminal(tmp_path):
    script = write_script(
        tmp_path / "train.py",
        """
        import os, signal, sys, time
        if os.environ["RANK"] != "0":
            sys.exit(sys.stdout.isatty())
        resized = []
        signal.signal(signal.SIGWINCH, lambda number, frame: resized.append(os.get_terminal_size().columns))
        print(sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size().columns)
        sys.stdout.write("\\x1b[32mgreen\\x1b[0m no end yet")
        sys.stdout.flush()
        while not resized:  # pause() would miss a signal that came just before
            time.sleep(0.01)
        print("", resized[0])
        """,
    )
    with open(tmp_path / "err", "wb") as err:
        words = ("train", "--script", script, "--num-workers", "2", "--device", "cpu")
        process, terminal = _in_terminal(words, tmp_path, err=err)
    shown = _read_until(terminal, b"no end yet")
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 30, 77, 0, 0))
    process.send_signal(signal.SIGWINCH)
    shown += _read_until(terminal, b"77")
    assert _wait(process) == 0
    os.close(terminal)
    assert shown.startswith(b"True False 91\r\n\x1b[32mgreen\x1b[0m no end yet"), shown
    assert b" 77" in shown
    assert (tmp_path / "err").read_bytes() == b""


def test_a_ranks_streams_stay_apart_and_a_log_has_both(tmp_path):
    source = "import sys\nprint('to out')\nprint('to err', file=sys.stderr)\n"
    script = write_script(tmp_path / "train.py", source)
    words = ("train", "--script", script, "--num-workers", "2", "--device", "cpu", "--run-dir", "run")
    answer = finish(start(*words, cwd=tmp_path))
    assert (answer.code, answer.out, answer.err) == (0, "to out\n", "to err\n")
    for rank in range(2):
        assert sorted((tmp_path / f"run/logs/rank-{rank}.log").read_text().split("\n")) == ["", "to err", "to out"]


def test_streams_with_one_destination_keep_their_order(tmp_path):
    source = "import sys\nfor n in range(200):\n    print(n, file=(sys.stdout, sys.stderr)[n % 2])\n"
    script = write_script(tmp_path / "train.py", source)
    with open(tmp_path / "all", "wb") as file:
        words = ("train", "--script", str(script), "--device", "cpu")
        assert _run_with_output(words, tmp_path, stdout=file, stderr=file) == (0, "")
    assert (tmp_path / "all").read_text().split() == [str(number) for number in range(200)]
