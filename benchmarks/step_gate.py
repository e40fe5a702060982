"""What it costs that a step on a GPU waits for complete gradients: GPT-2 with and without the gate before each step.

    python benchmarks/step_gate.py [--batch 16] [--steps 20] [--rounds 6]

One process, bf16 by autocast, fused AdamW, not compiled. Blocks of steps with and without the gate alternate; the time
is from the first step of a block to the end of the GPU's work.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from report import environment, ratio

from phalanx.recovery.ranks.gate import StepGate
from phalanx.zoo.models.gpt import gpt


class Bench:
    """A model and its steps."""

    def __init__(self, batch: int) -> None:
        self.device = torch.device("cuda", 0)
        torch.manual_seed(0)
        self.model = gpt("gpt2").to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(50257, (batch, 1025), device=self.device)
        self.gate = StepGate(self.device)

    def seconds(self, steps: int, *, gated: bool) -> float:
        """Return the time of one step."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            with torch.autocast("cuda", torch.bfloat16):
                loss = self.model(self.tokens[:, :-1], self.tokens[:, 1:]).loss
            loss.backward()
            if gated:
                self.gate.take(self.optimizer.step, self.optimizer)
            else:
                self.optimizer.step()
            self.optimizer.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / steps


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=6)
    chosen = parser.parse_args()
    bench = Bench(chosen.batch)
    bench.seconds(5, gated=True)
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(chosen.rounds):
        for gated in (False, True) if number % 2 else (True, False):  # a GPU that gets warm is slower
            times[gated].append(bench.seconds(chosen.steps, gated=gated))
    free, gate = times[False], times[True]
    print(environment("cuda"))
    print(f"step without the gate {1e3 * median(free):.2f} ms, with it {1e3 * median(gate):.2f} ms")
    each = ", ".join(f"{one / other:.4f}" for one, other in zip(gate, free, strict=True))
    print(f"ratio {ratio(gate, free):.4f} (each round: {each})")


if __name__ == "__main__":
    main()
