"""A run whose checkpoints are in S3: trained on two ranks, resumed, evaluated, listed and exported by commands."""

from __future__ import annotations

import json
import re

import pytest
from command import phalanx

from phalanx.checkpoint import list_checkpoints

FAST = ("--device", "cpu", "--num-workers", 2, "--no-tensorboard", "--no-progress")


@pytest.fixture
def trained(bucket, tmp_path, monkeypatch, fork_server):
    """Return the URL of the checkpoints of a run of 20 steps."""
    monkeypatch.chdir(tmp_path)
    words = ("--checkpoint-dir", f"{bucket}/kept", "--checkpoint-frequency", "10 steps")
    answer = phalanx("train", "digits", "--max-steps", 20, *words, *FAST)
    assert answer.code == 0, answer.text
    return f"{bucket}/kept"


def test_a_run_saves_to_s3_resumes_from_there_and_every_command_takes_the_url(trained):
    assert {one.step for one in list_checkpoints(trained)} == {10, 20}
    listed = phalanx("ckpt", "ls", trained)
    assert re.search(r"^step-00000020-\w{6} +20 .* 2 +sharded .*complete$", listed.out, re.MULTILINE), listed.text
    assert phalanx("ckpt", "check", trained).code == 0
    answer = phalanx(
        "train", "digits", "--max-steps", 30, "--checkpoint-dir", trained, "--resume-from-checkpoint", *FAST
    )
    assert answer.code == 0, answer.text
    newest = list_checkpoints(trained)[0]
    assert (newest.step, newest.manifest.lineage[0]["step"]) == (30, 20)
    shown = json.loads(phalanx("ckpt", "ls", "last", "--json").out)
    assert shown[0]["path"] == str(newest.path)
    assert newest.path.name.startswith("step-00000030-")
    for words in (
        ("runs",),
        ("evaluate", "last"),
        ("export", "last"),
    ):
        answer = phalanx(*words)
        assert answer.code == 0, answer.text


def test_a_bucket_that_does_not_exist_ends_the_command_before_any_rank_starts(bucket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = phalanx("train", "digits", "--checkpoint-dir", "s3://no-such-bucket-here/x", *FAST)
    assert answer.code == 2
    assert "The bucket must exist" in answer.err
    assert not (tmp_path / "runs").exists()
    answer = phalanx("train", "digits", "--resume-from-checkpoint", f"{bucket}/nothing", *FAST)
    assert answer.code == 2
    assert "there is nothing at that path" in answer.err
