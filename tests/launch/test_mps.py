"""The MPS daemon of a launch whose ranks share GPUs: started for it, ended with it, and never another one.

A script in place of NVIDIA's program, which needs a GPU: it records its calls, and its daemon is a process that sleeps.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import programs
import psutil
import pytest
from waiting import LIMIT_SECONDS

ROOT = Path(__file__).resolve().parents[2]
CONTROL = r"""#!/bin/sh
folder="$CUDA_MPS_PIPE_DIRECTORY"
if [ "$1" = -d ]; then
    echo "start $folder visible=$CUDA_VISIBLE_DEVICES" >> "$MPS_CALLS"
    if [ -n "$MPS_REFUSES" ]; then echo "An instance of this daemon is already running"; exit 1; fi
    touch "$folder/control"
    setsid sleep 600 &
    echo $! | tee "$folder/nvidia-cuda-mps-control.pid" >> "$MPS_CALLS"
else
    read words
    echo "$words $folder" >> "$MPS_CALLS"
    [ -n "$MPS_IGNORES_QUIT" ] && exit 1
    kill $(cat "$folder/nvidia-cuda-mps-control.pid")
fi
"""
SHOW = """
import os
print(os.environ["NCCL_HOSTID"], os.environ.get("CUDA_MPS_PIPE_DIRECTORY"))
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Return the file with what was asked of the daemon."""
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text(CONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("MPS_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return tmp_path / "calls"


def has_ended(pid: int) -> bool:
    """Whether a process ends within seconds; as a zombie it waits for a parent that is not this one."""
    for _ in range(200):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def shared(launch_script):
    run = launch_script(SHOW, ranks_per_gpu=2)
    assert run.result.exit_code == 0, run.report
    (notice,) = [text for text in run.console.notices if "GPU" in text]
    assert notice.startswith("2 ranks share each GPU (")
    assert notice.endswith(", so speed is not representative")
    ids, folders = zip(*(run.log(rank).split() for rank in range(2)), strict=True)
    assert len(set(ids)) == 2
    assert len(set(folders)) == 1
    return notice, folders[0]


@pytest.mark.parametrize("ignores_quit", [False, True])
def test_a_daemon_of_its_own_runs_while_the_ranks_run(launch_script, calls, monkeypatch, ignores_quit):
    if ignores_quit:
        monkeypatch.setenv("MPS_IGNORES_QUIT", "1")
    notice, folder = shared(launch_script)
    assert "(MPS)" in notice
    assert folder.startswith(tempfile.gettempdir())
    start, pid, end = calls.read_text().splitlines()
    assert (start, end) == (f"start {folder} visible=", f"quit {folder}"), "it numbers the GPUs as the ranks do"
    assert has_ended(int(pid)), "killed by its number where it does not answer"
    assert not Path(folder).exists()


def test_ranks_go_on_in_turns_where_the_daemon_is_refused(launch_script, calls, monkeypatch):
    monkeypatch.setenv("MPS_REFUSES", "1")
    notice, folder = shared(launch_script)
    assert "in turns, which is slow: MPS does not start: An instance of this daemon is already running" in notice
    assert folder.startswith(tempfile.gettempdir()), "else ranks would use the daemon in the usual place"


def test_ranks_go_on_in_turns_without_the_program(launch_script, calls, monkeypatch):
    monkeypatch.setenv("PATH", os.environ["PATH"].partition(":")[2])
    if any((Path(folder) / "nvidia-cuda-mps-control").exists() for folder in os.environ["PATH"].split(":")):
        pytest.skip("NVIDIA's own is installed")
    assert "nvidia-cuda-mps-control is not installed" in shared(launch_script)[0]
    assert not calls.exists()


def test_a_daemon_that_the_user_names_is_used_and_stays(launch_script, calls, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    notice, folder = shared(launch_script)
    assert "in turns: there is no daemon in CUDA_MPS_PIPE_DIRECTORY=" in notice
    (tmp_path / "control").touch()
    notice, folder = shared(launch_script)
    assert f"(CUDA_MPS_PIPE_DIRECTORY={tmp_path})" in notice
    assert folder == str(tmp_path)
    assert not calls.exists()


def test_a_folder_too_deep_for_a_socket_is_named(launch_script, calls, monkeypatch, tmp_path):
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert "set TMPDIR=/tmp" in shared(launch_script)[0]
    assert "start" not in (calls.read_text() if calls.exists() else "")


def test_ranks_with_gpus_of_their_own_need_none(launch_script, calls):
    run = launch_script("import os\nprint(sorted(os.environ.keys() & {'NCCL_HOSTID', 'CUDA_MPS_PIPE_DIRECTORY'}))")
    assert (run.log(0), run.console.notices) == ("[]\n", [])
    assert not calls.exists()


LAUNCHER = """
import sys
from pathlib import Path
from phalanx.launch import LaunchSpec, ScriptTarget, launch
target, logs = ScriptTarget(sys.argv[1]), Path(sys.argv[2])
spec = LaunchSpec(target=target, ranks_per_node=2, log_dir=logs, console_ranks="all", ranks_per_gpu=2)
sys.exit(launch(spec).exit_code)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_launcher_that_is_killed_leaves_no_daemon(calls, tmp_path, number, code):
    (tmp_path / "train.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    temporary = tempfile.TemporaryDirectory()  # with a short path, which sockets need
    launcher = programs.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "train.py"), str(tmp_path / "logs")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": temporary.name},
        start_new_session=True,
    )
    with temporary, launcher:
        assert sorted(launcher.stdout.readline() for _ in range(2)) == ["[r0] ready\n", "[r1] ready\n"]
        os.killpg(launcher.pid, number)
        assert launcher.wait(LIMIT_SECONDS) == code
        assert has_ended(int(calls.read_text().splitlines()[1]))
    assert calls.read_text().splitlines()[-1].startswith("quit ")
