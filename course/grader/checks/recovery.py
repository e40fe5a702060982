"""Grading of recovery, with simulated and with real processes, and of elastic training."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from grader.checks.saving import ask, reported
from grader.exercise import Attempt, Mistake


class Fake:
    """A process of the grader's simulation; without a failure it ends at `end`, and after one it waits for ever."""

    def __init__(self, life: Life, rank: int, end: float | None, code: int) -> None:
        self.life, self.rank, self.end, self.code = life, rank, end, code
        self.killed, self.joined = False, False

    @property
    def exitcode(self) -> int | None:
        """The code, or None while it runs; a killed process needs a moment to end."""
        self.life.polls += 1
        if self.life.polls > 300:
            raise Mistake(
                "supervise() asks for exit codes 300 times without sleep() between: that keeps a core busy. Use the "
                "sleep that was given"
            )
        if self.end is not None and self.life.time >= self.end:
            return self.code
        return -9 if self.joined else None

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self.exitcode is None

    def kill(self) -> None:
        """End it, a moment later."""
        self.killed = True

    terminate = kill

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        if self.killed:
            self.joined = True
        elif self.end is not None and timeout is None:
            self.life.time = max(self.life.time, self.end)
        elif timeout is None:
            raise Mistake(
                f"join() waits for rank {self.rank}, which waits in a collective for a rank that has failed: it never "
                "ends. Look at all ranks in turn, and kill the others when one has failed"
            )
        else:
            self.life.sleep(timeout)


class Life:
    """The generations of a run: what each reaches and how it ends."""

    def __init__(self, plan: list[tuple[int, int, int]], world: int) -> None:
        self.world = world
        self.plan, self.time, self.polls, self.step = plan, 0.0, 0, 0
        self.pauses: list[float] = []
        self.ranks: list[Fake] = []
        self.started = 0

    def sleep(self, seconds: float) -> None:
        """Let time pass; a pause between generations is noted."""
        between = all(fake.killed or fake.exitcode is not None for fake in self.ranks)
        self.time, self.polls = self.time + max(seconds, 0.001), 0
        if self.time > 10_000:
            raise Mistake(
                "supervise() waits for ever after a rank has failed: its survivors wait in a collective. Kill them"
            )
        if between:
            self.pauses.append(seconds)

    def start(self, generation: int) -> list[Fake]:
        """Begin a generation."""
        running = [fake.rank for fake in self.ranks if fake.exitcode is None]
        if running:
            killed = all(self.ranks[rank].killed for rank in running)
            how = "killed but not joined" if killed else "not killed"
            raise Mistake(
                f"generation {generation} starts while rank {running[0]} of the last one still runs ({how}): two "
                "generations would write the same checkpoint"
            )
        if generation != self.started:
            raise Mistake(
                f"start() got generation {generation}; it should be {self.started}, the number of restarts so far"
            )
        if self.started >= len(self.plan):
            raise Mistake(
                f"start() was called {self.started + 1} times; the run should have ended after {len(self.plan)}"
            )
        progress, guilty, code = self.plan[self.started]
        self.started += 1
        self.step += progress
        ends = [(None if code else self.time + 1.0 + rank, 0) for rank in range(self.world)]
        if code:
            ends[guilty] = (self.time + 1.0, code)
        self.ranks = [Fake(self, rank, end, result) for rank, (end, result) in enumerate(ends)]
        return self.ranks


def grade_recovery(attempt: Attempt) -> None:
    """Grade `automatic-recovery`."""
    see = "Start again, but not for ever"
    ask(attempt, recovery, 2.0 + attempt.seed() % 5, see=see)
    ask(attempt, real_recovery, attempt.folder, see=see)


def _supervised(
    module: ModuleType, plan: list[tuple[int, int, int]], restarts: int, backoff: float, world: int = 3
) -> tuple[Life, Any]:
    life = Life(plan, world)
    try:
        with patch("time.sleep", _refuse_sleep):
            found = module.supervise(life.start, lambda: life.step, restarts, backoff, life.sleep)
    except RuntimeError as error:
        if isinstance(error, NotImplementedError):
            raise
        found = error
    return life, found


