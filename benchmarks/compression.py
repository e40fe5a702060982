"""Top-k with error feedback against no compression on the text recipe: losses, and bytes sent.

    python benchmarks/compression.py [--steps 1800] [--compressor topk] [--json out.json]

Both runs are the recipe as it is, on two ranks, but for one setting: error feedback already adds up old gradients, so
the compressed run takes half the optimizer's momentum. Losses are those on the validation data after the last step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import table

WARMUP_SHARE = 0.025
"""Of the steps at the start that are sent as they are: with 2% for the rest, less than 5% of the bytes in all."""
MOMENTUM = 0.5


def train(folder: Path, *flags: object) -> dict[str, Any]:
    """Run the recipe with the flags; return the last validation loss and the bytes that rank 0 sent."""
    fixed = ["--device", "cpu", "--no-progress", "--no-tensorboard", "--checkpoint-frequency", "none"]
    command = [sys.executable, "-m", "phalanx.cli", "train", "text", *fixed, "--run-dir", folder, *flags]
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    epoch = [event for event in events if event["event"] == "epoch"][-1]
    end = events[-1]
    return {
        "loss": epoch["val"]["loss"],
        "sent": end["sent_bytes"],
        "plain": end["plain_bytes"],
        "s": end["total_time"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--compressor", default="topk")
    parser.add_argument("--momentum", type=float, default=MOMENTUM)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    length = ["--max-steps", options.steps, "--eval-every", 0]
    compressed = ["--compression", options.compressor, "--momentum", options.momentum]
    warmup = ["--compression-warmup", int(WARMUP_SHARE * options.steps)]
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        plain = train(Path(directory) / "plain", *length)
        ours = train(Path(directory) / "ours", *length, *compressed, *warmup)
    further, share = ours["loss"] / plain["loss"] - 1, ours["sent"] / ours["plain"]
    rows = [
        ["none", f"{plain['loss']:.4f}", "", "100%"],
        [options.compressor, f"{ours['loss']:.4f}", f"{further:+.1%}", f"{share:.1%}"],
    ]
    print(
        table(
            f"text recipe, {options.steps} steps, 2 ranks", ["compression", "val loss", "against none", "bytes"], rows
        )
    )
    if options.json is not None:
        record = {"steps": options.steps, "none": plain, options.compressor: ours, "further": further, "share": share}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
