"""Ctrl-C, SIGTERM, SIGUSR1 and SIGKILL at the supervisor: everything ends, in time, with the right code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import programs
import psutil
import pytest
from ranks import RecordingConsole, warm_pid
from waiting import LIMIT_SECONDS

from phalanx.launch import attempt
from phalanx.launch.forkserver import client

ROOT = Path(__file__).resolve().parents[2]

SLEEPER = """
import time
print("ready", flush=True)
time.sleep(300)
"""

STUBBORN = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True:
    time.sleep(1)
"""

CHECKPOINTER = """
import os, signal, sys, time
def leave(number, frame):
    os.write(1, b"saved\\n")  # the signal may arrive inside of print, which does not call itself
    sys.exit(75)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGUSR1, leave)
print("ready", flush=True)
time.sleep(300)
"""


INTERRUPTIBLE = """
import time
try:
    print("ready", flush=True)
    time.sleep(300)
except KeyboardInterrupt:
    print("saved", flush=True)
"""

TIDY = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
print("ready", flush=True)
time.sleep(300)
"""


def _all_ready(*signals):
    """A console that sends signals to this very process, the supervisor, once both ranks are up."""
    waiting = iter([None, signals])

    def on_line(line):
        if line == "ready":
            for number in next(waiting) or ():
                os.kill(os.getpid(), number)

    return RecordingConsole(on_line=on_line)


def _launch_timed(launch_script, source, console, **spec):
    launch_script("pass")  # torch's import is not what is timed
    began = time.monotonic()
    run = launch_script(source, console, console_ranks="all", **spec)
    return run, time.monotonic() - began


def test_ctrl_c_ends_plain_scripts_with_130(launch_script):
    run, seconds = _launch_timed(launch_script, SLEEPER, _all_ready(signal.SIGINT))
    assert (run.result.exit_code, run.result.failure) == (130, None)
    assert seconds < 120, "the ranks sleep for five minutes"
    assert "SIGINT" in run.console.notices[0]


def test_ctrl_c_is_a_keyboard_interrupt_in_a_script(launch_script):
    run, _ = _launch_timed(launch_script, INTERRUPTIBLE, _all_ready(signal.SIGINT))
    assert (run.result.exit_code, run.result.failure) == (130, None)
    assert run.console.text.count("saved") == 2


def test_only_exit_code_75_means_that_a_rank_has_saved(launch_script):
    run, _ = _launch_timed(launch_script, TIDY, _all_ready(signal.SIGTERM))
    assert (run.result.exit_code, run.result.failure) == (143, None)


def test_ctrl_c_kills_what_does_not_leave_within_the_grace(launch_script):
    run, seconds = _launch_timed(launch_script, STUBBORN, _all_ready(signal.SIGINT), grace_seconds=0.3)
    assert run.result.exit_code == 130
    assert 0.3 <= seconds < 120, "the ranks sleep for five minutes"


def test_a_second_ctrl_c_kills_at_once(launch_script):
    waiting = iter([None, signal.SIGINT])

    class Impatient(RecordingConsole):
        def notice(self, text):
            os.kill(os.getpid(), signal.SIGINT)

    def on_line(line):
        number = next(waiting, None)
        if number:
            os.kill(os.getpid(), number)

    run, seconds = _launch_timed(launch_script, STUBBORN, Impatient(on_line=on_line), grace_seconds=300)
    assert run.result.exit_code == 130
    assert seconds < 120, "neither the grace nor the sleep of the ranks"


def test_sigterm_is_143_for_plain_scripts_and_75_after_a_checkpoint(launch_script):
    run, _ = _launch_timed(launch_script, SLEEPER, _all_ready(signal.SIGTERM))
    assert run.result.exit_code == 143
    run, _ = _launch_timed(launch_script, CHECKPOINTER, _all_ready(signal.SIGTERM), max_restarts=3)
    assert (run.result.exit_code, run.result.attempts, run.result.failure) == (75, 1, None)
    assert run.console.text.count("saved") == 2


def test_sigusr1_is_forwarded_and_75_is_not_a_failure(launch_script):
    run, _ = _launch_timed(launch_script, CHECKPOINTER, _all_ready(signal.SIGUSR1), max_restarts=3)
    assert (run.result.exit_code, run.result.attempts, run.result.failure) == (75, 1, None)


@pytest.mark.parametrize("wakes", [True, False])
def test_a_stopped_fork_server_does_not_keep_the_ranks_running(launch_script, monkeypatch, wakes):
    if not wakes:  # as one that waits for a dead disk
        monkeypatch.setattr(client.ForkServerProcess, "wake", lambda self: None)
        monkeypatch.setattr(attempt, "_KILL_SECONDS", 0.5)
    waiting = iter([None, True])
    pids = []

    def on_line(line):
        if line != "ready":
            pids.append(int(line))
        elif next(waiting):
            os.kill(warm_pid(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGTERM)

    source = "import os, subprocess\nprint(subprocess.Popen(['sleep', '300']).pid, flush=True)\n" + SLEEPER
    console = RecordingConsole(on_line=on_line)
    run, seconds = _launch_timed(launch_script, source, console, grace_seconds=0.3)
    assert (run.result.exit_code, run.result.failure) == (143, None)
    assert seconds < 120, "the ranks sleep for five minutes"
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=LIMIT_SECONDS)
    # The parent of an orphan may be slow to collect its exit code.
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    assert launch_script("pass").result.exit_code == 0


def test_handlers_are_as_before_after_a_launch(launch_script):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    launch_script("pass")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before
    wakeup = signal.set_wakeup_fd(-1)
    assert wakeup == -1


SUPERVISOR = """
import sys
from pathlib import Path
from phalanx.launch import LaunchSpec, ScriptTarget, launch
spec = LaunchSpec(target=ScriptTarget(sys.argv[1]), ranks_per_node=2, log_dir=Path(sys.argv[2]), console_ranks="all")
sys.exit(launch(spec).exit_code)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_supervisor_that_is_signalled_leaves_nothing_running(tmp_path, number, code):
    """A real supervisor process, signalled with its whole foreground group as a terminal does it."""
    (tmp_path / "train.py").write_text(SLEEPER)
    supervisor = programs.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path / "train.py"), str(tmp_path / "logs")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    with supervisor:
        assert sorted(supervisor.stdout.readline() for _ in range(2)) == ["[r0] ready\n", "[r1] ready\n"]
        family = programs.started_by(supervisor)
        assert len(family) == 4, family
        os.killpg(supervisor.pid, number)
        assert supervisor.wait(LIMIT_SECONDS) == code
        _, alive = psutil.wait_procs(family, timeout=LIMIT_SECONDS)
        assert alive == []