def _refuse_sleep(seconds: float) -> None:
    raise Mistake(
        f"supervise() calls time.sleep({seconds:g}): use the sleep that was given as an argument; with it a test "
        "lets hours pass at once"
    )


@reported
def recovery(module: ModuleType, backoff: float) -> None:
    """Supervise simulated ranks: all well, failures with and without progress, too many failures."""
    life, found = _supervised(module, [(5, 0, 0)], 3, backoff)
    if life.time < 3.0:
        raise Mistake(
            f"supervise() returned after {life.time:.1f} s while ranks still ran: a run is over when all have ended"
        )
    if found != 0:
        raise Mistake(f"all ranks ended with code 0, and supervise() gave {found!r}; it should return 0 restarts")
    for world, guilty, code in ((3, 2, 17), (3, 1, -9), (3, 0, 17), (4, 0, -11), (2, 1, 113), (1, 0, 1)):
        life, found = _supervised(module, [(5, guilty, code), (5, 0, 0)], 3, backoff, world)
        if found == 0:
            raise Mistake(f"rank {guilty} ended with exit code {code}, and supervise() took that for a good end")
        if found != 1:
            raise Mistake(
                f"rank {guilty} of {world} ended with exit code {code}, then all ended well: that is 1 restart; "
                f"supervise() gave {found!r}"
            )
    _pauses(module, backoff)
    _gives_up(module, backoff)
    _names_the_guilty(module, backoff)


def _pauses(module: ModuleType, backoff: float) -> None:
    life, found = _supervised(module, [(3, 1, 1)] * 4 + [(3, 0, 0)], 5, backoff)
    if isinstance(found, RuntimeError):
        raise Mistake(
            f"four failures, each after a new checkpoint, and supervise() gave up: {found}. Such a run gets on"
        )
    if life.pauses != [backoff] * 4:
        raise Mistake(
            f"the pauses before four restarts, each after a new checkpoint, were {life.pauses}; with backoff={backoff} "
            f"they should be {[backoff] * 4}: progress sets the pause back"
        )
    life, _ = _supervised(module, [(3, 1, 1), (0, 1, 1), (3, 1, 1), (0, 0, 0)], 5, backoff)
    if life.pauses != [backoff, 2 * backoff, backoff]:
        raise Mistake(
            f"failures after progress, without, and with progress again had the pauses {life.pauses}; they should be "
            f"{[backoff, 2 * backoff, backoff]}: doubled for each failure from the same checkpoint"
        )


def _gives_up(module: ModuleType, backoff: float) -> None:
    life, found = _supervised(module, [(4, 1, 17)] + [(0, 1, 17)] * 9, 9, backoff)
    if life.started != 3 or not isinstance(found, RuntimeError):
        raise Mistake(
            f"rank 1 failed again and again without a new checkpoint: after the third failure from one checkpoint "
            f"supervise() should raise RuntimeError; it started the ranks {life.started} times and gave {found!r}"
        )
    life, found = _supervised(module, [(4, 2, 17)] * 5, 2, backoff)
    if life.started != 3 or not isinstance(found, RuntimeError):
        raise Mistake(
            f"with max_restarts=2 the ranks are started 3 times at most, then RuntimeError is raised; they were "
            f"started {life.started} times and supervise() gave {found!r}"
        )
    if "rank 2" not in str(found) or "17" not in str(found):
        raise Mistake(
            f"the error says {str(found)!r}: it should name the rank that failed first and its exit code (rank 2, 17), "
            "not those of ranks that you killed"
        )


