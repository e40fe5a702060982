"""The gate before an optimizer's step on a GPU: what passes, what is undone, and that nothing waits there for ever."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from phalanx.errors import CommunicationError
from phalanx.recovery.ranks.gate import StepGate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BUSY = 10**9
"""Cycles: half a second and more."""


class Case:
    """A model whose steps pass a gate."""

    def __init__(self, device: str = "cuda") -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(64, 64).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.gate = StepGate(torch.device("cuda", 0))
        self.inputs = torch.ones(2, 64, device=device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.inputs).sum().backward()
        self.gate.run(self.optimizer.step, self.optimizer)

    def state(self) -> list[torch.Tensor]:
        kept = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return [value.detach().clone() for value in (*self.model.parameters(), *kept)]


def assert_idle_soon() -> None:
    """Fail where the GPU does not finish: to wait for it would hang this process."""
    done = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + 20
    while not done.query():
        assert time.monotonic() < deadline, "the GPU waits at a closed gate"
        time.sleep(0.01)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_step_that_is_held_back_is_undone(steps):
    Case().step()  # loads the kernels, which waits for the GPU
    case = Case()
    for _ in range(steps):
        case.step()
    before = case.state()
    torch.cuda._sleep(BUSY)
    threading.Timer(0.1, case.gate.abort, ["rank 1 was lost"]).start()
    with pytest.raises(CommunicationError, match="rank 1 was lost"):
        case.step()
    assert not case.gate.has_lost_state
    torch.testing.assert_close(case.state(), before, rtol=0, atol=0)
    assert_idle_soon()


def test_a_held_step_is_copied_before_collectives_are_ended():
    """nccl frees memory when it ends: that waits for the GPU, and a copy would wait for nccl."""
    case = Case()
    case.step()
    before = case.state()
    torch.cuda._sleep(4 * BUSY)
    ended = []

    def abort() -> None:
        case.gate.abort("rank 1 was lost")
        case.gate.before_end()
        ended.append(bool(case.gate._host[0]))

    threading.Timer(0.1, abort).start()
    with pytest.raises(CommunicationError, match="rank 1 was lost"):
        case.step()
    assert ended == [True], "the gate was open again before the collectives were ended"
    torch.testing.assert_close(case.state(), before, rtol=0, atol=0)
    assert_idle_soon()


def test_after_a_step_that_failed_an_abort_does_not_hold_the_gpu_back():
    case = Case()
    case.step()
    torch.cuda._sleep(BUSY)

    def fails() -> None:
        raise ValueError("in the step")

    with pytest.raises(ValueError, match="in the step"):
        case.gate.run(fails, case.optimizer)
    case.gate.abort("rank 1 was lost")  # before the GPU has come to the gate
    assert case.gate.has_lost_state
    assert_idle_soon()


def test_an_offloaded_step_is_taken_on_the_host():
    case = Case("cpu")
    before = case.state()
    case.step()
    assert not torch.equal(case.state()[0], before[0])
    case.gate.abort("rank 1 was lost")
    before = case.state()
    with pytest.raises(CommunicationError):
        case.step()
    torch.testing.assert_close(case.state(), before, rtol=0, atol=0)
