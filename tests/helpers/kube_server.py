"""A stand-in for a Kubernetes API server: it validates what it receives, keeps it, and answers as the API does."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kube_schema import validate

_PATH = re.compile(
    r"^/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)/namespaces/(?P<namespace>[^/]+)/(?P<plural>[^/]+)"
    r"(?:/(?P<name>[^/]+))?(?P<log>/log)?$"
)
FORBIDDEN = "locked"
"""A namespace in which nothing is allowed."""


class KubeServer:
    """What the server holds, and what was asked of it."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.pods: list[dict[str, Any]] = []
        self.logs: dict[str, list[str]] = {}
        self.nodes: list[dict[str, Any]] = []
        self.asked: list[tuple[str, str]] = []
        self.refuse: set[str] = set()
        """Kinds whose creation is refused, as by an admission controller (not in a dry run)."""
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())

    def kinds(self) -> set[str]:
        return {thing["kind"] for thing in self.objects.values()}

    def add_pod(self, job: str, index: int, phase: str = "Running", **status: Any) -> str:
        labels = {"app.kubernetes.io/instance": job, "batch.kubernetes.io/job-completion-index": str(index)}
        name = f"{job}-{index}-{len(self.pods)}"
        about = {"name": name, "labels": labels, "creationTimestamp": f"2026-01-01T00:00:{len(self.pods):02}Z"}
        containers = [{"name": "train", "image": "x"}]
        self.pods.append(
            {
                "metadata": about,
                "spec": {"nodeName": f"n{index}", "containers": containers},
                "status": {"phase": phase, **status},
            }
        )
        return name

    def end(self, kind: str, condition: str, reason: str = "") -> None:
        """Set a condition, as the controller does when a job ends."""
        for thing in self.objects.values():
            if thing["kind"] == kind:
                thing["status"] = {"conditions": [{"type": condition, "status": "True", "reason": reason}]}

    def _handler(outer) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                where = self._where()
                if self.path.startswith("/api/v1/nodes"):
                    return self._answer(200, {"kind": "NodeList", "apiVersion": "v1", "items": outer.nodes})
                if where is None:
                    return None
                if where["plural"] == "pods":
                    return self._pods(where)
                thing = outer.objects.get((where["namespace"], where["plural"], where["name"]))
                return self._answer(200, thing) if thing else self._missing(where)

            def do_POST(self) -> None:
                where = self._where()
                if where is None:
                    return None
                thing = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                query = parse_qs(urlsplit(self.path).query)
                try:
                    validate(thing)
                except Exception as error:  # noqa: BLE001 - the schema's own answer
                    return self._status(422, "Invalid", str(error).splitlines()[0])
                name = thing["metadata"]["name"]
                key = (where["namespace"], where["plural"], name)
                if key in outer.objects:
                    return self._status(409, "AlreadyExists", f'{where["plural"]} "{name}" already exists')
                if "dryRun" not in query:
                    if thing["kind"] in outer.refuse:
                        return self._status(
                            403, "Forbidden", f'{where["plural"]} "{name}" is forbidden: exceeded quota'
                        )
                    thing["metadata"]["uid"] = f"uid-{len(outer.asked)}"
                    outer.objects[key] = thing
                return self._answer(201, thing)

            def do_PATCH(self) -> None:
                where = self._where()
                if where is None:
                    return None
                change = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                thing = outer.objects.get((where["namespace"], where["plural"], where["name"]))
                if thing is None:
                    return self._missing(where)
                thing["metadata"].update(change["metadata"])
                return self._answer(200, thing)

            def do_DELETE(self) -> None:
                where = self._where()
                if where is None:
                    return None
                thing = outer.objects.pop((where["namespace"], where["plural"], where["name"]), None)
                if thing and where["plural"] == "services":  # the API answers with the service itself
                    return self._answer(200, thing)
                return self._status(200, "", "", "Success") if thing else self._missing(where)

            def _where(self) -> dict[str, Any] | None:
                path = urlsplit(self.path).path
                outer.asked.append((self.command, path))
                found = _PATH.match(path)
                if found is None:
                    if not path.startswith("/api/v1/nodes"):
                        self._status(404, "NotFound", "the server could not find the requested resource")
                    return None
                if found["namespace"] == FORBIDDEN:
                    kind = f"{found['plural']}.{found['group']}" if found["group"] else found["plural"]
                    said = (
                        f'{kind} is forbidden: User "ann" cannot {self.command.lower()} in the namespace "{FORBIDDEN}"'
                    )
                    self._status(403, "Forbidden", said)
                    return None
                return found.groupdict()

            def _pods(self, where: dict[str, Any]) -> None:
                if where["log"]:
                    return self._log(where["name"], "follow=True" in self.path or "follow=true" in self.path)
                query = parse_qs(urlsplit(self.path).query)
                key, _, value = query["labelSelector"][0].partition("=")
                found = [pod for pod in outer.pods if pod["metadata"]["labels"].get(key) == value]
                return self._answer(200, {"kind": "PodList", "apiVersion": "v1", "items": found})

            def _log(self, name: str, follow: bool) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/plain")
                self.end_headers()
                for line in outer.logs.get(name, []):
                    self.wfile.write(f"{line}\n".encode())
                    self.wfile.flush()
                    time.sleep(0.05 if follow else 0)

            def _missing(self, where: dict[str, Any]) -> None:
                self._status(404, "NotFound", f'{where["plural"]} "{where["name"]}" not found')

            def _status(self, code: int, reason: str, message: str, status: str = "Failure") -> None:
                said = {"kind": "Status", "apiVersion": "v1", "status": status, "reason": reason, "message": message}
                self._answer(code, {**said, "code": code})

            def _answer(self, code: int, document: Any) -> None:
                content = json.dumps(document).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        return Handler


@contextmanager
def kube_server(folder: Path) -> Iterator[tuple[KubeServer, Path]]:
    """Start a server, and write a kubeconfig that names it."""
    found = KubeServer()
    threading.Thread(target=found.server.serve_forever, daemon=True).start()
    config = folder / "kubeconfig"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{found.server.server_port}"}}],
        "users": [{"name": "ann", "user": {"token": "t"}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "ann", "namespace": "ml"}}],
        "current-context": "here",
    }
    config.write_text(json.dumps(document))
    try:
        yield found, config
    finally:
        found.server.shutdown()
        found.server.server_close()
