"""Every part of a run's state survives lost ranks: with the user's own objects, each is what it is in a quiet run."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, Sampler
from waiting import LIMIT_SECONDS, until

import phalanx
from phalanx import checkpoint
from phalanx.checkpoint import read_manifest
from phalanx.errors import DataError, ReplicaError

EPOCHS, STEPS = 4, 32


class Rows(Dataset):
    def __init__(self, count: int = 64) -> None:
        self.x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        return self.x[index], self.x[index].sum(0, keepdim=True)


class OwnNumbers(Sampler):
    """Shuffles with a NumPy generator of its own, which every draw advances."""

    def __init__(self, count: int) -> None:
        self.count, self.generator = count, np.random.default_rng(7)

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        return iter(self.generator.permutation(self.count).tolist())


class Decay(phalanx.Callback):
    """Raises weight_decay by what it has counted, which only its state knows."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, trainer, info) -> None:
        self.steps += 1
        for group in trainer.optimizer.param_groups:
            group["weight_decay"] = 1e-3 * self.steps

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state) -> None:
        self.steps = state["steps"]


class Kill(phalanx.Callback):
    """Kills ranks at steps, each once."""

    def __init__(self, folder: Path, faults) -> None:
        self.folder, self.faults = folder, faults

    def on_step_end(self, trainer, info) -> None:
        for rank, step in self.faults:
            mark = self.folder / f"killed-{rank}-{step}"
            if (trainer.formation.rank, info.step) == (rank, step) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)


def make_model(*, buffers: bool) -> nn.Module:
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(16) if buffers else nn.LayerNorm(16)
    return nn.Sequential(nn.Linear(8, 16), norm, nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))


def fit(folder: Path, faults, *, buffers: bool = False, **settings):
    """Train with an optimizer, a scheduler, a sampler and a callback that have state; return all that came of it."""
    folder.mkdir()
    model = make_model(buffers=buffers)
    groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[1:].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    scheduler = settings.pop("scheduler", lambda optimizer: StepLR(optimizer, 6, gamma=0.7))(optimizer)
    chosen = {"ema_decay": 0.9, "keep_best": "val/loss", "early_stopping": "val/loss", "patience": 50, **settings}
    trainer = phalanx.PyTorchDDPTrainer(
        model,
        optimizer,
        scheduler=scheduler,
        scheduler_interval="step",
        loss_fn="mse",
        num_workers=2,
        device="cpu",
        batch_size=4,
        epochs=EPOCHS,
        log_every_n_steps=1,
        gradient_clipping=1.0,
        max_restarts=5,
        progress=False,
        run_dir=str(folder / "run"),
        callbacks=[Decay(), Kill(folder, faults)],
        **chosen,
    )
    rows = Rows()
    history = trainer.fit(DataLoader(rows, batch_size=4, sampler=OwnNumbers(len(rows))), Rows(16))
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "recovered" for event in events) == len(faults)
    assert [event["lost_steps"] for event in events if event["event"] == "recovered"] == [0] * len(faults)
    last = read_manifest(Path(history.checkpoint))
    return SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler, history=history, saved=last)


FAULTS = {"buffers": [(1, 10), (1, 32)], "no buffers": [(0, 10), (1, 21), (0, 32)]}
"""Statistics of BatchNorm are those of rank 0's batches: with rank 0 its last batch is lost."""


@pytest.fixture(scope="module", params=FAULTS)
def runs(request, tmp_path_factory, fork_server):
    folder, buffers = tmp_path_factory.mktemp("runs"), request.param == "buffers"
    return [fit(folder / name, faults, buffers=buffers) for name, faults in (("q", []), ("h", FAULTS[request.param]))]


def momentum(run):
    return [state["momentum_buffer"] for state in run.optimizer.state.values()]


def trained_weights(run):
    """The weights that are trained: those of the model are averaged."""
    saved = checkpoint.choose(run.history.checkpoint).checkpoint
    infos = checkpoint.stored_tensors(saved)
    state = {
        name.removeprefix("trained."): torch.empty(info.shape, dtype=getattr(torch, info.dtype))
        for name, info in infos.items()
        if name.startswith("trained.")
    }
    assert state, "an averaged run saves both"
    checkpoint.read_tensors(saved, {"trained": state})
    return state


