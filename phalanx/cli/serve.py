"""`phalanx serve`: a language model over an OpenAI-compatible HTTP API."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from phalanx.cli.flags import FlagParser
from phalanx.errors import UsageError

_HELP = """Serve a trained language model (gpt, llama, moe) over an OpenAI-compatible HTTP API.

  GET /v1/models, POST /v1/completions, POST /v1/chat/completions (also as streams), GET /health

Concurrent requests are computed in one batch. The server listens on this machine only; with another --host,
requests need the key that it prints: Authorization: Bearer KEY."""
_PORT = 8000


def parser() -> FlagParser:
    """Return the parser of the verb."""
    usage = "phalanx serve RUN|CHECKPOINT|FOLDER [options]"
    parser = FlagParser(prog="phalanx serve", usage=usage, description=_HELP)
    add = parser.add_argument
    add("run", metavar="RUN", help="a run (name, beginning of one, tag, folder, last), a checkpoint or a HF folder")
    add("--checkpoint", default="best", metavar="WHICH", help="best, last, a step or a path [best]")
    add("--host", default="127.0.0.1", metavar="HOST", help="the name or address to listen on [127.0.0.1]")
    add("--port", type=int, default=_PORT, metavar="N", help=f"the port to listen on; 0: any free one [{_PORT}]")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where the model runs [auto]")
    add("--max-batch", type=int, default=16, metavar="N", help="answers computed at once; others wait [16]")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = parser().parse_all(arguments)
    try:
        from phalanx.tools.serve.app import make_app
        from phalanx.tools.web import LOOPBACK_NAMES, address_of, is_loopback, listen, serve
    except ImportError as error:
        package = str(error.name).partition(".")[0]
        raise UsageError(
            f"serve needs {package}, which is not installed", hint="Run: pip install 'phalanx[serve]'"
        ) from None
    from phalanx.tools.serve.service import TextService

    with listen(namespace.host, namespace.port) as listener:
        service = TextService.load(
            namespace.run,
            checkpoint=namespace.checkpoint,
            device=namespace.device,
            max_batch=namespace.max_batch,
        )
        local = is_loopback(namespace.host)
        key = "" if local else secrets.token_urlsafe(24)
        print(f"{service.text.name}: {address_of(listener, namespace.host)}v1")
        print(f"key: {key}\nCtrl-C ends it." if key else "Ctrl-C ends it.", flush=True)
        try:
            hosts = (*LOOPBACK_NAMES, namespace.host) if local else ("*",)
            serve(make_app(service, key=key, hosts=hosts), listener)
        except KeyboardInterrupt:
            print()
        finally:
            service.close()
    return 0