def _names_the_guilty(module: ModuleType, backoff: float) -> None:
    """Let each rank in turn be the one that fails, with no restart left."""
    for world, guilty, code in ((3, 0, 17), (3, 1, -9), (4, 1, 3), (5, 3, -6), (2, 0, 1)):
        life, found = _supervised(module, [(4, guilty, code)] * 3, 0, backoff, world)
        if life.started != 1 or not isinstance(found, RuntimeError):
            raise Mistake(
                f"with max_restarts=0 the first failure is the end: RuntimeError; the ranks were started "
                f"{life.started} times and supervise() gave {found!r}"
            )
        if f"rank {guilty}" not in str(found) or str(code) not in str(found):
            raise Mistake(
                f"rank {guilty} of {world} ended with exit code {code} while the others ran, and they were killed; the "
                f"error says {str(found)!r}: it should name the rank that failed first and its exit code (rank "
                f"{guilty}, {code}), not those of ranks that you killed"
            )
        if life.pauses:
            raise Mistake(
                f"no restart is left, and supervise() pauses for {life.pauses} before it raises: raise at once"
            )


@reported
def real_recovery(module: ModuleType, folder: Path) -> None:
    """Supervise two real processes of which one is killed; the sum over all samples must come out."""

    def start(generation: int) -> list[Any]:
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=_add_samples, args=(folder, rank, generation)) for rank in range(2)]
        for process in ranks:
            process.start()
        return ranks

    total = folder / "total"
    total.write_text("0 0")
    restarts = module.supervise(start, lambda: int(total.read_text().split()[0]), 3, 0.01, time.sleep)
    if (restarts, total.read_text()) != (1, "10 90"):
        raise Mistake(f"two real ranks, one of them killed: {restarts} restarts and the total {total.read_text()!r}")


def _add_samples(folder: Path, rank: int, generation: int) -> None:
    """Add the samples 0 to 9, twice each; rank 0 writes the total every second sample, and waits for rank 1."""
    step, total = map(int, (folder / "total").read_text().split())
    for sample in range(step, 10):
        if rank == 1 and generation == 0 and sample == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        (folder / f"{generation}-{sample}-{rank}").touch()
        while not (folder / f"{generation}-{sample}-{1 - rank}").exists():
            time.sleep(0.005)
        total += 2 * sample
        if rank == 0 and sample % 2:
            (folder / "new").write_text(f"{sample + 1} {total}")
            (folder / "new").replace(folder / "total")


def grade_elastic(attempt: Attempt) -> None:
    """Grade `elastic`: 3 ranks, then 2, then 4, against full batches in one process."""
    see, seed, length, batch = "Go on with another number of ranks", attempt.seed(), 44, 14
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
    model, optimizer = _elastic_parts(0)
    state, position = (model.state_dict(), optimizer.state_dict(), 0), 0
    data = torch.randn(length, 5, generator=torch.Generator().manual_seed(1))
    for world, steps in ((3, 1), (2, 1), (4, 2)):
        try:
            answers = attempt.run(rank_elastic, world, (seed, state, order, batch, steps), timeout=8.0)
        except Mistake as mistake:
            few = length - position - batch * (steps - 1) < world  # samples of the last of these batches
            if few and " waits in " in str(mistake):
                reason = "a rank whose share is empty must still take part in every collective"
                raise Mistake(
                    f"{str(mistake).rstrip('.')}. In the last batch there are fewer samples than ranks: {reason}", see
                ) from None
            raise
        for step in range(steps):
            samples = order[position : position + batch]
            _compare_shares([answer.value["shares"][step] for answer in answers], samples, world, see)
            _full_step(model, optimizer, data[samples])
            position += len(samples)
        for answer in answers:
            if answer.value["missing"]:
                who = f"rank {answer.rank} of {world}"
                raise Mistake(f"after join(), {who} does not have {answer.value['missing']} of rank 0", see)
        for answer in answers:
            _compare_states(answer.value, model, optimizer, position, f"rank {answer.rank} of {world}", see)
        state = answers[0].value["state"]


