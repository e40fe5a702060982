"""The practical assessment: a training system is run, killed, measured, and compared with one process."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grader.checks.talk import Late, repeat_if_late
from grader.exercise import Attempt, Exercise, Mistake
from grader.ranks import Answer, marker

_TEMPLATE = "module-202/assessment/starter/system.py"
_FORBIDDEN = ("torch.nn.parallel", "torch.distributed.fsdp", "torch.distributed.algorithms")
_LATENCY = 0.004
"""Seconds that each collective takes longer, as on a slow network."""
_TIMED_STEPS, _TIMED_LAYERS = 10, 12


def make_model(seed: int, layers: int = 3, width: int = 12) -> nn.Module:
    """Return a small network; BatchNorm is left out, as its statistics depend on the parts of a batch."""
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*parts, nn.Linear(width, 2)).double()


def make_data(seed: int, rows: int, width: int = 12) -> tuple[Tensor, Tensor]:
    """Return inputs and targets."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=draw).double(), torch.randn(rows, 2, generator=draw).double()


def oracle(seed: int, rows: int, steps: int, batch: int, *, mean_of: int = 0) -> tuple[list[Tensor], list[float]]:
    """Return weights and losses of one process; with mean_of=n, those of n ranks that take a plain mean."""
    model, (inputs, targets) = make_model(seed), make_data(seed, rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    order: list[int] = []
    epoch = 0
    losses = []
    for _ in range(steps):
        while len(order) < batch:
            order += torch.randperm(rows, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
            epoch += 1
        chosen, order = order[:batch], order[batch:]
        optimizer.zero_grad()
        groups = [chosen[rank::mean_of] for rank in range(mean_of)] if mean_of else [chosen]
        loss = sum(nn.functional.mse_loss(model(inputs[rows_]), targets[rows_]) for rows_ in groups) / len(groups)
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
        losses.append(float(loss.detach()))  # type: ignore[union-attr]
    return [parameter.detach().clone() for parameter in model.parameters()], losses


def run_system(
    module: ModuleType,
    rank: int,
    world: int,
    seed: int,
    rows: int,
    steps: int,
    batch: int,
    folder: str,
    every: int = 2,
    stop: int = 0,
    victim: int = 1,
) -> dict[str, Any]:
    """Train with the learner's system; a rank is killed before step `stop`, if one is given."""
    model = make_model(seed if rank == 0 else seed + rank)
    inputs, targets = make_data(seed, rows)
    system = module.TrainingSystem(model, 0.05, 0.9, Path(folder))
    if stop and rank == victim:
        seen = 0

        def before(*_: Any) -> None:
            nonlocal seen
            seen += 1
            if seen == stop:
                marker("killed")

        model.register_forward_pre_hook(before)
    losses = system.fit(inputs, targets, steps, batch, seed, every)
    return {"weights": [parameter.detach().clone() for parameter in model.parameters()], "losses": losses}


def difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the largest difference between two lists of tensors."""
    return float(torch.stack([(one - other).abs().max() for one, other in zip(found, wanted, strict=True)]).max())


def grade_correct(attempt: Attempt) -> None:
    """Weights and losses of 1, 2 and 3 ranks equal those of one process."""
    seed, rows, steps, batch = attempt.seed(), 37, 9, 10
    weights, losses = oracle(seed, rows, steps, batch)
    for ranks in (1, 2, 3):
        folder = attempt.folder / f"correct-{ranks}"
        folder.mkdir()
        answers = attempt.run(run_system, ranks, (seed, rows, steps, batch, str(folder)))
        for answer in answers:
            _compare(answer, ranks, weights, losses, (seed, rows, steps, batch))


def _compare(answer: Answer, ranks: int, weights: list[Tensor], losses: list[float], job: tuple[int, ...]) -> None:
    found = answer.value
    if len(found["losses"]) != len(losses):
        raise Mistake(f"fit returned {len(found['losses'])} losses for {len(losses)} steps ({ranks} ranks)")
    gap = difference(found["weights"], weights)
    if not gap <= 1e-9:  # also for NaN
        plain, _ = oracle(*job, mean_of=ranks)
        if ranks > 1 and difference(found["weights"], plain) < 1e-9:
            raise Mistake(
                f"with {ranks} ranks the weights are those of a plain mean of the ranks' gradients: 10 samples on 3"
                " ranks are parts of 4, 3 and 3, so weight each rank by its samples"
            )
        pairs = zip(found["losses"], losses, strict=True)
        first = next((step for step, (one, other) in enumerate(pairs) if not abs(one - other) <= 1e-9), None)
        where = (
            "the losses are right, the weights are not" if first is None else f"the loss of step {first} differs first"
        )
        raise Mistake(f"rank {answer.rank} of {ranks}: the weights differ from one process by {gap:.1e}; {where}")
    worst = difference([torch.tensor(found["losses"])], [torch.tensor(losses)])
    if not worst <= 1e-9:
        raise Mistake(
            f"rank {answer.rank} of {ranks}: a loss differs by {worst:.1e}: it is the mean over the global batch"
        )


def grade_recovery(attempt: Attempt) -> None:
    """A killed rank, the writing one or the other; a torn file, other numbers of ranks: the end of a quiet run."""
    for victim, every in ((0, attempt.random.choice((2, 3))), (1, attempt.random.choice((2, 3)))):
        _survives(attempt, victim, every)


def _survives(attempt: Attempt, victim: int, every: int) -> None:
    seed, rows, steps, batch = attempt.seed(), 37, 11, 10
    weights, losses = oracle(seed, rows, steps, batch)
    folder = attempt.folder / f"recovery-{victim}"
    folder.mkdir()
    stop = attempt.random.randrange(5, 8)
    attempt.run(
        run_system,
        2,
        (seed, rows, steps, batch, str(folder), every, stop, victim),
        kill={victim: "killed"},
        expect_failure=True,
        timeout=20,
    )
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_mtime)
    if not files:
        raise Mistake(
            f"rank {victim} was killed before step {stop}, with a checkpoint after every {every} steps: the folder is "
            "empty"
        )
    answers = attempt.run(run_system, 3, (seed, rows, steps, batch, str(folder), every))
    _continued(answers, weights, losses, steps, f"after rank {victim} was killed, with 3 ranks instead of 2")
    torn = max(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: (path.stat().st_mtime, path.name)
    )
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    answers = attempt.run(run_system, 2, (seed, rows, steps + 2, batch, str(folder), every))
    weights, losses = oracle(seed, rows, steps + 2, batch)
    _continued(answers, weights, losses, steps + 2, f"after {torn.name} was cut in half")


def _continued(answers: list[Answer], weights: list[Tensor], losses: list[float], steps: int, when: str) -> None:
    for answer in answers:
        count = len(answer.value["losses"])
        if count >= steps:
            raise Mistake(f"{when}: fit computed all {count} steps again instead of continuing from a checkpoint")
        gap = difference(answer.value["weights"], weights)
        if not gap <= 1e-9:  # also for NaN
            late = max(abs(one - other) for one, other in zip(answer.value["losses"], losses[-count:], strict=True))
            about = (
                "the momentum, or the position in the data, is not in the checkpoint"
                if late > 1e-9
                else "some steps are missing"
            )
            raise Mistake(f"{when}: the weights differ from a run without failures by {gap:.1e}; {about}")


def grade_bytes(attempt: Attempt) -> None:
    """Each gradient travels once per step; what is sent once, at the start, is counted apart."""
    seed, rows, batch = attempt.seed(), 40, 8
    size = sum(parameter.numel() * parameter.element_size() for parameter in make_model(seed).parameters())
    short, long = 4, 12
    sent: dict[int, list[int]] = {}
    for steps in (short, long):
        folder = attempt.folder / f"bytes-{steps}"
        folder.mkdir()
        answers = attempt.run(run_system, 2, (seed, rows, steps, batch, str(folder), 100))
        sent[steps] = [
            sum(call.bytes for call in answer.calls if "recv" not in call.kind and call.kind != "barrier")
            for answer in answers
        ]
    for rank, (few, many) in enumerate(zip(sent[short], sent[long], strict=True)):
        per_step = (many - few) / (long - short)
        if per_step > 1.1 * size + 128:  # the loss, and numbers of rows
            raise Mistake(
                f"rank {rank} hands {per_step / size:.1f} times the gradients' {size} bytes to collectives per step, "
                "beside what it sends once at the start; once is enough: do not send weights in each step, nor "
                "gradients twice"
            )
        start = few - short * per_step
        if start > 4 * size + 16384:
            raise Mistake(
                f"rank {rank} hands {start / size:.1f} times the gradients' {size} bytes to collectives before the "
                "first step; weights, buffers and the state of the optimizer are three times at most"
            )


def slow_run(module: ModuleType, rank: int, world: int, seed: int, folder: str, latency: float) -> float:
    """Return the seconds of 10 steps where each collective takes longer."""
    real = dist.ProcessGroup.allreduce

    def slow(group: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(latency)
        return real(group, *args, **kwargs)

    dist.ProcessGroup.allreduce = slow  # type: ignore[assignment, method-assign]
    model, (inputs, targets) = make_model(seed, layers=_TIMED_LAYERS), make_data(seed, 64)
    system = module.TrainingSystem(model, 0.05, 0.9, Path(folder))
    dist.barrier()
    began = time.monotonic()
    system.fit(inputs, targets, _TIMED_STEPS, 16, seed, 100)
    return time.monotonic() - began


def grade_throughput(attempt: Attempt) -> None:
    """At least three times as fast as one all-reduce per parameter, on a network with latency."""
    repeat_if_late(lambda stretch: _fast_enough(attempt, _LATENCY * stretch))


def _fast_enough(attempt: Attempt, latency: float) -> None:
    seed = attempt.seed()
    folder = Path(tempfile.mkdtemp(dir=attempt.folder))
    # What the latency alone costs with one all-reduce per parameter: a busy machine does not change it.
    naive = _TIMED_STEPS * len(list(make_model(seed, layers=_TIMED_LAYERS).parameters())) * latency
    own = max(answer.value for answer in attempt.run(slow_run, 2, (seed, str(folder), latency)))
    if naive < 3 * own:
        raise Late(
            f"{_TIMED_STEPS} steps take {own:.2f} s where a collective has {latency * 1000:.0f} ms of latency; one"
            f" all-reduce per parameter takes {naive:.2f} s, and 3 times faster than that is asked for: put gradients"
            " into buckets"
        )


EXERCISES = (
    Exercise(
        name="assessment-correct",
        title="A training system equals one process",
        template=_TEMPLATE,
        target="TrainingSystem",
        points=20,
        grade=grade_correct,
        forbidden=_FORBIDDEN,
    ),
    Exercise(
        name="assessment-recovery",
        title="It survives planted faults",
        template=_TEMPLATE,
        target="TrainingSystem",
        points=20,
        grade=grade_recovery,
        forbidden=_FORBIDDEN,
    ),
    Exercise(
        name="assessment-bytes",
        title="It sends each gradient once per step",
        template=_TEMPLATE,
        target="TrainingSystem",
        points=10,
        grade=grade_bytes,
        forbidden=_FORBIDDEN,
    ),
    Exercise(
        name="assessment-throughput",
        title="It is 3 times as fast as the baseline",
        template=_TEMPLATE,
        target="TrainingSystem",
        points=10,
        grade=grade_throughput,
        forbidden=_FORBIDDEN,
    ),
)
