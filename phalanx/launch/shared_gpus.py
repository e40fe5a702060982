"""Several ranks on one GPU over real NCCL (`share_gpus`): a job for eight GPUs, debugged on the one that is there.

NCCL refuses two ranks on one GPU of a host. With another host id for each rank it takes them for hosts of their own and
sends through sockets. Without MPS the processes take turns on the GPU, and a small all-reduce takes milliseconds; so a
daemon of this run's own is started where that is possible.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.launch.scratch import scratch_folder

HOST_ID = "NCCL_HOSTID"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_CONTROL = "nvidia-cuda-mps-control"
_SECONDS = 20.0
_QUIT = f"cat >/dev/null; echo quit | {_CONTROL} >/dev/null 2>&1"


def check_host_id(environ: Mapping[str, str]) -> None:
    """Refuse a host id of the user's: all ranks would have the same."""
    if given := environ.get(HOST_ID):
        raise UsageError(
            f"share_gpus gives each rank its own {HOST_ID}, but it is set to '{given}'.", hint=f"unset {HOST_ID}"
        )


def sharing_environment(host: str, slot: int) -> dict[str, str]:
    """Return the variables of one rank, by which NCCL takes it for a host of its own."""
    return {HOST_ID: f"{host}-{slot}", "NCCL_IB_DISABLE": "1"}


@contextmanager
def mps_environment(environ: Mapping[str, str], notice: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """Run an MPS daemon for the block; yield the variables that ranks reach it by, none where it does not start.

    A daemon that the user has named is used, and not ended.
    """
    if _PIPES in environ:
        notice(f"ranks use the MPS daemon of {_PIPES}={environ[_PIPES]}")
        yield {}
        return
    if shutil.which(_CONTROL) is None:
        notice(f"{_CONTROL} is not installed: the ranks of a GPU take turns, and each collective takes milliseconds")
        yield {}
        return
    with scratch_folder("mps") as folder:
        found = {_PIPES: str(folder / "pipes"), _LOGS: str(folder / "logs")}
        if (problem := _start(folder, {**environ, **found})) is not None:
            notice(f"MPS does not start ({problem}): the ranks of a GPU take turns, a collective takes milliseconds")
            yield {}
            return
        # A process that waits for the end of this one, however it ends: the daemon would stay.
        ending = subprocess.Popen(
            ["sh", "-c", _QUIT],
            env={**environ, **found},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield found
        finally:
            assert ending.stdin is not None, "a pipe"
            ending.stdin.close()
            ending.wait()


def _start(folder: Path, environ: Mapping[str, str]) -> str | None:
    """Start a daemon; return why it did not."""
    for name in (_PIPES, _LOGS):
        os.makedirs(environ[name], mode=0o700)
    try:
        done = subprocess.run(
            [_CONTROL, "-d"], env=environ, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_SECONDS:g} s"
    if done.returncode == 0:
        return None
    said = (done.stderr or done.stdout).strip().splitlines()
    return said[0] if said else f"exit code {done.returncode}"
