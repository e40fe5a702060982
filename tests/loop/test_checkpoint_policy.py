"""Checkpoints for restarts that no setting asked for: not where some rank does not see them, nor without restarts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from phalanx.loop.checkpoint_policy import CheckpointPolicy
from phalanx.loop.formation import Formation

if TYPE_CHECKING:
    from pathlib import Path


def policy_under(
    folders: list[Path], launcher: dict[str, str]
) -> tuple[Path | None, tuple[int, str] | None, list[str]]:
    """Return where this rank would save, how often, and what it says of it."""
    before = dict(os.environ)
    os.environ.update(launcher)
    try:
        with Formation(device="cpu") as formation:
            policy = CheckpointPolicy(formation, folders[formation.rank])
            policy.check_directory()
            return policy.directory, policy.every, formation.notes
    finally:
        for name in launcher.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def test_restarts_do_without_checkpoints_that_some_machine_does_not_see_and_say_so(ranks, tmp_path):
    launcher = {"PHALANX_LOG_DIR": str(tmp_path), "TORCHELASTIC_MAX_RESTARTS": "2"}
    found = ranks(lambda: policy_under([tmp_path / "ours", tmp_path / "other"], launcher), world_size=2)
    assert (tmp_path / "ours/checkpoints").is_dir()
    for directory, every, notes in found:
        assert (directory, every) == (None, None)
        assert "a restart begins at step 1" in notes[-1]


def test_without_restarts_nothing_is_saved_unasked(ranks, tmp_path):
    launcher = {"PHALANX_LOG_DIR": str(tmp_path), "TORCHELASTIC_MAX_RESTARTS": "0"}
    assert ranks(lambda: policy_under([tmp_path] * 2, launcher), world_size=2) == [(None, None, [])] * 2
