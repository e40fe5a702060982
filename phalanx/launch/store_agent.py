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
from phalanx.launch.forkserver import messages
from phalanx.launch.nodes import NodeGroup

_POLL_SECONDS = 0.2


def serve(request: messages.Message, descriptors: list[int]) -> NoReturn:
    """Run as the store agent of a supervisor until it closes its end of the socket."""
    line = socket.socket(fileno=descriptors[0])
    # A scheduler may signal every process of a job: the ranks still need the store while they stop.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _redirect_output(request["log"])
    if request["num_nodes"] == 1:
        _serve_one_node(line, descriptors[1])
    else:
        _serve_nodes(line, request)
    os._exit(0)


def _redirect_output(path: str) -> None:
    """Write torch's messages about lost connections to a file: they explain little and would hide the report."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _serve_one_node(line: socket.socket, listener: int) -> None:
    from torch.distributed import TCPStore

    port = socket.socket(fileno=os.dup(listener)).getsockname()[1]
    # The plain server blocks until a request is complete, so that any local process could stop the run with half a
    # request; libuv's server does not.
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener, use_libuv=True
    )
    messages.receive(line)
    assert store.port == port


def _serve_nodes(line: socket.socket, request: messages.Message) -> None:
    from phalanx.launch.nodes import NodeGroup

    nodes = None
    try:
        nodes = NodeGroup(request)
        _follow(line, nodes)
    except PhalanxError as error:
        usage = isinstance(error, UsageError)
        messages.send(line, {"error": error.message, "hint": error.hint, "usage": usage})
        line.settimeout(None)
        messages.receive(line)
    if nodes is not None:
        nodes.leave()


def _follow(line: socket.socket, nodes: NodeGroup) -> None:
    """Execute the supervisor's requests, and send it news of the other nodes, until it closes the socket."""
    line.settimeout(_POLL_SECONDS)
    while True:
        try:
            received = messages.receive(line)
        except TimeoutError:
            received = ({}, [])
        if received is None:
            return
        request, _ = received
        if "gather" in request:
            place = nodes.gather(request["gather"], lambda message: messages.send(line, message))
            messages.send(line, {"place": place})
        elif "failed" in request:
            nodes.publish_failure(request["failed"])
        elif "finished" in request:
            nodes.publish_end()
        for message in nodes.news():
            messages.send(line, message)
