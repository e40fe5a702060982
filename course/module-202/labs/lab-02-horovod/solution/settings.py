"""Lab 02, task 3: choose Horovod's communication settings, and see in a timeline what they do.

horovodrun with --timeline-filename writes a timeline, `python settings.py wire.json` counts its all-reduces.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """What the settings depend on."""

    gradients: Sequence[int]
    """Bytes of each gradient, in the order in which backward computes them."""
    backward_ms: float
    """From the first gradient to the last."""
    messages: int
    """About this many all-reduces per step: few enough to pay little latency, enough to overlap with backward."""
    memory: int
    """Bytes that the fusion buffer may take."""
    hosts: int = 1
    ranks_per_host: int = 2
    nccl: bool = False
    """Whether the gradients are on GPUs and NCCL moves them; else gloo does."""


def settings(job: Job) -> dict[str, str]:
    """Return Horovod's variables for a job, as text, the way an environment has them.

    HOROVOD_CYCLE_TIME: milliseconds between two looks of the background thread. HOROVOD_FUSION_THRESHOLD: bytes of the
    fusion buffer. HOROVOD_CACHE_CAPACITY: of the response cache, never below its default of 1024.
    HOROVOD_HIERARCHICAL_ALLREDUCE: "1" where NCCL runs on several hosts with several ranks each; else it is left out.
    """
    chosen = {
        "HOROVOD_CYCLE_TIME": f"{job.backward_ms / job.messages:g}",
        "HOROVOD_FUSION_THRESHOLD": str(min(job.memory, sum(job.gradients))),
        "HOROVOD_CACHE_CAPACITY": str(max(1024, len(job.gradients))),
    }
    if job.nccl and job.hosts > 1 and job.ranks_per_host > 1:
        chosen["HOROVOD_HIERARCHICAL_ALLREDUCE"] = "1"
    return chosen


def operations(timeline: Path) -> list[list[str]]:
    """Return the all-reduces of a timeline in their order, each as the names of the tensors that travelled together.

    The file is a list of events for chrome://tracing; a run that was killed leaves it without its last bracket. Each
    tensor has a number, pid; the event process_name gives its name, in args (that of pid 0 has the time of the start
    instead). GLOO_ALLREDUCE begins (ph "B") for all tensors of an operation before it ends (ph "E",
    without a name: it ends what began last for that pid) for the first of them. A barrier ends once more than it
    begins, and the last ends of a run may be missing.
    """
    text = timeline.read_text().rstrip().rstrip(",")
    events = json.loads(text if text.endswith("]") else text + "]")
    names: dict[int, str] = {}
    begun: dict[int, list[str]] = defaultdict(list)
    found: list[list[str]] = []
    moving = 0
    for event in events:
        pid = event.get("pid")
        if event["ph"] == "M" and "name" in event.get("args", {}):
            names[pid] = event["args"]["name"]
        elif event["ph"] == "B":
            begun[pid].append(event["name"])
            if event["name"] == "GLOO_ALLREDUCE":
                if not moving:
                    found.append([])
                found[-1].append(names[pid])
                moving += 1
        elif event["ph"] == "E" and begun[pid] and begun[pid].pop() == "GLOO_ALLREDUCE":
            moving -= 1
    return found


def main() -> None:
    """Print what a timeline holds."""
    found = operations(Path(sys.argv[1]))
    tensors = sum(len(names) for names in found)
    print(f"{tensors} tensors in {len(found)} all-reduces; the largest carried {max(len(names) for names in found)}")


if __name__ == "__main__":
    main()
