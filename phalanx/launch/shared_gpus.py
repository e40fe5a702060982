"""Several ranks on one GPU over real NCCL (`share_gpus`): a job for eight GPUs, debugged on the one that is there.

NCCL refuses two ranks of one host on one GPU, so each rank gets a host id of its own (`host.gpus`), and NCCL sends
through sockets. Processes take turns on a GPU, and a small all-reduce takes milliseconds; under MPS they run at once.
So the launcher runs an MPS daemon of its own while its ranks run.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from phalanx.host.files import scratch_folder
from phalanx.host.gpus import gpu_memory, shared_memory
from phalanx.launch.spec import LaunchSpec

_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_CONTROL = "nvidia-cuda-mps-control"
_START_SECONDS = 20.0
_QUIT_SECONDS = 10
_LONGEST = 85
"""Characters of the folder's path: those of a Unix socket in it are at most 107."""
_QUIT = f"""
cat >/dev/null
echo quit | timeout {_QUIT_SECONDS} {_CONTROL} && exit
kill -9 $(cat "${_PIPES}/{_CONTROL}.pid")
"""
"""Runs in a process of its own that waits for the end of the launcher, however it ends: the daemon would stay."""


@contextmanager
def sharing_gpus(
    spec: LaunchSpec, environ: Mapping[str, str], notice: Callable[[str], None]
) -> Iterator[dict[str, str]]:
    """Run an MPS daemon for the block where ranks share GPUs, say so, and yield the variables of the ranks.

    A daemon that the user has named is used, and not ended. Where none starts, the ranks look for one in a folder
    without any: the daemon in the usual place may be another user's, which would let them wait.
    """
    if spec.ranks_per_gpu == 1:
        yield {}
        return
    if _PIPES in environ:
        is_there = (Path(environ[_PIPES]) / "control").exists()
        notice(_words(spec, f"{'' if is_there else 'in turns: there is no daemon in '}{_PIPES}={environ[_PIPES]}"))
        yield {}
        return
    with scratch_folder("mps") as folder:
        found = {_PIPES: str(folder), _LOGS: str(folder)}
        # CUDA_VISIBLE_DEVICES of a daemon would number the GPUs of its clients anew.
        daemon = {name: value for name, value in environ.items() if name != "CUDA_VISIBLE_DEVICES"} | found
        with _ended_with_this_process(daemon):
            problem = _start(folder, daemon)
            notice(_words(spec, "MPS" if problem is None else f"in turns, which is slow: {problem}"))
            yield found


def _words(spec: LaunchSpec, how: str) -> str:
    """Return how the GPUs are shared: `4 ranks share each GPU (34 GB each; MPS), so speed is not representative`."""
    total = gpu_memory()
    each = f"{shared_memory(spec.ranks_per_gpu, total) / 1e9:.0f} GB each; " if total else ""
    return f"{spec.ranks_per_gpu} ranks share each GPU ({each}{how}), so speed is not representative"


@contextmanager
def _ended_with_this_process(environ: Mapping[str, str]) -> Iterator[None]:
    """End the daemon after the block, and also where this process is killed in it."""
    quiet = subprocess.DEVNULL
    ending = subprocess.Popen(
        ["sh", "-c", _QUIT], env=environ, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        yield
    finally:
        ending.communicate()


def _start(folder: Path, environ: Mapping[str, str]) -> str | None:
    """Start a daemon; return why it did not start."""
    if shutil.which(_CONTROL, path=environ.get("PATH")) is None:
        return f"{_CONTROL} is not installed"
    if len(str(folder)) > _LONGEST:
        return f"MPS needs a shorter path than {folder}: set TMPDIR=/tmp"
    said = folder / "start.log"
    try:  # the daemon keeps its output open: a pipe would never end
        with said.open("wb") as output:
            command = [_CONTROL, "-d"]
            done = subprocess.run(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=_START_SECONDS,
                check=False,
                start_new_session=True,
            )
    except subprocess.TimeoutExpired:
        return f"MPS has not started within {_START_SECONDS:g} s"
    if done.returncode == 0:
        return None
    lines = said.read_text(errors="replace").split("\n", 1)
    return f"MPS does not start: {lines[0].strip() or f'exit code {done.returncode}'}"
