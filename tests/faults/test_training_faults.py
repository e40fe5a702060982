"""Training that goes wrong: NaN, preemption, Ctrl-C and killed ranks end or go on as promised, with the right bits."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from command import Answer, end, finish, phalanx, start, write_script
from waiting import LIMIT_SECONDS

from phalanx.errors import EXIT_PREEMPTED

TRAIN = """
import os, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from phalanx import PyTorchDDPTrainer

torch.manual_seed(0)
x = torch.randn(40, 4)
y = (x.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2))
rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

{before}

def at_step(info):
{hook}

history = PyTorchDDPTrainer(model, batch_size=2, callbacks=[at_step], device="cpu", **dict({settings})).fit(
    DataLoader(TensorDataset(x, y), shuffle=True), checkpoint_dir="ckpt"
)
torch.save(model.state_dict(), f"weights-{{rank}}.pt")
"""


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)


def script(*, hook: str = "    pass", before: str = "", settings: str = "epochs=2") -> Path:
    return write_script(Path("train.py"), TRAIN.format(hook=hook, before=before, settings=settings))


def train(path: Path, *words: object) -> Answer:
    return phalanx("train", "--script", path, "--num-workers", 2, "--device", "cpu", *words)


def weights(rank: int = 0) -> dict[str, torch.Tensor]:
    return torch.load(f"weights-{rank}.pt")


def checkpoints() -> list[str]:
    return sorted(path.name for path in Path("ckpt").iterdir())


# --- NaN --------------------------------------------------------------------------------------------------------

SPOIL = """
def spoil(output, target):
    spoil.calls += 1
    loss = nn.functional.cross_entropy(output, target)
    return loss * float("nan") if spoil.calls == 7 and rank == 1 else loss
spoil.calls = 0
"""


def test_nan_stops_with_its_step_and_the_last_good_checkpoint():
    path = script(
        before=SPOIL, settings="epochs=2, loss_fn=spoil, checkpoint_frequency='5 steps', log_every_n_steps=10"
    )
    answer = train(path)
    assert answer.code == 1
    assert "the loss is nan at step 7" in answer.err
    assert f"the last good checkpoint is {Path('ckpt') / 'step-00000005'}" in answer.err
    assert checkpoints() == ["step-00000005"]


def test_nan_is_found_before_spoilt_weights_are_saved():
    """Step 8 is no logging step: the checkpoint itself must look at the losses first."""
    path = script(
        before=SPOIL, settings="epochs=2, loss_fn=spoil, checkpoint_frequency='4 steps', log_every_n_steps=1000"
    )
    answer = train(path)
    assert answer.code == 1
    assert "the loss is nan at step 7" in answer.err
    assert checkpoints() == ["step-00000004"]


def test_nan_steps_are_skipped_on_request():
    path = script(before=SPOIL, settings="epochs=2, loss_fn=spoil, on_nonfinite='skip'")
    answer = train(path)
    assert answer.code == 0, answer.text
    assert "1 step skipped so far" in answer.text
    first, second = weights(0), weights(1)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert all(value.isfinite().all() for value in first.values())


def test_a_skipped_step_leaves_the_epochs_loss_readable():
    path = script(before=SPOIL, settings="epochs=2, loss_fn=spoil, on_nonfinite='skip'")
    with path.open("a") as file:
        file.write("\nif rank == 0:\n    print('losses', [record.train_loss > 0 for record in history.epochs])\n")
    assert "losses [True, True]" in train(path).out


# --- preemption and Ctrl-C --------------------------------------------------------------------------------------

SLOW = "    time.sleep(0.05)"
PREEMPT = """
    if info.step == 7 and rank == 1 and not os.path.exists("told"):
        open("told", "w").close()
        os.kill(os.getpid(), signal.{name})
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_preempted_run_resumes_to_the_same_bits(name):
    plain = script(settings="epochs=2")
    assert train(plain).code == 0
    expected = weights()
    os.rename("ckpt", "ckpt-whole")

    told = script(hook=PREEMPT.format(name=name), settings="epochs=2")
    answer = train(told)
    assert answer.code == EXIT_PREEMPTED, answer.text
    assert f"stopped by {name} after step" in answer.err
    assert "--resume-from-checkpoint" in answer.err
    (stopped,) = checkpoints()
    assert f"checkpoint {Path('ckpt') / stopped}" in answer.err
    assert int(stopped.removeprefix("step-")) >= 7
    resumed = train(told, "--resume-from-checkpoint")
    assert resumed.code == 0, resumed.text
    torch.testing.assert_close(weights(), expected, rtol=0, atol=0)