FIELDS = {
    "averaged weights and buffers": lambda run: run.model.state_dict(),
    "trained weights": trained_weights,
    "optimizer state": momentum,
    "optimizer settings": lambda run: [(group["lr"], group["weight_decay"]) for group in run.optimizer.param_groups],
    "schedule": lambda run: (run.scheduler.last_epoch, run.scheduler.get_last_lr()),
    "learning rates by step": lambda run: {step["step"]: step["learning_rate"] for step in run.history.steps},
    "data order and dropout": lambda run: {step["step"]: step["loss"] for step in run.history.steps},
    "data position": lambda run: run.saved.shared["prepared"]["loaders"],
    "evaluations": lambda run: [(epoch.epoch, epoch.step, epoch.val) for epoch in run.history.epochs],
    "best": lambda run: (run.history.best_value, run.history.best_step, Path(run.history.best_checkpoint).name),
    "early stopping": lambda run: run.saved.shared["values"]["watched"]["stopping"],
    "callbacks": lambda run: run.saved.shared["values"]["callbacks"],
    "end": lambda run: (run.history.status, run.history.reason, run.saved.shared["values"]["ending"]),
}


def plain(value):
    """Return tensors as numbers, which are compared to the last bit."""
    return tree_map_only(torch.Tensor, torch.Tensor.tolist, value)


@pytest.mark.parametrize("field", FIELDS)
def test_each_part_of_the_state_survives(runs, field):
    quiet, hit = (FIELDS[field](run) for run in runs)
    assert plain(hit) == plain(quiet)


def test_a_schedule_of_the_config_survives_with_the_users_optimizer(tmp_path, fork_server):
    settings = {"scheduler": lambda optimizer: None, "lr_schedule": "cosine", "warmup": 4, "lr_scaling": "linear"}
    quiet, hit = fit(tmp_path / "quiet", [], **settings), fit(tmp_path / "hit", [(0, 9), (1, 17)], **settings)
    for name in ("learning rates by step", "averaged weights and buffers", "optimizer settings"):
        assert plain(FIELDS[name](hit)) == plain(FIELDS[name](quiet))
    assert [group["lr"] for group in hit.optimizer.param_groups] == [0.02, 0.05], "the next fit begins with them"


class KillWhen(phalanx.Callback):
    """Kills a rank once, in one of the moments of a callback, or in the evaluation after a step."""

    def __init__(self, folder: Path, moment: str, step: int, rank: int = 1) -> None:
        self.mark, self.moment, self.step, self.rank = folder / "killed", moment, step, rank
        self.waits_for: Path | None = None

    def _kill(self, trainer, moment: str) -> None:
        here = (moment, trainer.step, trainer.formation.rank)
        if here != (self.moment, self.step, self.rank) or self.mark.exists():
            return
        self.mark.touch()
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.waits_for is not None and not self.waits_for.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, trainer, info) -> None:
        self._kill(trainer, "step")
        if self.moment == "evaluation":
            trainer.model.register_forward_pre_hook(lambda *_: self._in_forward(trainer))

    def _in_forward(self, trainer) -> None:
        if not trainer.model.training:
            self._kill(trainer, "evaluation")

    def on_fit_end(self, trainer) -> None:
        self._kill(trainer, "end")


def small_fit(folder: Path, moment: str | None = None, step: int = 0, rank: int = 1, **settings):
    folder.mkdir(exist_ok=True)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    defaults = {"loss_fn": "mse", "num_workers": 2, "device": "cpu", "batch_size": 4, "epochs": 2, "max_restarts": 3}
    defaults["callbacks"] = [] if moment is None else [KillWhen(folder, moment, step, rank)]
    trainer = phalanx.PyTorchDDPTrainer(model, progress=False, run_dir=str(folder / "run"), **{**defaults, **settings})
    history = trainer.fit(Rows(), Rows(16))
    assert moment is None or (folder / "killed").exists()
    return model.state_dict(), history, folder / "run"


