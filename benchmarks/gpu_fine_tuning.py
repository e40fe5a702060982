"""Speed and memory of fine-tuning a Llama on one GPU: all weights, adapters, a base of 4 bits, preferences, rewards.

    python benchmarks/gpu_fine_tuning.py --preset 1b

Tokens and weights are random: neither changes the speed. Tokens per second are those that the model learns from:
sequences of sft, both answers of dpo's pairs, and the answers that grpo has drawn.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from phalanx import PyTorchDDPTrainer
from phalanx.zoo.models import build
from phalanx.zoo.models.grpo import GRPO
from phalanx.zoo.models.preference import DPO

STEPS, SEQUENCE, COMPLETION, GENERATIONS = 30, 2048, 128, 8
ADAPTERS = {"lora_rank": 16}
IN_4_BITS = {**ADAPTERS, "lora_base": "nf4"}


@dataclass(frozen=True)
class Row:
    """A row of the table: what is trained, and with which settings."""

    kind: str
    batch: int
    settings: dict[str, Any]

    @property
    def tokens_per_sample(self) -> int:
        """How many tokens of a sample are learned from."""
        return {"sft": SEQUENCE, "dpo": SEQUENCE, "grpo": GENERATIONS * COMPLETION}[self.kind]


ROWS = {
    "sft, all weights": Row("sft", 8, {}),
    "sft, adapters": Row("sft", 8, ADAPTERS),
    "sft, adapters, nf4": Row("sft", 8, IN_4_BITS),
    "dpo, adapters": Row("dpo", 8, ADAPTERS),
    "dpo, adapters, nf4": Row("dpo", 8, IN_4_BITS),
    "grpo, adapters": Row("grpo", 8, ADAPTERS),
}


def words(completions: list[str]) -> list[float]:
    """Reward words: any function will do."""
    return [len(text.split()) / 20 for text in completions]


class Named(Dataset[dict[str, Tensor]]):
    """Samples whose parts have the names of a model's arguments."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def task(kind: str, model: nn.Module, samples: int) -> tuple[nn.Module, Dataset[Any]]:
    """Return what is trained, and its data."""
    if kind == "sft":
        return model, TensorDataset(*tokens_and_targets((samples, SEQUENCE)))
    if kind == "dpo":
        tokens, answers = tokens_and_targets((samples, 2, SEQUENCE // 2))
        return DPO(model), Named(tokens=tokens, answers=answers)
    row = torch.tensor(list(json.dumps({"prompt": "a" * 60}).encode()), dtype=torch.uint8)
    prompts = torch.randint(97, 122, (samples, 60))
    policy = GRPO(model, words, GENERATIONS, COMPLETION, template="none")
    return policy, Named(prompts=prompts, rows=row.repeat(samples, 1))


def tokens_and_targets(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return random tokens, and the tokens after them."""
    drawn = torch.randint(256, (*shape[:-1], shape[-1] + 1))
    return drawn[..., :-1].contiguous(), drawn[..., 1:].contiguous()


def measure(row: Row, preset: str) -> tuple[float, float, float]:
    """Return tokens per second, seconds per step, and the most memory that was allocated."""
    torch.manual_seed(0)
    model, data = task(row.kind, build("llama", preset=preset, seq_len=SEQUENCE), row.batch * 4)
    with tempfile.TemporaryDirectory() as folder:
        trainer = PyTorchDDPTrainer(
            model,
            num_workers=1,
            batch_size=row.batch,
            max_steps=STEPS,
            learning_rate=1e-5,
            gradient_clipping=1.0,
            log_every_n_steps=5,
            progress=False,
            run_dir=f"{folder}/run",
            **({"mixed_precision": "bf16", "compile": True} if torch.cuda.is_available() else {}),
            **row.settings,
        )
        history = trainer.fit(data)
    steps = history.steps[2:]  # the first ones compile
    seconds = sorted(step["step_seconds"] for step in steps)[len(steps) // 2]
    memory = max(step["memory_bytes"] for step in history.steps)
    return row.batch * row.tokens_per_sample / seconds, seconds, memory / 2**30


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="1b")
    parser.add_argument("--only", nargs="*", choices=list(ROWS), default=list(ROWS), help="these rows alone")
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}, torch {torch.__version__}, preset {arguments.preset}", flush=True)
    print(f"{'':20} {'tokens/s':>10} {'s/step':>8} {'GiB':>7}", flush=True)
    # Each in a separate process: compiled code and the peak of the memory are those of a process.
    processes = multiprocessing.get_context("spawn")
    for name in arguments.only:
        with concurrent.futures.ProcessPoolExecutor(1, processes) as pool:
            tokens, seconds, memory = pool.submit(measure, ROWS[name], arguments.preset).result()
        print(f"{name:20} {tokens:>10,.0f} {seconds:>8.3f} {memory:>7.1f}", flush=True)


if __name__ == "__main__":
    main()
