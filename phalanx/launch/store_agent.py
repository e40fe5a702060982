"""The process that hosts the store of a node's ranks, or connects to it, for as long as the launcher wants.

It is forked from the fork server, which has loaded torch; the launcher has not, and talks to it over a socket
(`rendezvous`). It ends when the launcher closes its end.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
from typing import NoReturn

from torch.distributed import TCPStore

from phalanx.errors import PhalanxError
from phalanx.host import messages
from phalanx.host.addresses import LOOPBACK
from phalanx.host.wire import Wire, decode, encode
from phalanx.launch.agent_messages import Gather, Lead, Post, TakeIn, WatchNodes
from phalanx.launch.gathering import refusal
from phalanx.launch.nodes import NodeGroup

_POLL_SECONDS = 0.2
_FULL_SECONDS = 0.005
"""How long to wait while the launcher has no room for messages."""


def serve(request: messages.Message, descriptors: list[int]) -> NoReturn:
    """Run as the store agent of a launcher until it closes its end of the socket."""
    launcher = socket.socket(fileno=descriptors[0])
    # A scheduler may signal every process of a job: the ranks still need the store while they stop.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # torch's messages about lost connections go to a file: they explain little and would hide the report.
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if request["num_nodes"] == 1:
        _serve_one_node(launcher, descriptors[1])
    else:
        _serve_nodes(launcher, request)
    os._exit(0)


def _serve_one_node(launcher: socket.socket, listener: int) -> None:
    port = socket.socket(fileno=os.dup(listener)).getsockname()[1]
    # The plain server blocks until a request is complete, so that any local process could stop the run with half a
    # request; libuv's server does not.
    store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener, use_libuv=True)
    messages.receive(launcher)
    assert store.port == port


def _serve_nodes(launcher: socket.socket, request: messages.Message) -> None:
    nodes = None
    try:
        nodes = NodeGroup(request)
        _follow(launcher, nodes)
    except PhalanxError as error:
        messages.send(launcher, encode(refusal(error)))
        messages.receive(launcher)
    if nodes is not None:
        nodes.leave()


def _follow(launcher: socket.socket, nodes: NodeGroup) -> None:
    """Execute the launcher's requests, and send it news of the other nodes, until it closes the socket."""
    outbox = messages.Outbox(launcher)

    def send(message: Wire) -> None:
        outbox.send(encode(message))

    with selectors.DefaultSelector() as selector:
        selector.register(launcher, selectors.EVENT_READ)
        selector.register(nodes.wakeup, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select(_POLL_SECONDS if outbox.is_empty else _FULL_SECONDS)]
            if launcher in ready:
                received = messages.receive(launcher)
                if received is None:
                    return
                match decode(received[0]):
                    case Gather(attempt):
                        send(nodes.gather(attempt, send))
                    case WatchNodes() as request:
                        nodes.change(request)
                    case Lead(term):
                        nodes.lead(term)
                    case TakeIn() as request:
                        nodes.take_in(request)
                    case Post(to, message):
                        nodes.post(to, message)
                    case request:
                        raise AssertionError(f"the launcher asks for {request}, which is no request")
            for news in nodes.news():
                send(news)
            outbox.flush()