def own_step(step, batch):
    x, y = batch
    loss = nn.functional.mse_loss(step.model.net(x), y)
    step.backward(loss)
    step.optimizers["net"].step()
    step.optimizers["net"].zero_grad()
    return loss


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "auto"},
        {"strategy": "auto", "gradient_accumulation_steps": 2, "batch_size": 2},
        {"strategy": "ddp"},
        {"strategy": "fsdp"},
        {"strategy": "ddp", "training_step": own_step},
    ],
    ids=lambda settings: "-".join(str(getattr(value, "__name__", value)) for value in settings.values()),
)
def test_the_losses_of_a_lost_rank_that_were_not_read_are_reported(tmp_path, settings, fork_server):
    """They are read at steps 1, 2, 3, 5 and 8 and where a report is due: the lost rank had a part of 9, 10 and 11."""
    found = []
    for name, kills in (("quiet", []), ("hit", [(1, 11), (0, 13)])):
        (tmp_path / name).mkdir()
        torch.manual_seed(3)
        model = Net()
        trainer = phalanx.Trainer(
            model,
            optimizer={"net": torch.optim.SGD(model.net.parameters(), 0.05)} if "training_step" in settings else "sgd",
            num_workers=2, device="cpu", epochs=2, max_restarts=3, log_every_n_steps=12, progress=False,
            run_dir=str(tmp_path / name / "run"), callbacks=[Kill(tmp_path / name, kills)],
            **({} if "training_step" in settings else {"loss_fn": "mse", "learning_rate": 0.05}),
            **{"batch_size": 4, **settings},
        )  # fmt: skip
        history = trainer.fit(Rows())
        assert kinds(tmp_path / name / "run").count("recovered") == len(kills)
        steps = {step["step"]: step["loss"] for step in history.steps}
        reports = () if settings["strategy"] == "fsdp" else (1, 12)  # which goes on after step 10, and reports 11
        found.append([*(epoch.train_loss for epoch in history.epochs), *(steps[step] for step in reports)])
    quiet, hit = found
    assert hit == pytest.approx(quiet, rel=1e-6)


def kinds(run: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("moment", "rank"), [("evaluation", 1), ("end", 1), ("end", 0)])
def test_a_rank_that_is_lost_after_the_last_step_costs_nothing(tmp_path, moment, rank, fork_server):
    quiet, straight, _ = small_fit(tmp_path / "quiet", ema_decay=0.5)
    hit, history, run = small_fit(tmp_path / "hit", moment, 16, rank, ema_decay=0.5)
    assert plain(hit) == plain(quiet)
    assert [(epoch.step, epoch.val) for epoch in history.epochs] == [
        (epoch.step, epoch.val) for epoch in straight.epochs
    ]
    assert (history.status, history.reason) == ("finished", "")
    assert kinds(run).count("run_ended") == kinds(run).count("run_started") == 1


class LosesRankInTryOut(Rows):
    """Kills rank 1 once, when the validation data is tried out before the first step: no state is kept yet.

    Both ranks have joined then, and the launcher has heard of it: a loss before that restarts all.
    """

    def __init__(self, mark: Path) -> None:
        super().__init__(16)
        self.mark = mark

    def __getitem__(self, index: int):
        other = self.mark.with_name("rank-0-is-there")
        if os.environ["RANK"] == "0" and not other.exists():
            other.touch()
        if os.environ["RANK"] == "1" and not self.mark.exists():
            self.mark.touch()
            until(other.exists)
            time.sleep(1.0)  # the launcher reads what rank 0 has sent before
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class EndsEarly(phalanx.Callback):
    def on_step_end(self, trainer, info) -> None:
        if info.step == 5:
            trainer.request_stop("good enough")


def continued(folder: Path, checkpoint: str | None, *, lost_in_try_out: bool = False, lost_at: int = 0, **settings):
    """Train with AdamW and 2 ranks; a rank may be lost before a state of this run is kept."""
    folder.mkdir()
    mark = folder / "killed"
    if not lost_in_try_out and not lost_at:
        mark.touch()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    given = {"callbacks": [KillWhen(folder, "step", lost_at)] if lost_at else [], **settings}
    trainer = phalanx.PyTorchDDPTrainer(
        model, loss_fn="mse", optimizer="adamw", learning_rate=0.05, num_workers=2, device="cpu", batch_size=4,
        max_steps=12, max_restarts=3, progress=False, run_dir=str(folder / "run"),
        checkpoint_dir=str(folder / "kept"), resume_from_checkpoint=checkpoint or False, **given,
    )  # fmt: skip
    val = LosesRankInTryOut(mark if lost_in_try_out else folder)
    history = trainer.fit(Rows(), val)
    assert mark.exists()
    return SimpleNamespace(model=model, history=history, kinds=kinds(folder / "run"))


