"""`phalanx ckpt`: what each action shows, how it ends, and what it answers to mistakes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from command import clean_environment, completions, phalanx

from phalanx.checkpoint import RunLock, Snapshot, list_checkpoints, load, mark_best, save
from phalanx.cli.parsers import CKPT_ACTIONS
from phalanx.observe.best_mark import Best


def snapshot(step: int, value: float = 0.0) -> Snapshot:
    weights = {"w": torch.arange(24.0).reshape(6, 4) + value, "bias": torch.zeros(2, dtype=torch.bfloat16)}
    moments = {"w": {"exp_avg": torch.ones(6, 4)}}
    return Snapshot(step, 1, {"model": weights, "optimizer": {"state": moments, "lr": 0.1}}, rank_state={"seed": 3})


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Return a directory with four checkpoints, the second of which is the best."""
    monkeypatch.chdir(tmp_path)
    for step in (10, 20, 30, 40):
        config = {"learning_rate": 0.1 * step, "strategy": "ddp"}
        saved = save(tmp_path / "kept", snapshot(step, step / 10), run_id="run-a", config=config)
        if step == 20:
            mark_best(Best(saved.path, 20, "val/loss", "min", 0.25))
    return tmp_path / "kept"


def answered(*words: object):
    answer = phalanx("ckpt", *words)
    assert answer.code == 0, answer.text
    return answer.out


def read_json(*words: object):
    return json.loads(answered(*words, "--json"))


def steps(directory) -> list[int]:
    return sorted(one.step for one in list_checkpoints(directory))


