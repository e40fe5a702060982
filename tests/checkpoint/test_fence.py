"""Checkpoints of a run that was taken over: an earlier group of it publishes no more."""

from __future__ import annotations

import pytest
import torch

from phalanx.checkpoint import Snapshot, list_checkpoints, save
from phalanx.errors import CheckpointError


def snapshot(step: int) -> Snapshot:
    return Snapshot(step=step, epoch=0, shared={}, tensors={"weight": torch.ones(2)})


def test_an_earlier_group_of_a_run_does_not_publish(tmp_path):
    save(tmp_path, snapshot(1), run_id="run", group=(0, 0, 3))
    save(tmp_path, snapshot(2), run_id="run", group=(0, 1, 1))
    with pytest.raises(CheckpointError, match="later group of this run: attempt 0, term 1, generation 1"):
        save(tmp_path, snapshot(3), run_id="run", group=(0, 0, 4))
    assert sorted(found.step for found in list_checkpoints(tmp_path)) == [1, 2]
    save(tmp_path, snapshot(3), run_id="run", group=(1, 0, 0))
    assert sorted(found.step for found in list_checkpoints(tmp_path)) == [1, 2, 3]


def test_other_runs_and_runs_that_nobody_takes_over_have_no_fence(tmp_path):
    save(tmp_path, snapshot(1), run_id="one", group=(2, 0, 0))
    save(tmp_path, snapshot(1), run_id="another", group=(0, 0, 0))
    save(tmp_path, snapshot(2), run_id="one")
    assert len(list_checkpoints(tmp_path)) == 3
