"""The script that the raylet of a local Ray runs instead of a worker: request a fork from the fork server, then exit.

It imports almost nothing, and replaces two scripts of Ray (`setup_worker.py` before a worker with a runtime
environment, `default_worker.py` otherwise). Without a fork server it executes those.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys

SERVER = "PHALANX_RAY_FORK_SERVER"
"""The variable with the address of the fork server's socket."""
_FORKED = b"+"


def main() -> None:
    """Send arguments, environment, folder and the three standard streams to the fork server."""
    if not _is_forked(os.environ.get(SERVER, "")):
        execute_rays_script(sys.argv[1:])


def _is_forked(address: str) -> bool:
    request = {"arguments": sys.argv[1:], "env": dict(os.environ), "folder": os.getcwd()}
    body = os.memfd_create("worker", os.MFD_CLOEXEC)
    os.write(body, json.dumps(request).encode())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(address)
            # As host.processes.is_same_user: this script runs without the package.
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)  # process, user, group
            if struct.unpack("3i", peer)[1] != os.geteuid():
                return False
            socket.send_fds(connection, [_FORKED], [body, 0, 1, 2])
            return connection.recv(1) == _FORKED
        except OSError:
            return False


def execute_rays_script(arguments: list[str]) -> None:
    """Execute Ray's script for these arguments."""
    this, default = os.path.abspath(__file__), rays_script("default_worker.py")
    script = rays_script("setup_worker.py") if this in arguments else default
    os.environ.pop(SERVER, None)
    words = [default if word == this else word for word in arguments]
    os.execv(sys.executable, [sys.executable, script, *words])


def rays_script(name: str) -> str:
    """Return the path of a script with which Ray starts workers."""
    import ray._private.workers as workers

    return os.path.join(os.path.dirname(str(workers.__file__)), name)


if __name__ == "__main__":
    main()