@pytest.fixture(scope="module")
def ended_early(tmp_path_factory, fork_server):
    """The checkpoint of a run that a callback has ended at step 5, trained without weight decay."""
    folder = tmp_path_factory.mktemp("earlier") / "run"
    history = continued(folder, None, weight_decay=0.0, callbacks=[EndsEarly()]).history
    assert (history.reason, history.epochs[-1].step) == ("good enough", 5)
    return history.checkpoint


@pytest.mark.parametrize(
    ("strategy", "lost"),
    [("ddp", {"lost_in_try_out": True}), ("fsdp", {"lost_at": 7})],
    ids=["ddp, before the first step", "fsdp, before a step is kept"],
)
def test_a_run_that_loses_a_rank_before_it_has_a_state_of_its_own_resumes_again(tmp_path, ended_early, strategy, lost):
    """The checkpoint is that of another run: neither its end nor its settings are those of this one."""
    quiet, hit = (
        continued(tmp_path / name, ended_early, strategy=strategy, weight_decay=1.0, **how)
        for name, how in (("quiet", {}), ("hit", lost))
    )
    assert (hit.history.status, hit.history.reason, hit.history.epochs[-1].step) == ("finished", "", 12)
    assert plain(hit.model.state_dict()) == plain(quiet.model.state_dict())
    assert hit.kinds.count("run_started") == (1 if strategy == "ddp" else 2), "each that begins is reported"


def test_a_run_that_loses_a_rank_before_its_start_is_reported_reports_it(tmp_path, fork_server):
    hit = continued(tmp_path / "hit", None, lost_in_try_out=True)
    assert hit.kinds.index("run_started") < hit.kinds.index("recovered")
    assert hit.kinds.count("run_started") == 1


def test_an_earlier_loss_is_not_restored_by_a_later_one(tmp_path, fork_server):
    """The state of the first loss is dropped after use; the second loss comes when the run has ended."""
    quiet, *_ = small_fit(tmp_path / "quiet")
    (tmp_path / "hit").mkdir()
    both = [KillWhen(tmp_path / "hit", "step", 5), KillWhen(tmp_path, "end", 16)]
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    trainer = phalanx.PyTorchDDPTrainer(
        model, loss_fn="mse", num_workers=2, device="cpu", batch_size=4, epochs=2, max_restarts=3, progress=False,
        run_dir=str(tmp_path / "run"), callbacks=both,
    )  # fmt: skip
    trainer.fit(Rows(), Rows(16))
    assert (tmp_path / "hit" / "killed").exists()
    assert (tmp_path / "killed").exists()
    assert plain(model.state_dict()) == plain(quiet)


def test_a_step_whose_weights_were_not_reduced_was_not_taken(tmp_path, fork_server):
    """Token weights are reduced in the step itself, after the gradients."""

    class DiesInStep(phalanx.Callback):
        def on_step_end(self, trainer, info) -> None:
            if trainer.formation.rank == 1 and info.step == 6 and not (tmp_path / "dead").exists():
                inner = trainer.formation.gradients.finish

                def finish() -> None:
                    (tmp_path / "dead").touch()
                    os.kill(os.getpid(), signal.SIGKILL)

                assert inner
                trainer.formation.gradients.finish = finish

    def fit_tokens(name: str, callbacks):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        labels = (rows.sum(1) > 0).long()
        trainer = phalanx.PyTorchDDPTrainer(
            model, loss_fn="cross_entropy", loss_weighting="tokens", num_workers=2, device="cpu", batch_size=4,
            epochs=2, max_restarts=3, progress=False, run_dir=str(tmp_path / name), callbacks=callbacks,
        )  # fmt: skip
        trainer.fit(torch.utils.data.TensorDataset(rows, labels))
        return model.state_dict()

    quiet, hit = fit_tokens("quiet", []), fit_tokens("hit", [DiesInStep()])
    assert (tmp_path / "dead").exists()
    assert plain(hit) == plain(quiet)


