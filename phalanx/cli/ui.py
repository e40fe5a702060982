"""`phalanx ui`: a web page of all runs of a folder, while they run and afterwards."""

from __future__ import annotations

import html
import os
import secrets
import socket
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from phalanx.cli.flags import FlagParser
from phalanx.cli.json_output import add_output_flag
from phalanx.errors import UsageError
from phalanx.host.files import replace_file, scratch_folder
from phalanx.run.stored import RUNS, find_run

_HELP = """Show all runs of a folder as a web page: a table, each run with its logs, runs compared, and searches.

The page follows runs in progress. The server listens on this machine only; with another --host it needs a token,
which is part of the printed address. To reach it from elsewhere without opening a port:
ssh -L 7007:localhost:7007 HOST"""
_PORT = 7007


def parser() -> FlagParser:
    """Return the parser of the verb."""
    usage = "phalanx ui [--runs-dir DIR] [options] | RUN ... --save FILE"
    parser = FlagParser(prog="phalanx ui", usage=usage, description=_HELP)
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="*", help="--save: a name, the beginning of one, a tag, a folder, or last")
    add_output_flag(
        parser, "--save", endings=(".html",), help="write the page of these runs as one file, and start no server"
    )
    add("--runs-dir", default=str(RUNS), metavar="DIR", help="the folder that holds the runs [runs]")
    add(
        "--host", default="127.0.0.1", metavar="HOST", help="the name or address to listen on; 0.0.0.0: all [127.0.0.1]"
    )
    add("--port", type=int, default=_PORT, metavar="N", help=f"the port to listen on; 0: any free one [{_PORT}]")
    add("--token", action="store_true", help="require a token on this machine too, if others have accounts on it")
    add("--no-browser", action="store_true", help="print the address, and open no browser")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = parser().parse_all(arguments)
    folder = Path(namespace.runs_dir)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--runs-dir {folder} is a file, not a folder")
    if folder != RUNS and not folder.exists():
        raise UsageError(f"--runs-dir {folder}: there is no such folder")
    if folder.exists() and not os.access(folder, os.R_OK | os.X_OK):
        raise UsageError(f"--runs-dir {folder} cannot be read: permission denied")
    if namespace.save is not None or namespace.runs:
        return _save(namespace.runs, folder, namespace.save)
    try:
        from phalanx.tools.ui.server import make_app
        from phalanx.tools.web import LOOPBACK_NAMES, address_of, is_loopback, listen, serve
    except ImportError as error:
        package = str(error.name).partition(".")[0]
        raise UsageError(
            f"the dashboard needs {package}, which is not installed", hint="Run: pip install 'phalanx[monitor]'"
        ) from None
    from phalanx.tools.ui.catalog import Catalog

    listener = listen(namespace.host, namespace.port)
    port = int(listener.getsockname()[1])
    local = is_loopback(namespace.host)
    token = secrets.token_urlsafe(24) if namespace.token or not local else ""
    names = {*LOOPBACK_NAMES} | (set() if local else {socket.gethostname().lower(), socket.getfqdn().lower()})
    app = make_app(Catalog(folder), token=token, port=port, names=names | {namespace.host.lower()})
    address = address_of(listener, namespace.host) + (f"?token={token}" if token else "")
    print(f"runs of {folder.resolve()}: {address}\nCtrl-C ends it.", flush=True)
    has_screen = bool(os.environ.get("DISPLAY")) or sys.platform == "darwin"
    opens = not namespace.no_browser and sys.stdout.isatty() and has_screen
    with _opening(address) if opens and token else nullcontext(address) as opened:
        if opens:
            webbrowser.open(opened)
        try:
            serve(app, listener)
        except KeyboardInterrupt:
            print()
    return 0


@contextmanager
def _opening(address: str) -> Iterator[str]:
    """Yield what a browser opens to be led to an address: all users can read its command line, and not this file."""
    with scratch_folder("ui") as folder:  # open to this user alone
        page = folder / "open.html"
        page.write_text(f'<meta http-equiv="refresh" content="0; url={html.escape(address)}">\n', encoding="utf-8")
        yield page.as_uri()


def _save(names: Sequence[str], folder: Path, output: str | None) -> int:
    from phalanx.tools.ui.page import page_of

    if output is None or not names:
        raise UsageError("--save FILE and the runs go together", hint="Write: phalanx ui last --save report.html")
    path = Path(output)
    runs = {run.path: run for run in (find_run(name, folder) for name in names)}
    replace_file(path, page_of(list(runs.values())))
    print(path)
    return 0