class Scaled(nn.Module):
    """A linear model of two outputs, with a buffer that its outputs depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 2)
        self.register_buffer("scale", 0.5 + torch.rand(5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs."""
        return self.linear(inputs * self.scale)


def wanted(inputs: torch.Tensor) -> torch.Tensor:
    """Return the targets: the sum of the columns, and of the first two."""
    return torch.stack([inputs.sum(1), inputs[:, :2].sum(1)], dim=1)


def _elastic_parts(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Scaled()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _full_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), wanted(inputs)).backward()
    optimizer.step()


def _compare_shares(shares: list[list[int]], samples: list[int], world: int, see: str) -> None:
    together = [sample for share in shares for sample in share]
    if len(together) > len(set(together)):
        raise Mistake(
            f"sample {max(together, key=together.count)} is in the shares of two of {world} ranks: {shares}", see
        )
    missing = [sample for sample in samples if sample not in together]
    other = [sample for sample in together if sample not in samples]
    if missing or other:
        raise Mistake(
            f"the next global batch of {len(samples)} samples on {world} ranks: samples {missing} are in no share, "
            f"samples {other} are in one but come earlier or later in the epoch. A batch is order[position : "
            "position + global_batch], and its size does not depend on the number of ranks",
            see,
        )
    if max(map(len, shares)) - min(map(len, shares)) > 1:
        raise Mistake(
            f"the shares of {world} ranks have {[len(share) for share in shares]} samples: divide them evenly", see
        )


def _compare_states(
    value: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, position: int, who: str, see: str
) -> None:
    weights, moments, place = value["state"]
    if place != position:
        raise Mistake(f"{who} is at position {place} of the epoch after {position} samples", see)
    difference = max((weights[name] - tensor).abs().max().item() for name, tensor in model.state_dict().items())
    if not difference < 1e-5:
        raise Mistake(
            f"after {position} samples the weights of {who} differ by {difference:.2g} from training on whole batches "
            "in one process: the gradient is the sum over all samples of the global batch, divided by their number, "
            "also where shares differ in size, the last batch is smaller or a share is empty",
            see,
        )
    momentum = [state["momentum_buffer"] for state in moments["state"].values()]
    expected = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
    if not all(torch.allclose(*pair, atol=1e-4) for pair in zip(momentum, expected, strict=True)):
        raise Mistake(f"after {position} samples the momentum of {who} is not that of training in one process", see)


def rank_elastic(
    module: ModuleType, rank: int, world: int, seed: int, state: Any, order: list[int], batch: int, steps: int
) -> dict[str, Any]:
    """Join with the state on rank 0 only, and make some steps."""
    model, optimizer = _elastic_parts(seed + rank)
    training = module.ElasticTraining(model, optimizer, order, batch)
    if rank == 0:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        training.position = state[2]
    else:  # other ranks may hold anything
        training.position = 9 + seed % 20
        optimizer.param_groups[0]["lr"] = 0.7
    training.join()
    wrong = [name for name in state[0] if not torch.equal(model.state_dict()[name], state[0][name])]
    missing = ("the buffers" if wrong == ["scale"] else "the weights") if wrong else ""
    if len(optimizer.state_dict()["state"]) != len(state[1]["state"]):
        missing = missing or "the optimizer state (momentum)"
    if optimizer.param_groups[0]["lr"] != state[1]["param_groups"][0]["lr"]:
        missing = missing or "the optimizer state (the learning rate)"
    if training.position != state[2]:
        missing = missing or "the position in the epoch"
    data = torch.randn(len(order), 5, generator=torch.Generator().manual_seed(1))
    shares = []
    for _ in range(steps):
        training.share(0, world + 1)  # asking what another number of ranks would get changes nothing
        shares.append(list(training.share(rank, world)))
        inputs = data[shares[-1]]
        training.step(inputs, wanted(inputs))
    final = (model.state_dict(), optimizer.state_dict(), training.position)
    return {"shares": shares, "state": final, "missing": missing}
