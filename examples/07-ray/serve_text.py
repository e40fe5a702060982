"""Deploy a language model with Ray Serve: the class and the HTTP side of `phalanx serve`, in replicas.

    phalanx train text --run-dir runs/text       # a run to serve; a Hugging Face folder does as well
    python serve_text.py runs/text               # asks once, stops
    python serve_text.py runs/text --keep        # serves until Ctrl-C; prints a curl line

Ray and the HTTP server listen on 127.0.0.1 only; see serve_checkpoint.py.
Needs: pip install 'phalanx[serve,ray-serve]'.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

from ray import serve
from serve_checkpoint import free_port

from phalanx.engines.ray.cluster import open_cluster


def deployment(run: str, replicas: int) -> Any:
    """Return the application: each replica has the model, its own batch, and OpenAI's endpoints."""

    def app() -> Any:
        from phalanx.tools.serve.app import make_app
        from phalanx.tools.serve.service import TextService

        return make_app(TextService.load(run))

    @serve.deployment(num_replicas=replicas, max_ongoing_requests=64)
    @serve.ingress(app)
    class Text:
        """One replica."""

    return Text.bind()


def ask(address: str, prompt: str) -> str:
    body = json.dumps({"prompt": prompt, "max_tokens": 32, "seed": 1}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: str = json.load(answer)["choices"][0]["text"]
    return found


def main() -> None:
    args = parse_args()
    run = str(args.run.absolute()) if args.run.exists() else str(args.run)
    with open_cluster(None, num_cpus=args.replicas + 1):
        serve.start(http_options={"host": "127.0.0.1", "port": args.port})
        serve.run(deployment(run, args.replicas), name="text", route_prefix="/")
        address = f"http://127.0.0.1:{args.port}"
        print(f"{args.prompt}{ask(address, args.prompt)}")
        if args.keep:
            print(f"curl {address}/v1/completions -d '{json.dumps({'prompt': args.prompt})}'", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
        serve.shutdown()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Deploy a language model with Ray Serve.")
    parser.add_argument("run", type=Path, help="the folder of a run, or of a Hugging Face model")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--port", type=int, default=free_port(), help="(default: one that is free)")
    parser.add_argument("--keep", action="store_true", help="go on serving until Ctrl-C")
    return parser.parse_args()


if __name__ == "__main__":
    main()
