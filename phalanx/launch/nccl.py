"""NCCL's environment variables for the network of a cluster, with the reason for each. Needs no torch and no GPU.

NCCL detects most things itself, and a wrong variable costs more than a missing one: the tables hold what NCCL cannot
know, and nothing that only helps while debugging. What is better only on some clusters of a kind is shown as a comment
and not set.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import NamedTuple

from phalanx.host.addresses import default_interface

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
