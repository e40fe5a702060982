"""Stopped before or just as the ranks start: all processes end at once, with the right code and no other cause."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import programs
import psutil
import pytest
from ranks import RecordingConsole, run_script, warm_pid
from waiting import LIMIT_SECONDS

from phalanx.launch import LaunchSpec, ScriptTarget, watches
from phalanx.launch.environment import NodeInfo
from phalanx.launch.forkserver import client
from phalanx.launch.group import RankGroup
from phalanx.launch.launcher_loop import parse

ROOT = Path(__file__).resolve().parents[2]

SUPERVISOR = """
import sys
from pathlib import Path
from phalanx.launch import LaunchSpec, ScriptTarget, launch
spec = LaunchSpec(target=ScriptTarget(sys.argv[1]), ranks_per_node=2, log_dir=Path(sys.argv[2]), console_ranks="all")
result = launch(spec)
print(result.failure)
sys.exit(result.exit_code)
"""

SLOW_IMPORT = """
import os, signal
open(os.environ["IMPORT_BEGAN"], "w").close()
while True:
    signal.pause()
"""
"""In place of torch, on a disk so slow that its import never ends."""


@contextlib.contextmanager
def _supervisor(tmp_path, source, **variables):
    """Run a real supervisor; whatever the test finds, it does not outlive it."""
    (tmp_path / "train.py").write_text(source)
    process = programs.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path / "train.py"), str(tmp_path / "logs")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), **variables},
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def _output(supervisor):
    """Everything it still says, within the time a stop may take."""
    return supervisor.communicate(timeout=LIMIT_SECONDS)[0]


def _slow_import(tmp_path):
    (tmp_path / "slow" / "torch").mkdir(parents=True)
    (tmp_path / "slow" / "torch" / "__init__.py").write_text(SLOW_IMPORT)
    os.mkfifo(tmp_path / "began")
    return {"PYTHONPATH": f"{tmp_path / 'slow'}:{ROOT}", "IMPORT_BEGAN": str(tmp_path / "began")}


def _await_import(variables):
    """Opening one end of a fifo waits for the other."""
    open(variables["IMPORT_BEGAN"]).close()


def test_an_importing_fork_server_is_killed_with_its_last_session(tmp_path):
    variables = _slow_import(tmp_path)
    process = client.ForkServerProcess({**os.environ, **variables})
    try:
        first, second = process.open_session(), process.open_session()
        _await_import(variables)
        first.abort()
        assert psutil.pid_exists(process.pid)
        second.abort()
        assert not psutil.pid_exists(process.pid)
    finally:
        process.close()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_stop_while_torch_is_imported_ends_everything_at_once(tmp_path, number, code):
    variables = _slow_import(tmp_path)
    with _supervisor(tmp_path, "pass", **variables) as supervisor:
        _await_import(variables)
        family = programs.started_by(supervisor)
        assert len(family) == 1, family
        supervisor.send_signal(number)
        words = _output(supervisor)
        assert supervisor.returncode == code
        _, alive = psutil.wait_procs(family, timeout=LIMIT_SECONDS)
        assert alive == []
    if number != signal.SIGKILL:
        assert words == f"stopped by {number.name} while importing torch; no rank had started.\n"


def test_a_signal_for_a_rank_that_was_just_forked_is_neither_lost_nor_ours(tmp_path, fork_server):
    (tmp_path / "train.py").write_text("import time\ntime.sleep(300)\n")
    spec = LaunchSpec(target=ScriptTarget(tmp_path / "train.py"), ranks_per_node=1, log_dir=tmp_path)
    place = NodeInfo(0, 1, first_rank=0, world_size=1, master_addr="127.0.0.1", master_port=1)
    process = client.fork_server()
    session = process.open_session()
    for _ in range(10):
        group = RankGroup(spec, place, session, RecordingConsole())
        with selectors.DefaultSelector() as selector:
            group.start(0, dict(os.environ), selector, tmp_path)
            # Right behind the request to fork: it arrives before the child has done anything.
            group.signal(signal.SIGTERM)
            while group.alive:
                group.on_message(parse(session.receive()))
            group.close(selector)
        assert [state.code for state in group.ranks.values()] == [-signal.SIGTERM]
    session.close()
    assert client.fork_server() is process


CHECKPOINTER = """
import signal, sys
def leave(number, frame):
    signal.signal(number, signal.SIG_IGN)  # it comes twice: from the scheduler and from the supervisor
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
while True:
    signal.pause()
"""


def _terminate(processes):
    for process in processes:
        process.send_signal(signal.SIGTERM)


def test_a_scheduler_that_signals_every_process_lets_the_ranks_save(tmp_path):
    with _supervisor(tmp_path, CHECKPOINTER) as supervisor:
        assert [supervisor.stdout.readline()[5:] for _ in range(2)] == ["ready\n"] * 2
        family = programs.started_by(supervisor)
        helpers = [member for member in family if member.name() in ("phalanx-fork", "phalanx-store0")]
        _terminate(helpers)
        gone, _ = psutil.wait_procs(helpers, timeout=0.2)
        assert gone == []
        _terminate(member for member in family if member not in helpers)
        assert [supervisor.stdout.readline()[5:] for _ in range(2)] == ["saved\n"] * 2
        supervisor.send_signal(signal.SIGTERM)
        assert _output(supervisor) == "None\n"
        assert supervisor.returncode == 75
        _, alive = psutil.wait_procs(family, timeout=LIMIT_SECONDS)
        assert alive == []


def test_a_fork_server_that_dies_during_a_stop_changes_nothing(tmp_path, fork_server):
    """The signal and the death arrive together: whichever is seen first, the user asked for a stop."""
    waiting = iter([None, True])

    def on_line(line):
        if next(waiting, None):
            os.kill(warm_pid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGTERM)

    console = RecordingConsole(on_line=on_line)
    run = run_script(tmp_path, "import time\nprint('ready')\ntime.sleep(300)\n", console, console_ranks="all")
    assert (run.result.exit_code, run.result.failure) == (143, None)


def _free_endpoint():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(("node_rank", "silence"), [(0, ""), (1, " (no answer there yet)")])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_single_machine_reports_what_it_waits_for_and_stops_on_a_signal(
    launch_script, monkeypatch, node_rank, silence, number, code
):
    asked = []

    class Impatient(RecordingConsole):
        def notice(self, text):
            super().notice(text)
            if text.startswith("waiting"):
                asked.append(time.monotonic())
                os.kill(os.getpid(), number)

    monkeypatch.setattr(watches, "NODES_MOMENTS", (0.05, 30.0))
    endpoint = _free_endpoint()
    run = launch_script("pass", Impatient(), num_nodes=2, node_rank=node_rank, rdzv_endpoint=endpoint)
    waiting = f"waiting for 1 of 2 nodes at {endpoint}{silence}"
    assert run.console.notices == [waiting, f"{number.name}: stopping"]
    assert run.result.exit_code == code
    assert run.report == f"stopped by {number.name} while {waiting}; no rank had started."
    assert time.monotonic() - asked[0] < 120, "rendezvous waits for minutes"
