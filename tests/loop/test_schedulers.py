"""The user's torch schedulers in checkpoints: the JSON state restores each of them."""

from __future__ import annotations

import json

import pytest
import torch
from torch.optim import lr_scheduler

from phalanx import Formation
from phalanx.loop.optimizer_binding import load_scheduler_state, scheduler_state
from phalanx.loop.precision import LossScale

MAKERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 6], 0.1),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=12, cycle_momentum=False),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.MultiStepLR(o, [2, 4], 0.5)], [3]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5),
}


def rates(scheduler, optimizer, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step(1.0) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


@pytest.mark.parametrize("kind", MAKERS)
def test_a_scheduler_continues_where_it_was(kind):
    def make():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return optimizer, MAKERS[kind](optimizer)

    optimizer, scheduler = make()
    whole = rates(scheduler, optimizer, 10)
    optimizer, scheduler = make()
    rates(scheduler, optimizer, 4)
    saved = json.loads(json.dumps(scheduler_state(scheduler)))
    state = optimizer.state_dict()
    optimizer, scheduler = make()
    optimizer.load_state_dict(state)
    load_scheduler_state(scheduler, saved)
    assert rates(scheduler, optimizer, 6) == whole[4:]


def test_a_prepared_scheduler_has_the_state_of_an_unprepared_one():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = lr_scheduler.StepLR(optimizer, 3)
    before = scheduler.state_dict()
    with Formation(device="cpu") as formation:
        formation.prepare(optimizer, scheduler)
        assert scheduler.state_dict() == before
    assert scheduler.state_dict() == before


def prepared(formation, **options):
    """Return a scheduler that counts its steps, its optimizer, and what takes a step with a given gradient."""
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = formation.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0, **options))
    scheduler = formation.prepare(lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))

    def step(value: float) -> None:
        formation.backward(model(torch.tensor([[value]])).sum())
        optimizer.step()
        optimizer.zero_grad()

    return scheduler, step


def test_a_scheduler_called_per_epoch_does_not_miss_an_epoch_whose_last_step_was_skipped():
    with Formation(device="cpu", on_nonfinite="skip") as formation:
        scheduler, step = prepared(formation)
        for values in ([1.0, 1.0], [1.0, float("inf")], [1.0, 1.0], [float("inf"), float("inf")]):
            for value in values:
                step(value)
            scheduler.step()
        assert scheduler.last_epoch == 3
        assert formation.gradients.skipped_steps == 3


def test_a_scheduler_called_per_epoch_counts_epochs_whose_batches_do_not_fill_a_step():
    with Formation(device="cpu", gradient_accumulation_steps=2) as formation:
        scheduler, step = prepared(formation)
        for _ in range(2):
            for _ in range(3):
                step(1.0)
            scheduler.step()
        assert scheduler.last_epoch == 2


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_leaves_out_is_counted_and_moves_no_scheduler(fused):
    with Formation(device="cpu") as formation:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # fp16's, which needs a GPU
        formation.gradients.scale = LossScale(scaler, formation.device, agree=False)
        scheduler, step = prepared(formation, fused=fused)
        for value in (1.0, float("inf"), 1.0):
            step(value)
            scheduler.step()
        assert formation.gradients.skipped_steps == 1
        assert scheduler.last_epoch == 2


def test_a_prepared_scheduler_takes_keywords():
    with Formation(device="cpu") as formation:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = formation.prepare(lr_scheduler.ReduceLROnPlateau(optimizer))
        scheduler.step(metrics=1.0)
        assert scheduler.last_epoch == 1