class Evaluates(KillWhen):
    """Evaluates after a step, in which a rank is lost."""

    def on_step_end(self, trainer, info) -> None:
        super().on_step_end(trainer, info)
        if info.step == self.step:
            trainer.evaluate()


class DiesBeforeTheReport(KillWhen):
    """Dies when the optimizer has taken its step, whose loss the ranks then reduce."""

    def on_fit_start(self, trainer) -> None:
        trainer.optimizer.register_step_post_hook(lambda *_: self._kill(trainer, "optimizer"))


@pytest.mark.parametrize(
    ("kind", "moment", "step"), [(Evaluates, "evaluation", 6), (DiesBeforeTheReport, "optimizer", 5)]
)
def test_callbacks_are_called_once_after_each_step_that_was_taken(tmp_path, kind, moment, step, fork_server):
    """Decay counts its calls: one more or less would change the weights."""
    settings = {"optimizer": "sgd", "log_every_n_steps": 1}
    quiet, *_ = small_fit(tmp_path / "quiet", callbacks=[Decay(), Decay()], **settings)
    (tmp_path / "hit").mkdir()
    hit, *_ = small_fit(
        tmp_path / "hit", callbacks=[Decay(), kind(tmp_path / "hit", moment, step), Decay()], **settings
    )
    assert (tmp_path / "hit" / "killed").exists()
    assert plain(hit) == plain(quiet)


class Grows(phalanx.Callback):
    """Changes the weights after each epoch: one call more or less would show."""

    def on_epoch_end(self, trainer, epoch, metrics) -> None:
        with torch.no_grad():
            trainer.task.model[0].weight.mul_(1.5)


class EvaluatesEpochs(KillWhen):
    """Evaluates after each epoch, in which a rank is lost once."""

    def on_step_end(self, trainer, info) -> None:
        pass

    def on_epoch_end(self, trainer, epoch, metrics) -> None:
        handle = trainer.model.register_forward_pre_hook(lambda *_: self._in_forward(trainer))
        trainer.evaluate()
        handle.remove()


@pytest.mark.parametrize("step", [8, 16], ids=["an epoch", "the last epoch"])
def test_callbacks_are_called_once_after_each_epoch(tmp_path, step, fork_server):
    settings = {"optimizer": "sgd", "epochs": 2 if step == 16 else 3}
    quiet, straight, _ = small_fit(tmp_path / "quiet", callbacks=[Grows(), Grows()], **settings)
    (tmp_path / "hit").mkdir()
    kill = EvaluatesEpochs(tmp_path / "hit", "evaluation", step)
    hit, history, _ = small_fit(tmp_path / "hit", callbacks=[Grows(), kill, Grows()], **settings)
    assert kill.mark.exists()
    assert [epoch.step for epoch in history.epochs] == [epoch.step for epoch in straight.epochs]
    assert plain(hit) == plain(quiet)


def test_the_best_checkpoint_that_was_in_flight_is_remembered(tmp_path, fork_server):
    """The loss comes a few steps after the best evaluation: its save is published, and not collected yet."""
    kill = KillWhen(tmp_path, "step", 10)
    kill.waits_for = tmp_path / "run" / "checkpoints" / "step-00000008"
    settings = {"epochs": 3, "keep_best": "max:val/error", "keep_last": 1, "learning_rate": 0.005}
    _, history, run = small_fit(tmp_path, callbacks=[kill], metrics={"error": error}, **settings)
    assert kill.mark.exists()
    assert history.best_step == 8
    assert [path.parent.name for path in run.glob("checkpoints/*/best.json")] == ["step-00000008"]


def error(output, target):
    return (output - target).abs().mean()  # falls while the model learns: the first evaluation has the highest


