"""Speed and memory of fine-tuning on one GPU: all weights, adapters, a base of 4 bits, preferences, rewards.

    python benchmarks/gpu_fine_tuning.py --preset 1b

Each row is a `phalanx train` command on drawn texts of fixed length, from random weights: neither changes the speed.
Tokens are those that the model reads in training; under GRPO those that it has drawn and learned from.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

WORDS = ("a", "node", "of", "the", "group", "sends", "its", "gradient", "to", "two", "others", "and", "waits")
SEQUENCE, COMPLETION = 2048, 128
ANSWER_BYTES = {"sft": 1900, "dpo": 900}
LORA = ["--lora-rank", "16"]
ROWS: dict[str, tuple[str, list[str]]] = {
    "sft, all weights": ("sft", []),
    "sft, adapters": ("sft", LORA),
    "sft, adapters, nf4": ("sft", [*LORA, "--lora-base", "nf4"]),
    "dpo, adapters": ("dpo", LORA),
    "dpo, adapters, nf4": ("dpo", [*LORA, "--lora-base", "nf4"]),
    "grpo, adapters": ("grpo", LORA),
}
REWARD = "def length(completions):\n    return [len(text.split()) / 20 for text in completions]\n"


def text(draw: random.Random, size: int) -> str:
    """Return words of this many bytes."""
    words = " ".join(draw.choice(WORDS) for _ in range(size))
    return words[:size].strip().ljust(size, "e")


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    """Write rows of a data set, a few of them for evaluation."""
    (folder / name).mkdir()
    for split, part in (("train", rows), ("val", rows[:8])):
        (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def write_all(folder: Path, count: int) -> None:
    """Write conversations, preferences, prompts and a reward."""
    draw = random.Random(0)
    asked = [text(draw, 60) for _ in range(count)]
    chats = [[{"role": "user", "content": one}, {"role": "assistant", "content": text(draw, ANSWER_BYTES["sft"])}] for one in asked]
    write(folder, "sft", [{"messages": messages} for messages in chats])
    answers = ("chosen", "rejected")
    pairs = [{"prompt": one, **{name: text(draw, ANSWER_BYTES["dpo"]) for name in answers}} for one in asked]
    write(folder, "dpo", pairs)
    write(folder, "grpo", [{"prompt": one} for one in asked])
    (folder / "rewards.py").write_text(REWARD)


def train(folder: Path, name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Run a row; return its tokens per second, its seconds per step and its memory."""
    recipe, options = ROWS[name]
    batch = {"sft": arguments.batch, "dpo": arguments.batch // 2, "grpo": max(1, arguments.batch // 8)}[recipe]
    run = folder / name.replace(", ", "-").replace(" ", "-")
    words = [sys.executable, "-m", "phalanx", "train", recipe, "--data", str(folder / recipe), "--preset"]
    words += [arguments.preset, "--num-workers", "1", "--batch-size", str(batch), "--max-steps", str(arguments.steps)]
    words += ["--learning-rate", "1e-5", "--log-every-n-steps", "5", "--no-tensorboard", "--run-dir", str(run), *options]
    words += ["--set", "data.template=plain", "--set", f"model.seq_len={SEQUENCE}"]
    if recipe == "grpo":
        words += ["--set", "loss.reward=rewards:length", "--set", f"loss.max_completion_length={COMPLETION}"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    ended = events[-1]
    tokens = ended["tokens_per_second"]
    if recipe == "dpo":  # both answers with the prompt, and the turns' marks
        tokens = ended["throughput"] * 2 * (60 + ANSWER_BYTES["dpo"] + 20)
    elif recipe == "grpo":
        tokens = ended["throughput"] * 8 * COMPLETION
    last = steps[-1]
    return {"tokens": tokens, "step": last["step_seconds"], "memory": max(step["memory_bytes"] for step in steps)}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="1b")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 2,048 tokens per step of sft (8)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", nargs="*", choices=list(ROWS), help="these rows alone")
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}, torch {torch.__version__}, preset {arguments.preset}", flush=True)
    print(f"{'':22} {'tokens/s':>10} {'s/step':>8} {'GiB':>7}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_all(folder, 512)
        for row in arguments.only or ROWS:
            found = train(folder, row, arguments)
            memory = found["memory"] / 2**30
            print(f"{row:22} {found['tokens']:>10,.0f} {found['step']:>8.3f} {memory:>7.1f}", flush=True)


if __name__ == "__main__":
    main()
