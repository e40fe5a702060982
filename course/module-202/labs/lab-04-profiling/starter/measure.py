"""Lab 04: run the slow trainer and yours under the same conditions, and write runs.json, which the report quotes.

``torchrun --nproc-per-node 2 measure.py`` needs trainer.py beside it.
"""

from __future__ import annotations

import json
import statistics
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from slow_trainer import Pictures, SlowTrainer
from trainer import FastTrainer

STEPS = 40


def measure(kind: type[SlowTrainer]) -> dict[str, float]:
    """Return counts per step and the time of a step of one trainer."""
    counts = {"decodes": 0, "collectives": 0, "validations": 0}
    data = Pictures()
    real_decode, real_reduce = data.decode, dist.ProcessGroup.allreduce

    def decode(index: int) -> torch.Tensor:
        counts["decodes"] += threading.current_thread() is threading.main_thread()  # a step waits for those only
        return real_decode(index)

    def allreduce(*args: object, **kwargs: object) -> object:
        counts["collectives"] += 1
        return real_reduce(*args, **kwargs)

    data.decode = decode  # type: ignore[method-assign]
    dist.ProcessGroup.allreduce = allreduce  # type: ignore[assignment, method-assign]
    trainer = kind(data)
    real_validate = trainer.validate

    def validate() -> float:
        counts["validations"] += 1
        return real_validate()

    trainer.validate = validate  # type: ignore[method-assign]
    history = trainer.fit(STEPS)
    dist.ProcessGroup.allreduce = real_reduce  # type: ignore[method-assign]
    per_step = {name: count / STEPS for name, count in counts.items()}
    return {**per_step, "ms": 1000 * statistics.median(history.seconds), "loss": history.losses[-1]}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    runs = {"before": measure(SlowTrainer), "after": measure(FastTrainer)}
    if dist.get_rank() == 0:
        Path(__file__).with_name("runs.json").write_text(json.dumps(runs, indent=1) + "\n")
        for name in runs["before"]:
            print(f"{name:<12} before {runs['before'][name]:10.4f}   after {runs['after'][name]:10.4f}")
    dist.destroy_process_group()
