"""NCCL: its environment variables for the network of a cluster, and several ranks on one GPU. Needs no torch.

NCCL detects most things itself, and a wrong variable costs more than a missing one: the tables hold what NCCL cannot
know, and nothing that only helps while debugging. What is better only on some clusters of a kind is shown as a comment
and not set.

NCCL refuses two ranks of one host on one GPU. With `share_gpus`, to debug a job for eight GPUs on one, each rank
gets its own host id (`host.gpus`), and NCCL sends through sockets. Processes take turns on a GPU, and a small
all-reduce takes milliseconds; under MPS they run at once. So the launcher runs its own MPS daemon.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from phalanx.host.addresses import default_interface
from phalanx.host.files import scratch_folder
from phalanx.host.gpus import gpu_memory, shared_memory
from phalanx.launch.spec import LaunchSpec

NO_CARD = "^lo,docker,veth"
"""All cards but those that lead nowhere, where no default route names one."""


class Variable(NamedTuple):
    """One variable, its value, and why."""

    name: str
    value: str
    reason: str
    advice: bool = False
    """Whether it is only shown, as a comment: another value that may be better, where its reason holds."""


_QUIET = Variable("NCCL_DEBUG", "WARN", "errors and nothing else; INFO while you look for a fault")
_CARD = Variable("NCCL_SOCKET_IFNAME", "{card}", "the card of the default route: a container's own cards lead nowhere")
_SOCKETS = (
    Variable("NCCL_IB_DISABLE", "1", "without InfiniBand: do not search for it, nor wait for it"),
    _CARD,
    Variable("NCCL_SOCKET_NTHREADS", "4", "one thread fills about 10 Gb/s of a TCP link; 4 use a fast card"),
    Variable("NCCL_NSOCKS_PERTHREAD", "2", "clouds limit each TCP flow: several a thread (threads x sockets <= 64)"),
)

_BUFFER = Variable("NCCL_BUFFSIZE", "4194304", "4 MB: long round trips want more bytes under way")
_IN_ORDER = Variable(
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "1",
    "tensor_parallel without fsdp, before Blackwell: kernels start in launch order, so that communication overlaps",
    advice=True,
)

CLUSTERS: dict[str, tuple[Variable, ...]] = {
    "ethernet": (
        _QUIET,
        *_SOCKETS,
        _BUFFER,
        _IN_ORDER,
    ),
    "gcp": (
        _QUIET,
        _SOCKETS[0],
        Variable("NCCL_SOCKET_IFNAME", "{eth0}", "eth0, or the card of the default route where there is none"),
        *_SOCKETS[2:],
        Variable("NCCL_NSOCKS_PERTHREAD", "4", "gVNIC limits a flow: 4 x 4 reach its 100 Gb/s and more", advice=True),
        _BUFFER,
        Variable("NCCL_CROSS_NIC", "0", "where each card has its own rail: keep a ring on one", advice=True),
        _IN_ORDER,
    ),
    "aws-efa": (
        _QUIET,
        Variable("FI_PROVIDER", "efa", "libfabric's way to the EFA cards, through the aws-ofi-nccl plugin"),
        Variable("NCCL_NET", "AWS Libfabric", "insist on the plugin: without it NCCL falls back to TCP in silence"),
        Variable("FI_EFA_USE_DEVICE_RDMA", "1", "GPUDirect: EFA reads GPU memory itself (p4d and later)"),
        Variable("FI_EFA_FORK_SAFE", "1", "DataLoader workers fork; registered memory must survive it"),
        Variable("NCCL_SOCKET_IFNAME", "{card}", "only for the rendezvous: data goes over EFA"),
        _IN_ORDER,
    ),
    "infiniband": (
        _QUIET,
        Variable("NCCL_IB_DISABLE", "0", "use InfiniBand, also where an image or a profile has turned it off"),
        Variable("NCCL_NET_GDR_LEVEL", "2", "GPUDirect RDMA where PCI switches join card and GPU (2 is NCCL's PXB)"),
        Variable("NCCL_NET_GDR_LEVEL", "PHB", "also where they only share a CPU: no stop in host memory", advice=True),
        Variable("NCCL_SOCKET_IFNAME", "{ib0}", "IPoIB for the rendezvous, else the default card; data go by RDMA"),
        Variable("NCCL_IB_TIMEOUT", "22", "17 s for an answer: large fabrics pause while routes change", advice=True),
        Variable("NCCL_IB_RETRY_CNT", "7", "as often as the hardware can before it gives a link up", advice=True),
        _IN_ORDER,
    ),
}


def nccl_variables(cluster: str, interface: str | None = None) -> list[Variable]:
    """Return the variables for a kind of cluster; `interface`: the card, if not that of the default route."""
    card = interface or default_interface() or NO_CARD
    present = {name for _, name in socket.if_nameindex()}
    named = {name: interface or (name if name in present else card) for name in ("eth0", "ib0")}
    return [variable._replace(value=variable.value.format(card=card, **named)) for variable in CLUSTERS[cluster]]


def nccl_environment(cluster: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to the ranks' environment, without variables that the user has set."""
    if cluster is None:
        return {}
    wanted = [variable for variable in nccl_variables(cluster) if not variable.advice]
    return {variable.name: variable.value for variable in wanted if variable.name not in environ}


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
"""Runs in a separate process that waits for the end of the launcher, however it ends: the daemon would stay."""


@contextmanager
def sharing_gpus(
    spec: LaunchSpec, environ: Mapping[str, str], notice: Callable[[str], None]
) -> Iterator[dict[str, str]]:
    """Run an MPS daemon for the block where ranks share GPUs, say so, and yield the variables of the ranks.

    A daemon that the user has named is used, and not ended. Where none starts, the ranks look for one in a folder
    without any: the daemon in the usual place may be another user's, which would let them wait.

    Ranks that may be replaced take turns, without MPS: if one is killed with work outstanding, NVIDIA leaves the
    other clients of a daemon in an undefined state. Illegal memory accesses and a dead daemon were seen.
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
        variables = {_PIPES: str(folder), _LOGS: str(folder)}
        if spec.max_restarts or spec.elastic is not None:
            notice(_words(spec, "in turns: under MPS a killed rank can take others with it"))
            yield variables
            return
        # CUDA_VISIBLE_DEVICES of a daemon would number the GPUs of its clients anew.
        daemon = {name: value for name, value in environ.items() if name != "CUDA_VISIBLE_DEVICES"} | variables
        with _ended_with_this_process(daemon):
            problem = _start(folder, daemon)
            notice(_words(spec, "MPS" if problem is None else f"in turns, which is slow: {problem}"))
            yield variables


def _words(spec: LaunchSpec, how: str) -> str:
    """Return how the GPUs are shared: `4 ranks share each GPU (34 GB each; MPS), so speed is not representative`."""
    total = gpu_memory()
    share = f"{shared_memory(spec.ranks_per_gpu, total) / 1e9:.0f} GB each; " if total else ""
    return f"{spec.ranks_per_gpu} ranks share each GPU ({share}{how}), so speed is not representative"


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
