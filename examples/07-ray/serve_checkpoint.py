"""Deploy a trained checkpoint with Ray Serve: train on digits, serve the weights over HTTP, ask for one image.

    python serve_checkpoint.py                                   # trains first, asks once, stops
    python serve_checkpoint.py --checkpoint kept --replicas 2    # serves what an earlier run left there
    python serve_checkpoint.py --keep                            # serves until Ctrl-C; prints a curl line

Ray and the HTTP server listen on 127.0.0.1 only. Serve's replicas also open a gRPC port for each other on all
interfaces, for which Ray 2.60 has no setting: keep it behind a firewall. In a cluster, leave `open_cluster` out and
give serve.start the host that others may reach. Needs: pip install 'phalanx[ray-serve]'.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import socket
import urllib.request
from pathlib import Path
from typing import Any

import torch
from ray import serve
from torch import nn
from torch.utils.data import DataLoader

from phalanx import Trainer
from phalanx.engines.ray.cluster import open_cluster
from phalanx.zoo.data import load


def build_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(folder: Path) -> None:
    trainer = Trainer(
        build_model(), num_workers=2, device="cpu", epochs=3, batch_size=32, learning_rate=5e-3, checkpoint_dir=folder
    )
    history = trainer.fit(DataLoader(load("digits"), shuffle=True), load("digits", split="val"))
    print(f"trained: accuracy {history.best_accuracy:.3f}")


@serve.deployment
class Digits:
    """One replica: the model with the weights of the newest checkpoint, whatever layout wrote it."""

    def __init__(self, checkpoint: str) -> None:
        self.model = build_model().eval()
        Trainer(self.model).load(checkpoint)

    async def __call__(self, request: Any) -> dict[str, float]:
        """Answer {"image": 8 rows of 8 numbers} with the digit and how sure the model is of it."""
        image = torch.tensor((await request.json())["image"]).reshape(1, 1, 8, 8)
        with torch.no_grad():
            chances = self.model(image).softmax(1)[0]
        return {"digit": int(chances.argmax()), "probability": float(chances.max())}


def ask(address: str, image: torch.Tensor) -> dict[str, float]:
    body = json.dumps({"image": image.reshape(8, 8).tolist()}).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, float] = json.load(answer)
    return found


def main() -> None:
    args = parse_args()
    if args.checkpoint is None:
        args.checkpoint = Path("kept")
        train(args.checkpoint)
    with open_cluster(None, num_cpus=args.replicas + 1):
        serve.start(http_options={"host": "127.0.0.1", "port": args.port})
        application = Digits.options(num_replicas=args.replicas).bind(str(args.checkpoint.absolute()))
        serve.run(application, name="digits", route_prefix="/digits")
        address = f"http://127.0.0.1:{args.port}/digits"
        images = load("digits", split="val")
        for number in range(args.requests):
            image, label = images[number]
            print(f"{address}: {ask(address, image)}, label {int(label)}")
        if args.keep:
            print(f"curl {address} -d '{json.dumps({'image': [[0.0] * 8] * 8})}'", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
        serve.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Deploy a trained checkpoint with Ray Serve.")
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint, or a folder of them (default: train one)")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--port", type=int, default=free_port(), help="(default: one that is free)")
    parser.add_argument("--requests", type=int, default=3, help="images to ask for")
    parser.add_argument("--keep", action="store_true", help="go on serving until Ctrl-C")
    return parser.parse_args()


if __name__ == "__main__":
    main()
