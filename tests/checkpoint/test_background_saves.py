"""Saves in the background hold the state at the call, lose no error, and show hooks published paths."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import phalanx
from phalanx.checkpoint import Request, Saver, Snapshot, choose, find_best, list_checkpoints, load, save
from phalanx.checkpoint.storage import Draft
from phalanx.errors import CheckpointError


def loaded_weights(directory, size: int = 4) -> list[float]:
    template = {"model": {"w": torch.zeros(size)}}
    load(choose(directory, required=True).checkpoint, template)
    return template["model"]["w"].tolist()


def test_the_state_may_change_as_soon_as_the_call_returns(tmp_path):
    saver, weights = Saver(), torch.ones(4)
    random = torch.tensor([1, 2])
    for step in (1, 2, 3):
        weights.fill_(step)
        random.fill_(step)
        saver.begin(
            Snapshot(step, 0, {"model": {"w": weights}}, {"r": random}), Request(directory=tmp_path, run_id="run")
        )
        weights.zero_()
        random.zero_()
        assert saver.in_flight
        saved = saver.finish()
        assert not saver.in_flight
        assert loaded_weights(tmp_path) == [step] * 4
        assert 0 < saved.stall <= saved.seconds + 0.1
    assert load(choose(tmp_path).checkpoint, {"model": {"w": weights}}).rank_state["r"].tolist() == [3, 3]
    saver.release()


def test_memory_and_plan_are_reused_until_the_shapes_change(tmp_path):
    saver = Saver()
    request = Request(directory=tmp_path, run_id="run")

    def saved(tensors) -> int:
        saver.begin(Snapshot(1, 0, {"model": tensors}), request)
        saver.finish()
        return saver._staging._bytes.data_ptr()

    first = saved({"w": torch.ones(4)})
    layout = saver._plan.layout
    assert saved({"w": torch.zeros(4)}) == first
    assert saver._plan.layout is layout
    saved({"w": torch.zeros(4), "new": torch.ones(100_000)})
    assert saver._plan.layout is not layout
    template = {"model": {"w": torch.ones(4), "new": torch.zeros(100_000)}}
    load(choose(tmp_path).checkpoint, template)
    assert template["model"]["new"].eq(1).all()
    saver.release()


def test_memory_that_was_made_ready_is_used(tmp_path):
    saver = Saver()
    saver.warm(1 << 20, pinned=False)
    saver.begin(Snapshot(1, 0, {"model": {"w": torch.full((4,), 5.0)}}), Request(directory=tmp_path, run_id="run"))
    assert saver._staging._bytes.numel() == 1 << 20
    saver.finish()
    assert loaded_weights(tmp_path) == [5.0] * 4
    saver.release()


def test_an_error_in_the_background_is_raised_by_finish_and_the_next_save_works(tmp_path):
    saver, request = Saver(), Request(directory=tmp_path, run_id="run")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        saver.begin(Snapshot(1, 0, {"model": {"w": torch.ones(100_000)}}), request)
        with pytest.raises(CheckpointError, match=r"rank 0 could not write .*shard-00000.safetensors: File too large"):
            saver.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert saver.finish() is None
    assert list(tmp_path.iterdir()) == []
    saver.begin(Snapshot(2, 0, {"model": {"w": torch.ones(100_000)}}), request)
    assert saver.finish().path.name == "step-00000002"
    saver.release()


def test_a_file_system_that_loses_data_is_noticed_before_the_old_one_is_removed(tmp_path, monkeypatch):
    save(tmp_path, Snapshot(1, 0, {"model": {"w": torch.ones(4)}}), run_id="run")
    real = Draft.publish

    def losing(self, manifest):
        name = real(self, manifest)
        (self.path.parent / name / "shard-00000.safetensors").write_bytes(b"")
        return name

    monkeypatch.setattr(Draft, "publish", losing)
    with pytest.raises(CheckpointError, match="do not have the sizes that were written"):
        save(tmp_path, Snapshot(2, 0, {"model": {"w": torch.ones(4)}}), run_id="run", keep_last=1)
    assert choose(tmp_path).checkpoint.step == 1


def finish_after_an_error_on_one_rank(directory: str) -> list[str]:
    saver, request = Saver(), Request(directory=Path(directory), run_id="run")
    rank = torch.distributed.get_rank()
    found = []
    for step, bad in ((1, True), (2, False)):
        state = {"where": Path("/")} if bad and rank == 1 else {}
        saver.begin(Snapshot(step, 0, {"model": {"w": torch.ones(4)}}, state), request)
        try:
            found.append(saver.finish().path.name)
        except CheckpointError as error:
            found.append(error.message)
    saver.release()
    return found


def test_state_that_cannot_be_stored_on_one_rank_fails_on_all(tmp_path, ranks):
    first, second = ranks(finish_after_an_error_on_one_rank, str(tmp_path), world_size=2)
    assert first == second
    assert first[0].startswith("rank_state['where'] is a pathlib.")
    assert first[1] == "step-00000002"


def test_damage_that_only_reading_finds_falls_back_to_an_intact_one(tmp_path):
    formation = phalanx.Formation(device="cpu")
    model = formation.prepare(nn.Linear(200, 100))
    with torch.no_grad():
        for step in (1, 2):
            model.weight.fill_(step)
            formation.gradients.steps = step
            formation.save(tmp_path)
    shard = tmp_path / "step-00000002" / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    formation.load(tmp_path)
    assert formation.step == 1
    assert model.weight.eq(1).all()
    assert any("does not match its hash" in note for note in formation.notes)
    shard = tmp_path / "step-00000001" / "shard-00000.safetensors"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is usable"):
        formation.load(tmp_path, required=False)  # half loaded: going on from here would be wrong
    formation.close()


def test_values_are_those_of_the_call_and_may_have_any_name(tmp_path):
    formation = phalanx.Formation(device="cpu")
    formation.prepare(nn.Linear(2, 1))
    losses = {"train": [1.0, 2.0]}
    given = {"scaler": {"mean": 0.5}, "schedulers": "x", "loaders": 4, "path": "raw.csv", "prepared": 1, "values": 2}
    formation.save_async(tmp_path, losses=losses, **given)
    losses["train"].append(3.0)
    losses["later"] = []
    formation.finish_save()
    assert formation.load(tmp_path) == {"losses": {"train": [1.0, 2.0]}, **given}
    formation.close()


class Watch(phalanx.Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []

    def on_checkpoint(self, trainer, path: str) -> None:
        self.seen.append((Path(path).name, Path(path, "manifest.json").is_file()))


def trained(tmp_path, watch: Watch, **settings):
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    trainer = phalanx.PyTorchDDPTrainer(
        model=nn.Linear(4, 2),
        loss_fn=nn.functional.cross_entropy,
        callbacks=[watch],
        checkpoint_dir=str(tmp_path / "kept"),
        run_dir=str(tmp_path / "run"),
        batch_size=8,
        **settings,
    )
    return trainer.fit(data, data)


@pytest.mark.parametrize("asynchronous", [True, False, "skip"])
def test_hooks_and_events_name_published_checkpoints(tmp_path, asynchronous):
    watch = Watch()
    settings = {"checkpoint_frequency": "3 steps", "keep_last": None, "keep_best": False, "max_steps": 24}
    history = trained(tmp_path, watch, async_checkpoint=asynchronous, **settings)
    names = [name for name, _ in watch.seen]
    assert all(published for _, published in watch.seen)
    if asynchronous != "skip":
        assert names == [f"step-{step:08d}" for step in range(3, 25, 3)]
    assert names[-1] == "step-00000024" == Path(history.checkpoint).name
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    saved = [event for event in events if event["event"] == "checkpoint"]
    assert [Path(event["path"]).name for event in saved] == names
    (ended,) = [event for event in events if event["event"] == "run_ended"]
    assert ended["checkpoint_stall"] == pytest.approx(sum(event["stall"] for event in saved))
    assert not list((tmp_path / "kept").glob(".writing-*"))


def test_a_slow_disk_makes_the_next_save_wait_or_be_left_out(tmp_path, monkeypatch):
    real = Draft.publish

    def slow(self, manifest):
        time.sleep(0.5)
        return real(self, manifest)

    monkeypatch.setattr(Draft, "publish", slow)
    settings = {"checkpoint_frequency": "1 steps", "keep_last": None, "keep_best": False, "max_steps": 4}
    watch = Watch()
    history = trained(tmp_path / "waits", watch, **settings)
    assert len(watch.seen) == 4
    assert history.checkpoint_stall > 1.5
    watch = Watch()
    trained(tmp_path / "skips", watch, async_checkpoint="skip", **settings)
    assert [name for name, _ in watch.seen] == ["step-00000001", "step-00000004"]


def test_the_best_checkpoint_is_marked_although_training_goes_on(tmp_path):
    watch = Watch()
    history = trained(tmp_path, watch, epochs=4, learning_rate=0.1, keep_last=1)
    best = find_best(tmp_path / "kept")
    assert str(best.path) == history.best_checkpoint
    assert best.step == history.best_step
    assert {one.step for one in list_checkpoints(tmp_path / "kept")} == {best.step, 32}
