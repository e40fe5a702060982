"""Experts on different ranks, beyond the matrix: checkpoints across layouts, and what is refused."""

from __future__ import annotations

import pytest
from layouts import assert_same, train

from phalanx.errors import UsageError


def test_checkpoints_load_at_another_number_of_expert_ranks(ranks, tmp_path):
    place = {"checkpoint_dir": str(tmp_path / "ckpt")}

    def run(world_size, **settings):
        return ranks(lambda: train(str(tmp_path / "run"), "moe", **settings), world_size=world_size)[0][0]

    expected = run(1, batch_size=8, max_steps=4)
    run(4, batch_size=2, expert_parallel=2, max_steps=2, **place)
    run(1, batch_size=8, max_steps=3, resume_from_checkpoint=True, **place)
    ours = run(2, batch_size=4, expert_parallel=2, max_steps=4, resume_from_checkpoint=True, **place)
    assert_same(ours, expected, 1e-10)


def test_bad_expert_settings_are_refused(ranks, tmp_path):
    def run(name, world_size, **settings):
        ranks(lambda: train(str(tmp_path), name, batch_size=2, max_steps=1, **settings), world_size=world_size)

    with pytest.raises(UsageError, match=r"the 4 experts of layers.0.feed.experts evenly\n.*can be: 1, 2, 4"):
        run("moe", 3, expert_parallel=3)
    with pytest.raises(UsageError, match="Llama has no expert_modules"):
        run("llama", 2, expert_parallel=2)
    with pytest.raises(UsageError, match="runs with the data axes only"):
        run("moe", 4, expert_parallel=2, tensor_parallel=2)
