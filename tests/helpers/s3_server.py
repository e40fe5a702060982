"""A real S3 server (moto) as a program of its own, and a proxy in front of it that can fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SERVER = """
import logging, os, sys
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

app = DomainDispatcherApplication(create_backend_app)
broken = {"left": 0}

def failing(environ, start_response):
    # PUT /-/fail/3 lets the next three uploads fail as a busy store does.
    path = environ["PATH_INFO"]
    if path.startswith("/-/fail/"):
        broken["left"] = int(path.rsplit("/", 1)[1])
        start_response("200 OK", [])
        return [b""]
    if broken["left"] and environ["REQUEST_METHOD"] == "PUT":
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        broken["left"] -= 1
        start_response("503 Slow Down", [("Content-Type", "application/xml")])
        return [b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"]
    return app(environ, start_response)

server = make_server("127.0.0.1", 0, failing, threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def serve_s3() -> Iterator[str]:
    """Start the server; yield its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()
        assert port, "moto's server did not start"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
