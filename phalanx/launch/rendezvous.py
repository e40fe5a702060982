"""The rendezvous of the ranks, as the launcher sees it: it talks to the store agent (`store_agent`) of this node.

On one node the agent serves a TCPStore on a loopback socket that the launcher has already bound, so that no port is
guessed and no other node can connect. With several it gathers them at the endpoint (`nodes`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import time

from phalanx.errors import ForkServerDiedError
from phalanx.host import messages
from phalanx.host.addresses import LOOPBACK
from phalanx.host.job_secret import VARIABLE
from phalanx.host.wire import Wire, decode, encode
from phalanx.launch.agent_messages import AskCalls, Calls, CallsWanted, Gather, NodeFinished, Post, RemoteFailure
from phalanx.launch.environment import NodeInfo
from phalanx.launch.failure import FailureReport
from phalanx.launch.forkserver.client import Session
from phalanx.launch.membership import ALL, LEADER
from phalanx.launch.spec import LaunchSpec

_GATHER_SECONDS = 600.0
_LEAVE_SECONDS = 4.0
_FULL_SECONDS = 0.005
"""How long to wait while the launcher has no room for messages."""


class Rendezvous:
    """The rendezvous of this node's ranks with all others. With one node it does not wait."""

    def __init__(self, spec: LaunchSpec, session: Session) -> None:
        self._spec = spec
        self._session = session
        self._log = spec.log_dir.absolute() / "store.log"
        self.agent: socket.socket | None = None
        """The connection to the store agent, to wait on for `receive`."""
        self.agent_key = ""
        self._outbox: messages.Outbox | None = None
        self.is_complete = False
        """Whether all nodes have joined: then the others wait for a message when this one leaves."""

    @property
    def has_other_nodes(self) -> bool:
        """Whether other supervisors take part."""
        return self._spec.num_nodes > 1

    def begin(self, attempt: int) -> NodeInfo | None:
        """Start gathering for an attempt; return the node's position at once when it is the only one."""
        if not self.has_other_nodes:
            self.close()
            # The port is bound here, so that it is known before the store runs.
            with socket.create_server((LOOPBACK, 0), backlog=1024) as listener:
                port = listener.getsockname()[1]
                self._fork_agent(f"store{attempt}", {"num_nodes": 1}, [listener.fileno()])
            size = self._spec.ranks_per_node
            return NodeInfo(0, 1, first_rank=0, world_size=size, master_addr=LOOPBACK, master_port=port)
        self.is_complete = False
        if self.agent is None:
            request = {
                "num_nodes": self._spec.num_nodes,
                "node_rank": self._spec.node_rank,
                "endpoint": self._spec.rdzv_endpoint,
                "launch_id": self._spec.run_id,
                "ranks_per_node": self._spec.ranks_per_node,
                "identity": dict(self._spec.identity),
                "seconds": self._spec.join_timeout or _GATHER_SECONDS,
                "secret": {**os.environ, **self._spec.env}.get(VARIABLE),
            }
            if (elastic := self._spec.elastic) is not None:
                request |= {"min_ranks": elastic.sizes[-1], "silence_seconds": elastic.silence_seconds}
            self._fork_agent("store", request, [])
        self.send(Gather(attempt))
        return None

    def _fork_agent(self, key: str, request: messages.Message, descriptors: list[int]) -> None:
        self.agent, far_end = messages.socket_pair()
        self._outbox = messages.Outbox(self.agent)
        self.agent_key = key
        with far_end:
            request = {"do": "agent", "key": key, "log": str(self._log), **request}
            self._session.fork(request, [far_end.fileno(), *descriptors])

    def receive(self) -> Wire | None:
        """Return the agent's next message (`agent_messages`), None when it has ended."""
        assert self.agent is not None
        received = messages.receive(self.agent)
        if received is None:
            return None
        message: Wire = decode(received[0])
        self.is_complete = self.is_complete or isinstance(message, NodeInfo)
        return message

    def publish_failure(self, failure: FailureReport) -> None:
        """Send the other nodes why this one stops."""
        if self.has_other_nodes:
            self.post(ALL, RemoteFailure(failure.to_message()))

    def ask_calls(self) -> None:
        """Ask all launchers, this one included, for the collectives of their ranks."""
        self.post(ALL, AskCalls(secrets.randbits(32)))

    def send_calls(self, wanted: CallsWanted, node_rank: int, calls: list[messages.Message]) -> None:
        """Send what this node's ranks have answered to the node that has asked."""
        self.post(wanted.node, Calls(wanted.number, node_rank, calls))

    def publish_end(self) -> None:
        """Report that all ranks of this node have succeeded; `AllEnded` comes when those of all nodes have."""
        self.post(LEADER, NodeFinished())

    def post(self, to: str | tuple[str, ...], message: Wire) -> None:
        """Send a message to the launcher of another node, or to those of several."""
        if self.has_other_nodes:
            self.send(Post(to, message))

    def send(self, request: Wire) -> None:
        """Ask the agent for something."""
        if self._outbox is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the loop sees the end of its socket
                self._outbox.send(encode(request))

    @property
    def has_unsent(self) -> bool:
        """Whether the agent has not had room for all messages: call `flush` soon."""
        return self._outbox is not None and not self._outbox.is_empty

    def flush(self) -> None:
        """Send what the agent has room for."""
        if self._outbox is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._outbox.flush()

    def close(self) -> None:
        """Close the connection, which ends the agent."""
        self.agent_key = ""
        self._outbox = None
        if self.agent is not None:
            self.agent.close()
            self.agent = None

    def leave(self) -> None:
        """End the agent and wait for its end; with several nodes it waits a moment for the slower ones."""
        self._end_agent()
        with contextlib.suppress(OSError):
            if self._log.stat().st_size == 0:
                self._log.unlink()

    def _end_agent(self) -> None:
        key = self.agent_key
        deadline = time.monotonic() + _LEAVE_SECONDS
        while self.has_unsent and time.monotonic() < deadline:
            time.sleep(_FULL_SECONDS)
            self.flush()
        self.close()
        with selectors.DefaultSelector() as selector:
            selector.register(self._session, selectors.EVENT_READ)
            while key and selector.select(deadline - time.monotonic()):
                try:
                    if self._session.receive().get("exited") == key:
                        return
                except ForkServerDiedError:
                    return  # and the agent with it