def flip(checkpoint) -> str:
    """Change one bit of the largest file; return its name."""
    file = max((path for path in checkpoint.iterdir() if path.name != "manifest.json"), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file.name


def test_ls_shows_steps_sizes_the_best_and_damage(kept):
    (kept / "step-00000030" / "manifest.json").write_text("{")
    next((kept / "step-00000010").glob("rank-*")).unlink()
    out = answered("ls", kept)
    assert re.search(r"^step-00000040 +40 .* 1 +sharded +complete$", out, re.MULTILINE)
    assert re.search(r"^step-00000020 .*val/loss 0.25 +complete$", out, re.MULTILINE)
    assert re.search(r"^step-00000010 .* damaged$", out, re.MULTILINE)
    assert re.search(r"^step-00000030 .* damaged$", out, re.MULTILINE)
    assert "is truncated or not JSON" in out
    rows = {row["path"].rsplit("/", 1)[1]: row for row in read_json("ls", kept)}
    assert rows["step-00000020"]["best"] == {"metric": "val/loss", "value": 0.25}
    assert rows["step-00000040"]["bytes"] > 0


def test_ls_of_a_directory_without_checkpoints_says_so(tmp_path):
    assert "no checkpoints in" in answered("ls", tmp_path)
    assert read_json("ls", tmp_path) == []


def test_inspect_shows_what_is_in_a_checkpoint(kept):
    out = answered("inspect", f"{kept}@20")
    assert re.search(r"^step +20$", out, re.MULTILINE)
    assert "strategy ddp" in out
    assert re.search(r"^model +2 +26 +bfloat16, float32 +100 bytes$", out, re.MULTILINE)
    assert re.search(r"^optimizer +1 +24 +float32 +96 bytes$", out, re.MULTILINE)
    assert re.search(r"^rank-00000.pt .* [0-9a-f]{64}$", out, re.MULTILINE)
    assert re.search(r"^model.w +\[6, 4\] +float32 +96 bytes$", answered("inspect", kept, "--tensors"), re.MULTILINE)
    shown = read_json("inspect", kept / "step-00000020")
    assert shown["tensors"]["optimizer.state.w.exp_avg"] == {"shape": [6, 4], "dtype": "float32", "bytes": 96}
    assert shown["config"]["learning_rate"] == 2.0


def test_check_reads_every_file_and_names_the_damaged_one(kept):
    assert answered("check", kept).count(": intact (") == 4
    name = flip(kept / "step-00000030")
    answer = phalanx("ckpt", "check", kept)
    assert answer.code == 1
    assert f"step-00000030: damaged\n  {name} does not match its hash" in answer.out
    assert phalanx("ckpt", "check", kept / "step-00000030").code == 1
    assert phalanx("ckpt", "check", f"{kept}@40").code == 0
    (shown,) = [row for row in json.loads(phalanx("ckpt", "check", kept, "--json").out) if row["problems"]]
    assert shown["path"].endswith("step-00000030")


def test_diff_says_by_how_much_tensors_differ_and_which_settings(kept):
    out = answered("diff", f"{kept}@10", f"{kept}@30")
    assert "1 of 3 tensors differ:" in out
    assert re.search(r"^model.w +2 +0.083 +24 of 24$", out, re.MULTILINE)
    assert "setting learning_rate: 1.0 and 3.0" in out
    assert "equal: all 1 tensors are identical, bit for bit" in answered(
        "diff", f"{kept}@10", f"{kept}@30", "--only", "optimizer"
    )


def test_diff_of_equal_ones_says_so_and_names_are_compared(kept, tmp_path):
    save(tmp_path / "other", snapshot(10, 1.0), run_id="run-b")
    assert "equal: all 3 tensors are identical, bit for bit" in answered("diff", f"{kept}@10", "other")
    values = {"w": torch.full((6, 4), float("nan")), "more": torch.zeros(3)}
    save(tmp_path / "third", Snapshot(1, 0, {"model": values}), run_id="run-c")
    out = answered("diff", "other", "third")
    assert "only in A (2):\n  model.bias\n  optimizer.state.w.exp_avg" in out
    assert "only in B (1):\n  model.more" in out
    assert re.search(r"^model.w +inf", out, re.MULTILINE)
    shown = read_json("diff", "third", "third")
    assert shown["same_tensors"] is True


def test_checkpoints_of_different_models_are_called_so_in_one_line(kept, tmp_path):
    values = {f"layer{number}.w": torch.zeros(3) for number in range(90)}
    save(tmp_path / "other", Snapshot(1, 0, {"model": {**values, "w": torch.zeros(2)}}), run_id="run-b")
    answer = phalanx("ckpt", "diff", f"{kept}@10", "other")
    line = "different models: of 3 and 91 tensors none has the same name and shape in both; see --tensors"
    assert (answer.code, answer.out.splitlines()[2:]) == (1, [line])
    assert "model.layer89.w" in phalanx("ckpt", "diff", f"{kept}@10", "other", "--tensors").out


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_reshard_changes_the_files_and_nothing_else(kept, tmp_path, ranks):
    answered("reshard", f"{kept}@30", tmp_path / "again", "--ranks", ranks)
    assert "equal: all 3 tensors" in answered("diff", f"{kept}@30", tmp_path / "again")
    (one,) = list_checkpoints(tmp_path / "again")
    shards = [name for name in one.manifest.files if name.startswith("shard-")]
    assert 1 <= len(shards) <= ranks
    assert len(shards) == min(ranks, 3)
    template = {"model": {"w": torch.zeros(6, 4)}, "optimizer": {"lr": 0.0}}
    assert load(one, template).rank_state == {"seed": 3}
    assert template["optimizer"]["lr"] == 0.1
    assert torch.equal(template["model"]["w"], snapshot(30, 3.0).tensors["model"]["w"])


def test_prune_keeps_the_newest_the_best_and_every_mth(kept):
    assert "would remove" in answered("prune", kept, "--keep-last", 1, "--dry-run")
    assert steps(kept) == [10, 20, 30, 40]
    answered("prune", kept, "--keep-last", 1, "--keep-every", 30)
    assert steps(kept) == [20, 30, 40]
    shown = read_json("prune", kept, "--keep-last", 1)
    assert [path[-2:] for path in shown["removed"]] == ["30"]
    assert steps(kept) == [20, 40]


def test_prune_never_removes_the_only_complete_one(kept):
    for step in (20, 30, 40):
        next((kept / f"step-000000{step}").glob("rank-*")).unlink()
    answered("prune", kept, "--keep-last", 1)
    assert 10 in steps(kept)


def test_prune_refuses_while_a_run_saves_there(kept):
    lock = RunLock(kept, "run-a")
    try:
        answer = phalanx("ckpt", "prune", kept, "--keep-last", 1)
    finally:
        lock.release()
    assert answer.code == 2
    assert "is in use by run_a" in answer.err
    assert steps(kept) == [10, 20, 30, 40]
    assert phalanx("ckpt", "prune", kept, "--keep-last", 0).code == 2


def test_cp_copies_verifies_and_continues(kept, tmp_path):
    assert "copied" in answered("cp", f"{kept}@20", tmp_path / "copy")
    assert read_json("ls", tmp_path / "copy")[0]["best"]["value"] == 0.25
    assert "is complete already" in answered("cp", f"{kept}@20", tmp_path / "copy")
    answered("cp", kept, tmp_path / "copy", "--all")
    assert steps(tmp_path / "copy") == [10, 20, 30, 40]
    name = flip(kept / "step-00000040")
    answer = phalanx("ckpt", "cp", kept, tmp_path / "third")
    assert (answer.code, steps(tmp_path / "third")) == (1, [])
    assert f"{name} does not match its hash" in answer.err


def test_cp_can_be_repeated_wherever_it_was_killed(kept, tmp_path):
    left = tmp_path / "copy" / ".copying-step-00000040"
    shutil.copytree(kept / "step-00000040", left)  # all but the last step, the rename
    (left / "shard-00007.safetensors").touch()  # of a checkpoint that had the name before
    answered("cp", kept, tmp_path / "copy")
    names = sorted(path.name for path in (tmp_path / "copy" / "step-00000040").iterdir())
    assert names == sorted(path.name for path in (kept / "step-00000040").iterdir())
    assert "is complete already" in answered("cp", kept, tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["step-00000040"]


def test_prune_removes_chunks_that_no_checkpoint_uses(tmp_path):
    directory = tmp_path / "kept"
    for run_id in ("gone", "here"):
        save(directory, snapshot(10, len(run_id)), run_id=run_id, kind="incremental")
    shutil.rmtree(directory / "step-00000010")
    (directory / ".copying-step-00000020").mkdir()
    assert ".copying-step-00000020 may use them" in answered("prune", directory, "--keep-last", 1)
    (directory / ".copying-step-00000020").rmdir()
    answered("prune", directory, "--keep-last", 1)
    assert [path.name for path in directory.glob(".*")] == [".chunks-here"]
    assert phalanx("ckpt", "check", directory).code == 0


def test_mistakes_are_answered_with_what_to_write(kept, tmp_path):
    def refused(*words: object) -> str:
        answer = phalanx("ckpt", *words)
        assert answer.code == 2, answer.text
        return answer.err

    assert "Did you mean 'inspect'?" in refused("inspct", kept)
    assert "unknown action 'verify' of phalanx ckpt" in refused("verify", kept)
    assert "ckpt needs an action" in refused()
    assert f"Did you mean {kept}?" in refused("ls", tmp_path / "kep")
    assert "there is no run 'nothing'" in refused("ls", "nothing")
    assert "has no checkpoint '50'; it has those of step 40, 30, 20, 10" in refused("inspect", f"{kept}@50")
    assert "unknown protocol 's4'. Did you mean s3://?" in refused("ls", "s4://bucket/x")
    assert "is one checkpoint" in refused("ls", kept / "step-00000010")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").touch()
    (tmp_path / "hf" / "model.safetensors").touch()
    assert "it looks like a Hugging Face model directory" in refused("inspect", tmp_path / "hf")
    assert "it looks like a single file, as torch.save writes it" in refused_file(tmp_path)
    assert "is in" in refused("cp", kept, kept)
    newer = kept / "step-00000040" / "manifest.json"
    newer.write_text(re.sub(r'"format": \d+', '"format": 99', newer.read_text()))
    assert "has format 99; this Phalanx reads up to" in refused("inspect", kept / "step-00000040")


def refused_file(folder) -> str:
    torch.save({}, folder / "weights.pt")
    answer = phalanx("ckpt", "check", folder / "weights.pt")
    assert answer.code == 2
    return answer.err


def test_a_damaged_one_ends_with_one(kept):
    shutil.rmtree(kept / "step-00000010")
    (kept / "step-00000010").mkdir()
    answer = phalanx("ckpt", "inspect", kept / "step-00000010")
    assert answer.code == 1
    assert "has no manifest.json" in answer.err


def test_help_and_completion_know_the_actions_and_import_no_torch():
    code = "import sys; from phalanx.cli import main\ntry: main(['ckpt', 'diff', '--help'])\n"
    code += "finally: assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "--only ENTRY" in done.stdout
    assert set(completions("phalanx ckpt ")) == set(CKPT_ACTIONS)
    assert "--tensors" in completions("phalanx ckpt inspect --")
