"""What `phalanx submit ssh` runs on each host: it says what is installed, or runs a script while the connection lives.

    python -P -m phalanx.tools.submit.node facts FOLDER     one line of JSON: versions, address, a free port
    python -P -m phalanx.tools.submit.node run              the script comes as a line of JSON on standard input

After that line, standard input is the connection: at its end, or after a long silence, the script's processes end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import phalanx
from phalanx.host.addresses import ssh_address

_READ_SCRIPT = 'IFS= read -rd "" script; exec </dev/null; eval "$script"'
"""The script exports variables that may be secrets: all users of a host can read the command lines there."""
SILENCE_SECONDS = 300.0
"""The submitting machine writes every few seconds; after this silence it is lost."""


def facts(folder: str) -> dict[str, Any]:
    """Return what has to be equal on all hosts, and where others reach this one."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "missing"
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
    has_folder = os.path.isdir(os.path.expanduser(folder))
    return {
        "phalanx": phalanx.__version__,
        "torch": torch,
        "address": ssh_address(),
        "port": port,
        "has_folder": has_folder,
    }


def run_script() -> int:
    """Run the script of the first line of standard input; return its exit code."""
    plan = json.loads(os.fdopen(os.dup(0), "rb", buffering=0).readline())
    words = ["bash", "-c", _READ_SCRIPT, "node.sh", *plan["arguments"]]
    process = subprocess.Popen(
        words, env={**os.environ, **plan["environment"]}, stdin=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None, "a pipe was asked for"
    with suppress(BrokenPipeError):  # a bash that was killed reads nothing
        process.stdin.write(plan["script"].encode())
        process.stdin.close()
    threading.Thread(target=_end_with_connection, args=(process, plan["grace"]), daemon=True).start()
    code = process.wait()
    _signal(process, signal.SIGKILL)  # what the launcher left in its group
    return code if code >= 0 else 128 - code


def _end_with_connection(process: subprocess.Popen[bytes], grace: float) -> None:
    """Wait for an order to stop, the end of the connection or a long silence; then end the processes."""
    order = b"\n"  # a sign of life
    while order == b"\n":
        order = os.read(0, 1) if select.select([0], [], [], SILENCE_SECONDS)[0] else b""
    _signal(process, signal.SIGINT if order == b"I" else signal.SIGTERM)
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


if __name__ == "__main__":
    if sys.argv[1] == "facts":
        print(json.dumps(facts(sys.argv[2])))
    else:
        sys.exit(run_script())
