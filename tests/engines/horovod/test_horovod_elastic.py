"""What an elastic rank carries from one meeting of the ranks to the next: state, epochs, and the word to stop."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest
import torch

from phalanx.config import resolve
from phalanx.engines.horovod import elastic
from phalanx.errors import PreemptedError
from phalanx.loop.formation import Formation
from phalanx.loop.hooks import Callback
from phalanx.loop.task import TrainTask
from phalanx.loop.train_loop import TrainLoop
from phalanx.observe.sinks import EventStream

exceptions = pytest.importorskip("horovod.common.exceptions", reason="horovod is not installed: make horovod")


class Run:
    """A run of three epochs of four steps on one rank, of which Horovod is only asked what rank 0 says."""

    def __init__(self, folder, monkeypatch, after_step) -> None:
        self.answers: list[tuple[str | None, bool]] = []
        """What rank 0 says, where it is another process; else it is this one."""
        said = SimpleNamespace(broadcast_object=lambda own, **_: self.answers.pop(0) if self.answers else own)
        monkeypatch.setattr(elastic, "horovod", lambda: said)
        inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        self.config = resolve({"epochs": 3, "batch_size": 8, "device": "cpu", "num_workers": 1}).config
        self.ended: list[int] = []
        hooks = [lambda info: after_step(self, info.step), self._epoch_ends()]
        self.task = TrainTask(torch.nn.Linear(4, 1), data, None, torch.nn.functional.mse_loss, None, None, hooks, "run")
        self.survivor, self.folder = elastic.HorovodSurvivor(0), folder

    def _epoch_ends(self) -> Callback:
        ended = self.ended

        class Note(Callback):
            def on_epoch_end(self, trainer, epoch, metrics):
                ended.append(epoch)

        return Note()

    def meet(self):
        """Run until the ranks would meet again, or to the end."""
        with Formation(self.config) as formation:
            loop = TrainLoop(formation, self.task, EventStream(()), self.folder)
            return self.survivor.run(loop, self.folder)

    def change_hosts(self) -> None:
        self.survivor.note_host_change()

    def meet_again(self):
        self.survivor.attempt += 1
        self.survivor.hosts_changed = False
        return self.meet()


def test_a_change_of_machines_at_an_epochs_last_step_repeats_nothing(tmp_path, monkeypatch):
    def after_step(run, step):
        if step == 4:
            run.change_hosts()

    run = Run(tmp_path, monkeypatch, after_step)
    with pytest.raises(exceptions.HostsUpdatedInterrupt):
        run.meet()
    assert run.ended == [0]
    history = run.meet_again()
    assert run.ended == [0, 1, 2]
    assert [(epoch.epoch, epoch.step) for epoch in history.epochs] == [(1, 4), (2, 8), (3, 12)]


def test_an_epoch_end_in_which_a_rank_is_lost_is_reported_again_and_counts_once(tmp_path, monkeypatch):
    """What a callback was doing there with the other ranks is not done, so all of them begin it again."""
    run = Run(tmp_path, monkeypatch, lambda run, step: None)
    calls = []

    class Breaks(Callback):
        def on_epoch_end(self, trainer, epoch, metrics):
            calls.append(epoch)
            if len(calls) == 1:
                raise exceptions.HorovodInternalError("a peer was lost")

    run.task.callbacks.append(Breaks())
    with pytest.raises(exceptions.HorovodInternalError):
        run.meet()
    history = run.meet_again()
    assert calls == [0, 0, 1, 2]
    assert [(epoch.epoch, epoch.step) for epoch in history.epochs] == [(1, 4), (2, 8), (3, 12)]


def hosts_and_signal(run, step):
    if step == 6 and run.survivor.attempt == 0:
        run.change_hosts()
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_together_with_a_change_of_machines_ends_the_run_at_that_step(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch, hosts_and_signal)
    with pytest.raises(PreemptedError, match="stopped by SIGTERM after step 6"):
        run.meet()


def test_a_signal_that_rank_0_did_not_get_stops_the_run_after_the_rendezvous(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch, hosts_and_signal)
    run.answers = [(None, True)]
    with pytest.raises(exceptions.HostsUpdatedInterrupt):
        run.meet()
    with pytest.raises(PreemptedError, match="stopped by SIGTERM after step 7"):
        run.meet_again()


def test_a_signal_during_the_rendezvous_stops_the_run(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch, lambda run, step: None)
    before = signal.getsignal(signal.SIGTERM)
    with run.survivor.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(PreemptedError, match="stopped by SIGTERM after step 1"):
            run.meet()
    assert signal.getsignal(signal.SIGTERM) is before