def _wait_for(condition, process, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(finish(process, 1).text)
        time.sleep(0.02)


@pytest.fixture
def running(tmp_path):
    """The real command, two ranks, stepping slowly and for ever; killed afterwards if it still lives."""
    path = script(hook=SLOW + "\n    open('stepping', 'w').close()", settings="epochs=100_000")
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    process = start("train", "--script", path, "--num-workers", 2, "--device", "cpu", cwd=tmp_path)
    signal.signal(signal.SIGHUP, before)
    _wait_for(Path("stepping").exists, process)
    yield process
    if process.poll() is None:
        end(process)
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_command_answers_a_signal_with_a_checkpoint_and_75(running, number):
    running.send_signal(number)
    began = time.monotonic()
    answer = finish(running)
    assert time.monotonic() - began < LIMIT_SECONDS, "training goes on for many minutes"
    assert answer.code == EXIT_PREEMPTED, answer.text
    assert f"stopped by {number.name} after step" in answer.err
    assert len(checkpoints()) == 1


def test_ctrl_c_ends_the_command_with_130(running):
    running.send_signal(signal.SIGINT)
    began = time.monotonic()
    answer = finish(running)
    assert time.monotonic() - began < LIMIT_SECONDS, "training goes on for many minutes"
    assert answer.code == 130, answer.text
    assert "Traceback" not in answer.text
    assert len(checkpoints()) == 1


# --- killed ranks -----------------------------------------------------------------------------------------------

KILL = """
    if info.step == 8 and rank == 1 and attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_rank_is_restarted_and_ends_with_the_same_bits():
    assert train(script(settings="epochs=2, checkpoint_frequency='3 steps'")).code == 0
    expected = weights()
    for name in checkpoints():
        os.rename(Path("ckpt") / name, Path(f"before-{name}"))
    answer = train(script(hook=KILL, settings="epochs=2, checkpoint_frequency='3 steps'"), "--max-restarts", 1)
    assert answer.code == 0, answer.text
    assert "SIGKILL" in answer.text
    torch.testing.assert_close(weights(), expected, rtol=0, atol=0)
    torch.testing.assert_close(weights(1), expected, rtol=0, atol=0)


KILLED_AFTER_THE_SAVE = """
    if info.step == 12 and rank == 1 and attempt == 0:
        while not os.path.exists("run/checkpoints/step-00000010"):  # it is written in the background
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_restart_goes_on_from_a_checkpoint_that_nobody_asked_for():
    path = script(hook=KILLED_AFTER_THE_SAVE)
    path.write_text(path.read_text().replace(', checkpoint_dir="ckpt"', ""))
    answer = train(path, "--max-restarts", 1, "--run-dir", "run")
    assert answer.code == 0, answer.text
    assert f"checkpoints go to {Path('run/checkpoints')} once per epoch" in answer.text
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    assert [event["first_step"] for event in events if event["event"] == "run_started"] == [0, 10]


def test_a_killed_rank_without_restarts_is_named_with_its_step():
    answer = train(script(hook=KILL))
    assert answer.code != 0
    assert next(line for line in answer.err.splitlines() if line.startswith("phalanx: ")).startswith("phalanx: rank 1 ")
    assert "SIGKILL" in answer.err
    assert "at step 8" in answer.err
    assert "1 other rank stopped because of it." in answer.err


def test_only_the_last_checkpoints_are_kept():
    answer = train(script(settings="epochs=1, checkpoint_frequency='1 steps', keep_last=2"))
    assert answer.code == 0, answer.text
    assert checkpoints() == ["step-00000009", "step-00000010"]
