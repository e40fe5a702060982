"""A headless Chromium, driven over the DevTools protocol through two pipes: no port, and no further package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from waiting import LIMIT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
_PATIENCE = LIMIT_SECONDS


def chromium() -> str:
    """Return the path of the browser, or skip the test."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("Chromium is not installed: apt install chromium")
    return found


class Browser:
    """One page. `problems` collects exceptions, console errors and failed requests of it."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._unread, self._number = b"", 0
        self.problems: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = None
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        session = {"sessionId": self._session} if getattr(self, "_session", None) else {}
        request = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._requests, json.dumps(request).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message)

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + _PATIENCE
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            read = os.read(self._answers, 1 << 20) if ready else b""
            assert read, "the browser does not answer"
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\0")
        return json.loads(line)

    def _note(self, message: dict[str, Any]) -> None:
        kind, what = message.get("method"), message.get("params", {})
        if kind == "Runtime.exceptionThrown":
            details = what["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif kind == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(each.get("value")) for each in what["args"]))
        elif kind == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")

    def resize(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Give the page a size and a colour scheme."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        """Load a page."""
        self.leave()  # an address that differs in its hash alone would not load
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def leave(self) -> None:
        """Leave the page, before its server ends."""
        self.send("Page.navigate", url="about:blank")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = LIMIT_SECONDS) -> Any:
        """Wait until an expression is true and return it."""
        until = time.monotonic() + seconds
        while not (value := self.run(condition)):
            assert time.monotonic() < until, f"not true after {seconds} s: {condition}\n{self.problems}"
            time.sleep(0.05)
        return value

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write what the page shows as a PNG."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser with a profile of its own, and end it."""
    program = chromium()
    ends = [*os.pipe(), *os.pipe()]
    theirs_in, ours_out, ours_in, theirs_out = (fcntl.fcntl(end, fcntl.F_DUPFD, 50) for end in ends)
    for end in ends:
        os.close(end)
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:  # short: for a socket's path
        command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out} {theirs_in}<&- {theirs_out}>&-'
        process = subprocess.Popen(
            ["bash", "-c", command, program, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}"],
            env={**os.environ, "TMPDIR": folder},
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(ours_out, ours_in)
        finally:
            parts = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            try:
                process.wait(timeout=120)
                psutil.wait_procs(parts, timeout=120)  # they write into the folder until they end
            finally:
                os.close(ours_out)
                os.close(ours_in)
