"""Final project, the example: a small language model of Python's documentation.

``python project.py`` trains it with Phalanx on one and on two ranks, kills a rank, and writes measurements.json.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
LENGTH = 32
GLOBAL_BATCH = 32
SAMPLES = 2048
STEPS = 24


class Texts(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Pieces of Python's documentation as bytes; the target of each byte is the next one."""

    def __init__(self) -> None:
        content = "\n".join(topics[name] for name in sorted(topics)).encode()
        self.content = torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.content[index * 100 :][: LENGTH + 1].long()
        return piece[:-1], piece[1:]


class LanguageModel(nn.Module):
    """A transformer of two layers over bytes."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next byte at each place."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        inputs = self.bytes(tokens) + self.places(torch.arange(length))
        return self.head(self.layers(inputs, mask=mask, is_causal=True))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy per byte."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build() -> tuple[nn.Module, Tensor, Tensor, Any]:
    """Return the model as training begins, inputs and targets of some samples, and the loss function."""
    torch.manual_seed(0)
    samples = [Texts()[index] for index in range(GLOBAL_BATCH)]
    return LanguageModel(), torch.stack([one for one, _ in samples]), torch.stack([one for _, one in samples]), loss_of


def phalanx(verb: str, *words: str) -> dict[str, Any]:
    """Run a command of Phalanx on train.py, and return what it prints as JSON."""
    command = [sys.executable, "-m", "phalanx", verb, f"--script={HERE / 'train.py'}", "--device=cpu", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def losses(run: Path) -> list[float]:
    """Return the loss of each step of a run."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "step"]


def rate(run: Path) -> float:
    """Return the samples per second of a run, from the median step; the first ones are left out."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    seconds = [event["step_seconds"] for event in events if event["event"] == "step"]
    return GLOBAL_BATCH / statistics.median(seconds[4:])


def measure(folder: Path) -> dict[str, Any]:
    """Return all measurements; the runs are kept in a folder."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    common = (f"--max-steps={STEPS}", "--log-every-n-steps=1", "--strategy=ring", "--fixed-order")
    for repeat in range(3):
        for ranks in (1, 2):  # in turn: what else the machine does hits both
            run = folder / f"{ranks}-ranks-{repeat}"
            words = (f"--num-workers={ranks}", f"--run-dir={run}", *common[: 2 if ranks == 1 else 4])
            summary = phalanx("train", *words, "--", str(GLOBAL_BATCH // ranks))
            rates[ranks].append(rate(run))
    fault = "kill:rank=1,step=8"
    words = ("--num-workers=2", f"--fault={fault}", f"--out={folder / 'fault'}", common[0], *common[2:])
    verdict = phalanx("verify", *words, "--", str(GLOBAL_BATCH // 2))
    return {
        "machine": "2 cores (aarch64), CPU, other programs at the same time",
        "framework": "Phalanx, DDP over a ring of two CPU ranks",
        "ranks": 2,
        "parameters": sum(parameter.numel() for parameter in build()[0].parameters()),
        "equality": {"one": losses(folder / "1-ranks-0"), "many": losses(folder / "2-ranks-0")},
        "scaling": {"kind": "strong", "one": rates[1], "many": rates[2]},
        "recovery": {
            "fault": fault,
            "difference": verdict["difference"],
            "seconds": verdict["faults"][0]["recovered"],
            "steps_lost": verdict["faults"][0]["lost_steps"],
            "steps": STEPS,
        },
        "bytes": {"sent_per_rank": summary["sent_bytes"], "steps": STEPS, "bytes_per_value": 4},
    }


if __name__ == "__main__":
    found = measure(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))
    (HERE / "measurements.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote {HERE / 'measurements.json'}")
