"""The grader of a pipeline with real messages: order, memory, gradients, overlap and traffic."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grader.checks.talk import Late, repeat_if_late, run_explained
from grader.exercise import Attempt, Mistake
from grader.ranks import Answer

SEE_RUN = "Run a pipeline"
Action = tuple[str, int]
PAUSE = 0.02
WAITS = (
    "If one stage is inside send(activation) while the next one is inside send(gradient), both wait for ever: send "
    "with isend. And each stage must follow its schedule"
)
ERRORS = {
    "NoneType": "A received activation needs requires_grad_() before the stage runs, or it has no .grad",
    "does not require grad": "The output has no history here: was it detached, or received without requires_grad_()?",
    "backward through the graph a second time": "Each backward runs once, on the output of its own micro-batch",
}


class Held:
    """A tensor that autograd keeps for backward; counts the micro-batches with at least one of them."""

    def __init__(self, tensor: Tensor, number: int, alive: dict[int, int]) -> None:
        self.tensor, self.number, self.alive = tensor, number, alive
        alive[number] = alive.get(number, 0) + 1

    def __del__(self) -> None:
        self.alive[self.number] -= 1
        if not self.alive[self.number]:
            del self.alive[self.number]


class Pause(torch.autograd.Function):
    """A pause in forward and in backward, noted with its time."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, seconds: float, notes: list[tuple[str, float, float]]) -> Tensor:
        """Pass the tensor on, later."""
        ctx.seconds, ctx.notes = seconds, notes
        began = time.monotonic()
        time.sleep(seconds)
        notes.append(("F", began, time.monotonic()))
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Pass the gradient on, later."""
        began = time.monotonic()
        time.sleep(ctx.seconds)
        ctx.notes.append(("B", began, time.monotonic()))
        return gradient, None, None


class Stage(nn.Module):
    """One stage: a linear layer with a pause; it notes its work and the micro-batches that it keeps alive."""

    def __init__(self, seed: int, rank: int, width: int, pause: float = 0.0) -> None:
        super().__init__()
        self.pause = pause
        torch.manual_seed(seed + rank)
        self.linear = nn.Linear(width, width)
        self.notes: list[tuple[str, float, float]] = []
        self.alive: dict[int, int] = {}
        self.most = self.count = self.held = 0
        self.received: list[weakref.ref[Tensor]] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what autograd keeps in this forward."""
        number = self.count
        self.count += 1
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: Held(tensor, number, self.alive), lambda held: held.tensor
        )
        with hooks:
            yield
        self.most = max(self.most, len(self.alive))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output of one micro-batch."""
        self.received.append(weakref.ref(inputs))
        self.held = max(self.held, sum(each() is not None for each in self.received))
        with self.counted():
            return torch.tanh(Pause.apply(self.linear(inputs), self.pause, self.notes))


def schedule_of(kind: str, stage: int, stages: int, count: int) -> list[Action]:
    """Return a right schedule, made by running the rules on paper."""
    limit = count if kind == "gpipe" else min(stages - stage, count)
    actions: list[Action] = []
    forwards = backwards = 0
    while backwards < count:
        if forwards < count and forwards - backwards < limit and not (kind == "gpipe" and backwards):
            actions.append(("F", forwards))
            forwards += 1
        else:
            actions.append(("B", backwards))
            backwards += 1
    return actions


def micro_batches(seed: int, count: int, shape: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Return inputs and targets of all micro-batches."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(2, count, *shape, generator=generator)
    return list(both[0]), list(both[1])


def rank_run(
    module: ModuleType, rank: int, world: int, seed: int, kind: str, count: int, shape: Sequence[int], pause: float
) -> dict[str, Any]:
    """Run one schedule."""
    stage = Stage(seed, rank, shape[1], pause)
    inputs, targets = micro_batches(seed, count, shape)
    schedule = schedule_of(kind, rank, world, count)
    loss = module.run_pipeline(
        stage, schedule, inputs if rank == 0 else None, targets if rank == world - 1 else None, torch.Size(shape)
    )
    gradients = [None if each.grad is None else each.grad.clone() for each in stage.parameters()]
    left = len(stage.alive)
    return {
        "loss": loss,
        "gradients": gradients,
        "most": stage.most,
        "left": left,
        "held": stage.held,
        "notes": stage.notes,
    }


def grade_run(attempt: Attempt) -> None:
    """Run gpipe on two stages and 1f1b on three."""
    repeat_if_late(lambda stretch: grade_kind(attempt, "gpipe", 2, 6, PAUSE * stretch))
    repeat_if_late(lambda stretch: grade_kind(attempt, "1f1b", 3, attempt.random.randint(5, 6), PAUSE * stretch))


def grade_kind(attempt: Attempt, kind: str, ranks: int, count: int, pause: float) -> None:
    """Run one schedule and check everything."""
    shape, seed = (attempt.random.randint(2, 5), attempt.random.randint(3, 6)), attempt.seed()
    answers = run_explained(
        attempt, rank_run, ranks, (seed, kind, count, shape, pause), waits=WAITS, errors=ERRORS, see=SEE_RUN
    )
    text = f"{kind} with {ranks} stages and {count} micro-batches"
    check_order(text, answers, kind, count)
    check_alive(text, answers, kind, count)
    check_result(text, answers, seed, count, shape)
    check_waits(text, answers)
    check_overlap(text, answers)
    check_traffic(text, answers, count, 4 * shape[0] * shape[1])


def check_order(text: str, answers: Sequence[Answer], kind: str, count: int) -> None:
    """Raise unless each stage did its forwards and backwards in the order of its schedule."""
    for answer in answers:
        done = [each for each, _, _ in answer.value["notes"]]
        planned = [each for each, _ in schedule_of(kind, answer.rank, len(answers), count)]
        if done != planned:
            raise Mistake(
                f"{text}: the schedule of stage {answer.rank} is {' '.join(planned)}; it did {' '.join(done)}: run "
                "the actions in their order, each one once",
                SEE_RUN,
            )


def check_alive(text: str, answers: Sequence[Answer], kind: str, count: int) -> None:
    """Raise if a stage kept more micro-batches alive than its schedule says."""
    for answer in answers:
        limit = count if kind == "gpipe" else min(len(answers) - answer.rank, count)
        if answer.value["most"] > limit or answer.value["left"]:
            raise Mistake(
                f"{text}: stage {answer.rank} kept the activations of {answer.value['most']} micro-batches at once, "
                f"and {answer.value['left']} at the end; the schedule needs {limit} and 0: free a micro-batch in its "
                "backward (no retain_graph)",
                SEE_RUN,
            )
    last = answers[-1]  # its inputs are received, and no message holds them
    limit = count if kind == "gpipe" else 1
    if last.value["held"] > limit + 1:  # one more: the names of the last action may still hold theirs
        raise Mistake(
            f"{text}: stage {last.rank} still held the inputs of {last.value['held']} micro-batches in a forward; the "
            f"schedule needs {limit}. What is kept for the backward must be taken out of its dictionary or list there "
            "(pop), or it grows with every micro-batch",
            SEE_RUN,
        )


def check_result(text: str, answers: Sequence[Answer], seed: int, count: int, shape: Sequence[int]) -> None:
    """Raise unless gradients and loss are those of one process."""
    stages = [Stage(seed, rank, shape[1]) for rank in range(len(answers))]
    inputs, targets = micro_batches(seed, count, shape)

    def run(number: int) -> Tensor:
        value = inputs[number]
        for stage in stages:
            value = torch.tanh(stage.linear(value))
        return F.mse_loss(value, targets[number])

    losses = torch.stack([run(number) for number in range(count)])
    losses.mean().backward()
    for answer in reversed(answers):
        rights = [each.grad for each in stages[answer.rank].parameters()]
        for found, right in zip(answer.value["gradients"], rights, strict=True):
            if found is None or not torch.allclose(found, right, rtol=1e-4, atol=1e-6):
                last = [torch.autograd.grad(run(count - 1) / scale, list(stages[answer.rank].parameters()))
                        for scale in (1, count)]  # fmt: skip
                raise Mistake(f"{text}: {why_gradient(answer, found, right, count, last, rights)}", SEE_RUN)
    check_loss(text, answers, losses.detach())


def why_gradient(
    answer: Answer,
    found: Tensor | None,
    right: Tensor,
    count: int,
    last: Sequence[Sequence[Tensor]],
    rights: Sequence[Any],
) -> str:
    """Say what a gradient is instead."""
    where = f"the gradients of stage {answer.rank}"
    if found is None:
        return f"{where} are None: its backward never ran"
    if torch.allclose(found, right * count, rtol=1e-4, atol=1e-6):
        return f"{where} are {count} times too large: divide each loss by the number of micro-batches"
    place = next(index for index, each in enumerate(rights) if each is right)
    if any(torch.allclose(found, each[place], rtol=1e-4, atol=1e-6) for each in last):
        return f"{where} are those of the last micro-batch alone: gradients add up, do not clear them"
    return (
        f"{where} differ from those of one process: does each backward use the input and output of its own "
        "micro-batch, and send the gradient of the input?"
    )


def check_loss(text: str, answers: Sequence[Answer], losses: Tensor) -> None:
    """Raise unless the last rank, and only it, returns the mean loss."""
    for answer in answers[:-1]:
        if answer.value["loss"] is not None:
            raise Mistake(f"{text}: rank {answer.rank} returned a loss; only the last rank knows it", SEE_RUN)
    loss = answers[-1].value["loss"]
    if loss is None:
        raise Mistake(f"{text}: the last rank returned None; it should return the mean loss", SEE_RUN)
    if loss.requires_grad:
        raise Mistake(f"{text}: the loss has its history: return it detached", SEE_RUN)
    if torch.allclose(loss, losses.mean(), rtol=1e-4):
        return
    kinds = {"the sum": losses.sum(), "that of the last micro-batch": losses[-1], "that of the first": losses[0]}
    kinds["that of the last micro-batch, divided"] = losses[-1] / len(losses)
    seen = next((word for word, value in kinds.items() if torch.allclose(loss, value, rtol=1e-4)), f"{loss:.5f}")
    raise Mistake(f"{text}: the loss returned is {seen}, not the mean over the micro-batches", SEE_RUN)


def check_traffic(text: str, answers: Sequence[Answer], count: int, size: int) -> None:
    """Raise unless each border was crossed once per micro-batch and direction."""
    last = len(answers) - 1
    for answer in answers:
        wanted = count * ((answer.rank > 0) + (answer.rank < last))
        if answer.messages != wanted or answer.sent != wanted * size:
            raise Mistake(
                f"{text}: rank {answer.rank} sent {answer.messages} messages with {answer.sent} bytes; it should be "
                f"{wanted} of {size} bytes each",
                SEE_RUN,
            )


def check_waits(text: str, answers: Sequence[Answer]) -> None:
    """Raise unless all messages were waited for."""
    for answer in answers:
        open_calls = [call for call in answer.calls if call.end is None]
        if open_calls:
            raise Mistake(
                f"{text}: rank {answer.rank} never waits for the {open_calls[0].kind} of line {open_calls[0].line}: "
                "the function may end while a message is not out yet",
                SEE_RUN,
            )


def check_overlap(text: str, answers: Sequence[Answer]) -> None:
    """Raise unless the stages worked at the same time."""
    spans = [(begin, end) for answer in answers for _, begin, end in answer.value["notes"]]
    whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
    work = sum(end - begin for begin, end in spans)
    if whole > 0.75 * work:
        raise Late(
            f"{text}: the stages' work takes {work:.2f} s in all and the run {whole:.2f} s: they work one after the "
            "other. Does a stage wait for an answer before it goes on with its next action?",
            SEE_RUN,
        )
