"""Rendezvous client: the supervisor's side of the store agent."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time

from phalanx.errors import ForkServerDiedError
from phalanx.host import messages
from phalanx.host.addresses import LOOPBACK
from phalanx.host.signed_store import VARIABLE
from phalanx.launch.environment import NodeInfo
from phalanx.launch.failure import FailureReport
from phalanx.launch.forkserver.client import Session
from phalanx.launch.spec import LaunchSpec

_GATHER_SECONDS = 600.0
_LEAVE_SECONDS = 4.0


class Rendezvous:
    """The rendezvous of this node's ranks with all others. With one node it does not wait."""

    def __init__(self, spec: LaunchSpec, session: Session) -> None:
        self._spec = spec
        self._session = session
        self._log = spec.log_dir.absolute() / "store.log"
        self.agent: socket.socket | None = None
        """The connection to the store agent, to wait on for `receive`."""
        self.agent_key = ""
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
        self._send({"gather": attempt})
        return None

    def _fork_agent(self, key: str, request: messages.Message, descriptors: list[int]) -> None:
        self.agent, far_end = messages.socket_pair()
        self.agent_key = key
        with far_end:
            request = {"do": "agent", "key": key, "log": str(self._log), **request}
            self._session.fork(request, [far_end.fileno(), *descriptors])

    def receive(self) -> messages.Message | None:
        """Return the agent's next message, None when it has ended.

        It is one of "arrived", "node", "remote_failure", "silent_nodes", "question", "answer", "all_ended" and "error";
        where the number of machines may change, also "mail", "lost_nodes" and "leader".
        """
        assert self.agent is not None
        received = messages.receive(self.agent)
        if received is None:
            return None
        self.is_complete = self.is_complete or "node" in received[0]
        return received[0]

    def publish_failure(self, failure: FailureReport) -> None:
        """Publish to the other nodes why this one stops."""
        if self.has_other_nodes:
            self._send({"failed": failure.to_message()})

    def ask_calls(self) -> None:
        """Ask all launchers, this one included, for the collectives of their ranks."""
        self._send({"ask_calls": True})

    def send_calls(self, number: int, calls: list[messages.Message]) -> None:
        """Send what this machine's ranks have answered to a question."""
        self._send({"calls": calls, "number": number})

    def publish_end(self) -> None:
        """Publish to the other nodes that all ranks of this one have succeeded."""
        self._send({"finished": True})

    def post(self, node: str, message: messages.Message) -> None:
        """Send a message to the launcher of another machine."""
        self._send({"post": message, "to": node})

    def _send(self, message: messages.Message) -> None:
        if self.agent is None:
            return
        try:
            messages.send(self.agent, message)
        except (BrokenPipeError, ConnectionResetError):
            # The agent has ended; the loop sees the end of its socket.
            return

    def close(self) -> None:
        """Close the connection, which ends the agent."""
        self.agent_key = ""
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
        self.close()
        deadline = time.monotonic() + _LEAVE_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self._session, selectors.EVENT_READ)
            while key and selector.select(deadline - time.monotonic()):
                try:
                    if self._session.receive().get("exited") == key:
                        return
                except ForkServerDiedError:
                    return  # and the agent with it
