"""The process that hosts, or connects to, the ranks' rendezvous store; it ends when its supervisor's socket closes.

On one node it serves a TCPStore on a loopback socket that the supervisor has already bound, so that no port is guessed
and no other machine can connect. With several nodes it gathers them at the endpoint (see `nodes`).
"""

from __future__ import annotations

import os
import signal
import socket
from typing import NoReturn

from phalanx.errors import PhalanxError, UsageError
from phalanx.host import messages
from phalanx.launch.elastic_nodes import ElasticNodes
from phalanx.launch.nodes import NodeGroup

_POLL_SECONDS = 0.2


def serve(request: messages.Message, descriptors: list[int]) -> NoReturn:
    """Run as the store agent of a supervisor until it closes its end of the socket."""
    supervisor = socket.socket(fileno=descriptors[0])
    # A scheduler may signal every process of a job: the ranks still need the store while they stop.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # torch's messages about lost connections go to a file: they explain little and would hide the report.
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if request["num_nodes"] == 1:
        _serve_one_node(supervisor, descriptors[1])
    else:
        _serve_nodes(supervisor, request)
    os._exit(0)


def _serve_one_node(supervisor: socket.socket, listener: int) -> None:
    from torch.distributed import TCPStore

    port = socket.socket(fileno=os.dup(listener)).getsockname()[1]
    # The plain server blocks until a request is complete, so that any local process could stop the run with half a
    # request; libuv's server does not.
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener, use_libuv=True
    )
    messages.receive(supervisor)
    assert store.port == port


def _serve_nodes(supervisor: socket.socket, request: messages.Message) -> None:
    nodes = None
    try:
        nodes = ElasticNodes(request) if "min_ranks" in request else NodeGroup(request)
        _follow(supervisor, nodes)
    except PhalanxError as error:
        usage = isinstance(error, UsageError)
        messages.send(supervisor, {"error": error.message, "hint": error.hint, "usage": usage})
        supervisor.settimeout(None)
        messages.receive(supervisor)
    if nodes is not None:
        nodes.leave()


def _follow(supervisor: socket.socket, nodes: NodeGroup) -> None:
    """Execute the supervisor's requests, and send it news of the other nodes, until it closes the socket."""
    supervisor.settimeout(_POLL_SECONDS if type(nodes) is NodeGroup else _POLL_SECONDS / 10)
    while True:
        try:
            received = messages.receive(supervisor)
        except TimeoutError:
            received = ({}, [])
        if received is None:
            return
        request, _ = received
        if "gather" in request:
            node = nodes.gather(request["gather"], lambda message: messages.send(supervisor, message))
            messages.send(supervisor, {"node": node})
        elif "post" in request:
            nodes.post(request["to"], request["post"])
        elif "failed" in request:
            nodes.publish_failure(request["failed"])
        elif "ask_calls" in request:
            nodes.ask_calls()
        elif "calls" in request:
            nodes.publish_calls(request["number"], request["calls"])
        elif "finished" in request:
            nodes.publish_end()
        for message in nodes.news():
            messages.send(supervisor, message)