def test_sharded_ranks_keep_their_averaged_weights(tmp_path, fork_server):
    settings = {"strategy": "fsdp", "memory_frequency": 1, "ema_decay": 0.9, "threads_per_rank": 1}
    quiet, straight, _ = small_fit(tmp_path / "quiet", **settings)
    hit, history, run = small_fit(tmp_path / "hit", "step", 12, **settings)
    assert "recovered" in kinds(run)
    assert plain(hit) == plain(quiet)
    assert history.epochs[-1].val == straight.epochs[-1].val


def test_to_be_recoverable_changes_no_numbers(tmp_path, fork_server):
    """The memory of neighbours is asked at the start, too: an optimizer that it fills would count a step of Adam."""
    settings = {"strategy": "fsdp", "threads_per_rank": 1, "epochs": 1}
    plain_run, recoverable = (small_fit(tmp_path / str(n), max_restarts=n, **settings)[0] for n in (0, 3))
    assert plain(recoverable) == plain(plain_run)


def test_ranks_that_differ_after_a_change_end_the_run_and_say_in_what(tmp_path, fork_server):
    class OneRate(phalanx.Callback):
        """Sets a rate that a new rank does not know of."""

        def on_step_end(self, trainer, info) -> None:
            if info.step == 3:
                trainer.optimizer.param_groups[0]["momentum"] = 0.5
            if info.step == 7 and trainer.formation.rank == 1:
                trainer.optimizer.param_groups[0]["lr"] = 0.123

    tmp_path.joinpath("hit").mkdir()
    trainer = phalanx.PyTorchDDPTrainer(
        nn.Linear(8, 1), loss_fn="mse", optimizer="sgd", num_workers=2, device="cpu", batch_size=4, epochs=2,
        max_restarts=3, progress=False, run_dir=str(tmp_path / "run"),
        callbacks=[OneRate(), KillWhen(tmp_path / "hit", "step", 6)],
    )  # fmt: skip
    with pytest.raises(ReplicaError, match=r"different learning rates: rank 0 has \[0\.\d+\], rank 1 \[0\.123\]"):
        trainer.fit(Rows())


class Counts(OwnNumbers):
    """Draws by a counter, which a rank that is prepared again has raised."""

    drawn = 0

    def __iter__(self):
        self.drawn += 1
        return iter([(index * (2 * self.drawn + 1)) % self.count for index in range(self.count)])


def test_an_order_that_cannot_be_drawn_again_ends_the_run(tmp_path, fork_server):
    """A restart from the checkpoint of the last epoch would train in another order than a run without losses."""
    trainer = phalanx.PyTorchDDPTrainer(
        nn.Linear(8, 1), loss_fn="mse", num_workers=2, device="cpu", batch_size=4, epochs=3, max_restarts=3,
        progress=False, run_dir=str(tmp_path / "run"), callbacks=[KillWhen(tmp_path, "step", 12)],
    )  # fmt: skip
    with pytest.raises(DataError, match="Counts: epoch 2 was begun in another order"):
        trainer.fit(DataLoader(Rows(), batch_size=4, sampler=Counts(64)))


class Unfreezes(phalanx.Callback):
    """Unfreezes the first layer, once, in a group of its own: a rank that comes later never sees that step."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_end(self, trainer, info) -> None:
        if info.step == self.after:
            layer = trainer.formation.unwrap(trainer.model)[0].requires_grad_(True)
            trainer.optimizer.add_param_group({"params": layer.parameters(), "lr": 0.01})


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_layers_that_were_unfrozen_stay_so(tmp_path, strategy, fork_server):
    def train(name: str, *callbacks):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        model[0].requires_grad_(False)
        before = model[0].weight.clone()
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.05, momentum=0.9)
        trainer = phalanx.PyTorchDDPTrainer(
            model, optimizer, loss_fn="mse", num_workers=2, device="cpu", batch_size=4, epochs=2, max_restarts=3,
            strategy=strategy, lr_schedule="linear", progress=False, run_dir=str(tmp_path / name),
            callbacks=[Unfreezes(5), *callbacks],
        )  # fmt: skip
        trainer.fit(Rows())
        assert not torch.equal(model[0].weight, before)
        return model.state_dict()

    kill = KillWhen(tmp_path, "step", 9)
    quiet, hit = train("quiet"), train("hit", kill)
    assert kill.mark.exists()
    assert plain(hit) == plain(quiet)
