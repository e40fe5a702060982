"""Check within seconds that an address leads to a Ray: Ray itself would retry for minutes."""

from __future__ import annotations

import os
import socket
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError

_SCHEME = "ray://"
PROBE_SECONDS = 5.0
"""How long an address may take to answer at all."""
_CLIENT_PORT = 10001
_SETTINGS_FRAME = b"\x04"
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS_FRAME + b"\0" + b"\0\0\0\0"
_CLIENT = ("Ray's client server", "/ray.rpc.RayletDriver/ClusterInfo")
_HEAD = ("the head of a Ray cluster", "/ray.rpc.NodeInfoGcsService/GetClusterId")
"""What listens at each kind of address, and a method that it has."""


def check_address(address: str) -> None:
    """Refuse an address that is malformed or where no Ray listens."""
    if address in ("auto", "local"):
        return
    rest = address.removeprefix(_SCHEME)
    if "://" in rest:
        scheme = rest.split("://")[0]
        raise UsageError(
            f"address '{address}' begins with '{scheme}://', which Ray does not support.",
            hint="Write ray://head:10001 (Ray's client), head:6379 (from a machine of the cluster) or auto.",
        )
    host, separator, port = rest.rpartition(":")
    if not separator and address.startswith(_SCHEME):
        host, port = rest, str(_CLIENT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError(f"address '{address}' is not host:port.", hint="Write it like ray://head:10001 or head:6379.")
    _probe(address, host.strip("[]"), int(port))


def started_on_this_machine() -> str:
    """Return the address of the Ray that `ray start` started here last, not that of a Ray for a single run."""
    temp = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    file = Path(temp, "ray/ray_current_cluster")
    if not file.exists():
        raise UsageError(
            "address 'auto': `ray start` has started no Ray on this machine, or `ray stop` ended it",
            hint="Start one with `ray start --head`, or leave address out for a local Ray.",
        )
    return file.read_text().strip()


def _probe(address: str, host: str, port: int) -> None:
    """Check that a server listens, answers as gRPC does, and has a method of Ray."""
    encrypted = os.environ.get("RAY_USE_TLS") == "1"  # then Ray alone has the certificates to ask with
    try:
        with socket.create_connection((host, port), timeout=PROBE_SECONDS) as connection:
            speaks = encrypted or _speaks_grpc(connection)
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
        raise _no_ray(
            address, f"a connection to {host} port {port} was tried for up to {PROBE_SECONDS:g} s: {why}"
        ) from error
    if not speaks:
        raise _no_ray(address, f"what listens at {host} port {port} did not answer as Ray does in {PROBE_SECONDS:g} s")
    if not encrypted and find_spec("grpc") is not None:
        _ask(address, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def _ask(address: str, target: str) -> None:
    """Call a method that only Ray has; any answer but "no such method" comes from Ray."""
    grpc: Any = import_module("grpc")  # carries no types
    what, method = _CLIENT if address.startswith(_SCHEME) else _HEAD
    directly = [("grpc.enable_http_proxy", 0)]  # as Ray itself connects
    with grpc.insecure_channel(target, options=directly) as channel:
        try:
            channel.unary_unary(method)(b"", timeout=PROBE_SECONDS)
        except grpc.RpcError as error:
            but = {
                grpc.StatusCode.UNIMPLEMENTED: f"is not {what}",
                grpc.StatusCode.DEADLINE_EXCEEDED: f"did not give {what}'s answer within {PROBE_SECONDS:g} s",
                grpc.StatusCode.UNAVAILABLE: f"closed the connection when it was asked for {what}'s answer",
            }
            if error.code() in but:
                raise _no_ray(address, f"what listens there speaks gRPC, but {but[error.code()]}") from error


def _speaks_grpc(connection: socket.socket) -> bool:
    """Send the HTTP/2 preface; whether a settings frame comes back, as from any gRPC server."""
    connection.sendall(_HTTP2_GREETING)
    answer = b""
    try:
        while len(answer) < 4 and (more := connection.recv(9)):
            answer += more
    except TimeoutError:
        return False
    return answer[3:4] == _SETTINGS_FRAME


def _no_ray(address: str, tried: str) -> UsageError:
    return UsageError(
        f"no Ray answers at {address} ({tried}).",
        hint="On the head node, `ray status` says whether Ray runs; ray:// is port 10001 of the head, host:port is "
        "6379 unless `ray start --port` said otherwise. Leave address out for a local Ray.",
    )
