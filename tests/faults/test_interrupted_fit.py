"""Ctrl-C in `fit` of a script or notebook: the trained state is in the caller's model, and the exception says so."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from long_proofs import long_proof
from torch import nn
from torch.utils.data import TensorDataset

import phalanx
from phalanx import Callback, PyTorchDDPTrainer
from phalanx.errors import PhalanxError
from phalanx.run.stored import list_runs

torch.manual_seed(0)
INPUTS = torch.randn(64, 4)
DATA = TensorDataset(INPUTS, (INPUTS.sum(1) > 0).long())


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRESSED_IN", str(tmp_path))  # a worker of Ray has a folder of its own


class Presses(Callback):
    """Writes that a step was taken, so that the process with the trainer presses Ctrl-C; alone it is that process."""

    def __init__(self, times: int = 1) -> None:
        self.times = times

    def on_step_end(self, trainer, info) -> None:
        if info.step == 3 and trainer.formation.world_size == 1:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)
        if info.step == 3:
            (Path(os.environ["PRESSED_IN"]) / "step-3").touch()


def trainer_of(ranks: int, **settings) -> PyTorchDDPTrainer:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    settings = {"callbacks": [Presses()], **settings}
    return PyTorchDDPTrainer(
        model, optimizer, num_workers=ranks, batch_size=4, device="cpu", progress=False, **settings
    )


def press_after_step_3() -> None:
    while not Path("step-3").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def interrupted(trainer: PyTorchDDPTrainer, ranks: int) -> str:
    """Return the text of the exception that a fit without an end raises after Ctrl-C."""
    presser = threading.Thread(target=press_after_step_3, daemon=True)
    if ranks > 1:
        presser.start()
    with pytest.raises(KeyboardInterrupt) as stopped:
        trainer.fit(DATA, epochs=100_000)
    return str(stopped.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_trained_comes_back_and_training_goes_on(ranks, capfd):
    trainer = trainer_of(ranks, checkpoint_dir="kept")
    text = interrupted(trainer, ranks)
    saved = sorted(Path("kept").glob("step-*"))[-1]
    step = int(saved.name.split("-")[1])
    assert text.startswith(f"stopped by Ctrl-C after step {step}: checkpoint {saved}")
    assert text.endswith("the trained state is in the model and the optimizer")
    written = nn.Linear(4, 2)
    PyTorchDDPTrainer(written, device="cpu").load(saved)
    assert torch.equal(trainer.model.weight, written.weight), "the weights of the checkpoint at that step"
    states = trainer.optimizer.state
    assert [int(states[each]["step"]) for each in trainer.model.parameters()] == [step, step]
    assert trainer.history is not None
    assert trainer.history.status == "interrupted"
    assert [run.status for run in list_runs()] == ["interrupted"]
    assert capfd.readouterr().err.count("Training interrupted: stopped by Ctrl-C") == 1
    signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert signals == [signal.default_int_handler, signal.SIG_DFL]
    trainer.callbacks.clear()
    assert set(trainer.evaluate(DATA)) == {"accuracy", "loss"}
    assert trainer.fit(DATA, epochs=1).status == "finished"


@long_proof
@pytest.mark.parametrize(("kind", "needs"), [("HorovodTrainer", "horovod.torch"), ("RayTrainer", "ray")])
def test_what_was_trained_comes_back_from_other_engines(kind, needs, monkeypatch):
    for name in ("RAY_CLIENT_MODE", "PYTHONBREAKPOINT"):  # Ray sets them when it is imported
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    pytest.importorskip(needs)
    model = nn.Linear(4, 2)
    before, optimizer = model.weight.clone(), torch.optim.Adam(model.parameters(), lr=0.01)
    settings = {"num_workers": 2, "batch_size": 4, "device": "cpu", "progress": False}
    trainer = getattr(phalanx, kind)(model, optimizer=optimizer, callbacks=[Presses()], **settings)
    text = interrupted(trainer, 2)
    assert text.endswith("the trained state is in the model and the optimizer")
    assert not torch.equal(model.weight, before)
    assert len(optimizer.state) == 2
    assert [run.status for run in list_runs()] == ["interrupted"]


def test_the_text_says_that_no_checkpoint_was_saved():
    text = interrupted(trainer_of(1, callbacks=[Presses()]), 1)
    expected = "stopped by Ctrl-C after step 3: no checkpoint was saved, because no checkpoint_dir was set"
    assert text == f"{expected}; the trained state is in the model and the optimizer"


def test_a_second_ctrl_c_ends_one_rank_at_once():
    trainer = trainer_of(1, callbacks=[Presses(times=2)])
    assert interrupted(trainer, 1).startswith("stopped at once by a second Ctrl-C")
    assert [run.status for run in list_runs()] == ["interrupted"]


class Terminates(Callback):
    def on_step_end(self, trainer, info) -> None:
        if info.step == 3 and trainer.formation.is_main:
            os.kill(os.getpid(), signal.SIGTERM)


def test_one_line_says_what_a_fit_has_left_after_sigterm(capfd):
    trainer = trainer_of(1, callbacks=[Terminates()], checkpoint_dir="kept")
    with pytest.raises(SystemExit):
        trainer.fit(DATA, epochs=100_000)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("phalanx: stopped by SIGTERM")]
    assert (
        "stopped by SIGTERM after step 3: checkpoint kept/step-00000003; the trained state is in the model and" in line
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_line_says_what_a_fit_has_left_after_max_time(ranks, capfd):
    trainer = trainer_of(ranks, callbacks=[])
    step = trainer.fit(DATA, epochs=100_000, max_time=0.5).epochs[-1].step
    states = trainer.optimizer.state
    assert [int(states[each]["step"]) for each in trainer.model.parameters()] == [step, step]
    ended = f"max_time of 0.5 s reached after step {step}: no checkpoint was saved, because no checkpoint_dir was set; "
    assert ended + "the trained state is in the model and the optimizer" in capfd.readouterr().err


class Raises(Callback):
    def on_step_end(self, trainer, info) -> None:
        if info.step == 20:
            raise ValueError("of the user")


def test_an_error_on_one_rank_says_what_the_caller_has():
    trainer = trainer_of(1, callbacks=[Raises()], checkpoint_frequency="15 steps", async_checkpoint=False)
    with pytest.raises(ValueError, match="of the user") as failed:
        trainer.fit(DATA, epochs=5)
    (note,) = failed.value.__notes__
    assert note.startswith(
        "after step 20, the trained state is in the model and the optimizer, and the last checkpoint is "
    )
    assert note.endswith("step-00000015")
    assert int(trainer.optimizer.state[trainer.model.weight]["step"]) == 20


def test_an_error_of_all_ranks_gives_back_what_was_trained():
    trainer = trainer_of(2, callbacks=[Raises()])
    with pytest.raises(PhalanxError, match="of the user") as failed:
        trainer.fit(DATA, epochs=5)
    start = "after step 20, the trained state is in the model and the optimizer"
    assert failed.value.__notes__ == [f"{start}, and no checkpoint was saved"]
    assert int(trainer.optimizer.state[trainer.model.weight]["step"]) == 20
    assert trainer.history is not None
    assert trainer.history.status == "failed"


class RaisesAndBreaks(Raises):
    """Leaves weights that cannot be read any more, as those on a GPU after an error of a kernel."""

    def on_step_end(self, trainer, info) -> None:
        if info.step == 20:
            from phalanx.run import job

            def broken(*_, **__):
                raise RuntimeError("CUDA error: device-side assert triggered")

            job.whole_weights = broken
        super().on_step_end(trainer, info)


def test_weights_that_cannot_be_read_do_not_hide_the_first_error():
    trainer = trainer_of(2, callbacks=[RaisesAndBreaks()])
    before = trainer.model.weight.detach().clone()
    with pytest.raises(PhalanxError, match="raised ValueError: of the user") as failed:
        trainer.fit(DATA, epochs=5)
    assert failed.value.__notes__ == ["the model is as it was before fit, and no checkpoint was saved"]
    assert torch.equal(trainer.model.weight, before)


class RaisesOnOne(Raises):
    def on_step_end(self, trainer, info) -> None:
        if not trainer.formation.is_main:
            super().on_step_end(trainer, info)


def test_an_error_of_a_rank_without_the_main_one_says_what_the_caller_has():
    trainer = trainer_of(2, callbacks=[RaisesOnOne()], checkpoint_frequency="5 steps", strategy="fsdp")
    before = trainer.model.weight.detach().clone()
    with pytest.raises(PhalanxError, match="of the user") as failed:
        trainer.fit(DATA, epochs=5)
    (note,) = failed.value.__notes__
    assert note.startswith("the model is as it was before fit, and the last checkpoint is ")
    assert torch.equal(trainer.model.weight, before)
    trainer.load(note.split("'")[1])
    assert not torch.equal(trainer.model.weight, before)
