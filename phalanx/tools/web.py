"""What web servers of tools share: a listener with clear errors, and how they run until they are interrupted."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import TYPE_CHECKING

import uvicorn

from phalanx.errors import UsageError

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens, or say what to write where it cannot."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port} is not between 0 and 65535")
    try:
        return _listener(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} of {host} is in use, perhaps by another one of these servers",
                hint=f"Write --port {_free_port(host)}, which is free, or --port 0 for any free one.",
            ) from None
        raise UsageError(f"cannot listen on {host} port {port}: {error}") from None


def _listener(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family)


def _free_port(host: str) -> int:
    with _listener(host, 0) as server:
        return int(server.getsockname()[1])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
"""Names under which a listener on this machine alone is asked."""


def address_of(listener: socket.socket, host: str) -> str:
    """Return the address to open; a listener on all addresses is reached by the machine's name."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}/"


def serve(app: ASGIApp, listener: socket.socket) -> None:
    """Serve until the process is interrupted."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])
