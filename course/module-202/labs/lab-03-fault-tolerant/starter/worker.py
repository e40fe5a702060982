"""One rank of the training of lab 03. It is given: the supervisor starts it, and it uses Checkpoints from system.py.

The global batch is always cut into PARTS parts, and rank r of n computes the parts r, r + n, ... All ranks get the
gradients of all parts and add them in the order of the parts. So the weights have the same bits for any number of
ranks. Each part has its own noise on its inputs: the state of its generator belongs into the checkpoint.

``python worker.py FOLDER STEPS``, with RANK, WORLD_SIZE, GENERATION, MASTER_ADDR and MASTER_PORT in the environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from system import Checkpoints, disagreeing_ranks
from torch import Tensor, nn

PARTS = 4
BATCH = 32
SAVE_EVERY = 5
SAVED_AND_ENDED = 75
RANKS_DISAGREE = 3


class Training:
    """Model, momentum, data, and the generator of each part that this rank computes."""

    def __init__(self, rank: int, world: int) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        self.momentum = [torch.zeros_like(parameter) for parameter in self.model.parameters()]
        self.inputs = torch.randn(512, 16)
        self.labels = self.inputs[:, :4].argmax(1)
        self.parts = range(rank, PARTS, world)
        self.noise = {part: torch.Generator().manual_seed(100 + part) for part in self.parts}

    def gradients(self, step: int) -> Tensor:
        """Return one row per part: its gradients, its loss; rows of parts that other ranks compute are 0."""
        size = sum(parameter.numel() for parameter in self.model.parameters())
        rows = torch.zeros(PARTS, size + 1)
        order = torch.randperm(512, generator=torch.Generator().manual_seed(step // (512 // BATCH)))
        batch = order[step % (512 // BATCH) * BATCH :][:BATCH]
        for part in self.parts:
            chosen = batch[part::PARTS]
            noise = torch.randn(len(chosen), 16, generator=self.noise[part])
            logits = self.model(self.inputs[chosen] + 0.1 * noise)
            loss = nn.functional.cross_entropy(logits, self.labels[chosen], reduction="sum") / BATCH
            self.model.zero_grad()
            loss.backward()
            rows[part, :-1] = torch.cat([parameter.grad.reshape(-1) for parameter in self.model.parameters()])
            rows[part, -1] = loss.detach()
        return rows

    def update(self, rows: Tensor) -> float:
        """Make the step with the gradients of all parts, and return the loss of the global batch."""
        total = rows[0].clone()
        for part in range(1, PARTS):
            total += rows[part]  # always in this order: the bits do not depend on the number of ranks
        sizes = [parameter.numel() for parameter in self.model.parameters()]
        with torch.no_grad():
            parts = zip(self.model.parameters(), self.momentum, total[:-1].split(sizes), strict=True)
            for parameter, momentum, gradient in parts:
                momentum.mul_(0.9).add_(gradient.view_as(parameter))
                parameter.sub_(momentum, alpha=0.1)
        return float(total[-1])

    def tensors(self) -> dict[str, Tensor]:
        """Return what must be equal on all ranks."""
        return {**self.model.state_dict(), **{f"momentum.{number}": one for number, one in enumerate(self.momentum)}}

    def digest(self) -> str:
        """Return a digest of their bits."""
        content = b"".join(tensor.numpy().tobytes() for _, tensor in sorted(self.tensors().items()))
        return hashlib.sha256(content).hexdigest()[:16]

    def shared(self) -> dict[str, Any]:
        """Return the state that is equal on all ranks."""
        return {"model": self.model.state_dict(), "momentum": self.momentum}

    def own(self) -> dict[int, Tensor]:
        """Return the state of this rank's parts."""
        return {part: generator.get_state() for part, generator in self.noise.items()}

    def restore(self, shared: dict[str, Any], states: dict[int, Tensor]) -> None:
        """Continue from a checkpoint."""
        self.model.load_state_dict(shared["model"])
        self.momentum = shared["momentum"]
        for part, generator in self.noise.items():
            generator.set_state(states[part])


class Faults:
    """Faults for practice, from FOLDER/faults.json; each happens once.

    [{"kind": "kill", "rank": 1, "step": 7}, ...]; kinds: kill, stop (alive, but does nothing), kill-saving (in the
    first save after that step, when its file is opened), flip (one bit of a weight changes).
    """

    def __init__(self, folder: Path, rank: int, model: nn.Module) -> None:
        file = folder / "faults.json"
        self.folder, self.rank, self.model = folder, rank, model
        self.faults = json.loads(file.read_text()) if file.exists() else []
        self.saving = False
        sys.addaudithook(self._audit)

    def at(self, step: int) -> None:
        """Let happen what is ordered for this rank and step."""
        for number, fault in enumerate(self.faults):
            mark = self.folder / f"fault-{number}-happened"
            if fault["rank"] != self.rank or fault["step"] != step or mark.exists():
                continue
            mark.touch()
            if fault["kind"] == "flip":
                weight = next(self.model.parameters()).data.view(torch.int32)
                weight[0, 0] ^= 1 << 20  # a high bit: rounding could remove the change of a low one, not its effect
            elif fault["kind"] == "kill-saving":
                self.saving = True
            else:
                os.kill(os.getpid(), signal.SIGKILL if fault["kind"] == "kill" else signal.SIGSTOP)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.saving and event == "open" and "w" in str(arguments[1]) and "beats" not in str(arguments[0]):
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train; where a peer is lost, end with one line instead of a long trace."""
    try:
        train()
    except RuntimeError as error:
        if "peer" not in str(error):
            raise
        print(f"rank {os.environ['RANK']} has lost a peer", flush=True)
        time.sleep(0.5)  # the supervisor sees the end of that peer first
        os._exit(1)


def train() -> None:
    """Train, and write FOLDER/result.json at the end."""
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    rank, world, generation = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "GENERATION"))
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    training, checkpoints = Training(rank, world), Checkpoints(folder / "checkpoints")
    faults = Faults(folder, rank, training.model)
    found = checkpoints.load()
    first = 0 if found is None else found[0]
    if found is not None:
        training.restore(found[1], found[2])
    beats = folder / "beats" / f"{generation}-{rank}"

    def save(step: int) -> None:
        wrong = disagreeing_ranks(training.tensors())
        if rank in wrong:
            print(f"step {step}: the weights of ranks {wrong} are not those of most ranks: not saved", flush=True)
            os._exit(RANKS_DISAGREE)
        if wrong:
            dist.barrier()  # fails: those ranks end
        checkpoints.save(step, training.shared(), training.own())

    for step in range(first, steps):
        beats.write_text(f"{step} compute")
        faults.at(step)
        rows = training.gradients(step)
        stop = torch.tensor([float(bool(asked))])
        beats.write_text(f"{step} wait")
        dist.all_reduce(rows)  # each row is not 0 on one rank only, so the sum has no rounding
        dist.all_reduce(stop)
        loss = training.update(rows)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps or stop.item():
            beats.write_text(f"{step} compute")
            save(step + 1)
        if stop.item() and step + 1 < steps:
            os._exit(SAVED_AND_ENDED)
        time.sleep(0.01)
    if rank == 0:
        result = {"loss": loss, "digest": training.digest()}
        (folder / "result.json").write_text(json.dumps(result))
        print(f"step {steps}: loss {loss:.6f}, digest of the weights {result['digest']}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
