"""Trials on Ray without a Ray: stop requests before and after an actor is placed, and errors as causes."""

from __future__ import annotations

import signal
import sys
from types import SimpleNamespace

import pytest

from phalanx.config import resolve
from phalanx.engines.ray.tune import RayExecutor
from phalanx.errors import EXIT_PREEMPTED
from phalanx.host.processes import SignalInbox
from phalanx.tools.tune.executor import Ending, Slot, Slots, TrialStart
from phalanx.tools.tune.trainable import FunctionTrainable
from phalanx.tools.tune.trial import Trial


class FakeRay:
    """Answers as an actor would: placed or not, at its end after a stop request, with a result or an error."""

    class exceptions:
        RayActorError = type("RayActorError", (Exception,), {})
        RayTaskError = type("RayTaskError", (Exception,), {})

    def __init__(self, *, placed: bool = True, result: Ending | Exception | None = None) -> None:
        self.placed, self.result = placed, result
        self.posted: list[int] = []
        self.resources: dict[str, object] = {}
        self.killed = False

    def remote(self, kind: type) -> FakeRay:
        return SimpleNamespace(options=self.options)

    def options(self, **given: object) -> SimpleNamespace:
        self.resources = given
        method = {name: SimpleNamespace(remote=lambda *_, name=name: name) for name in ("ready", "run")}
        post = SimpleNamespace(remote=self.post)
        return SimpleNamespace(remote=lambda *_: SimpleNamespace(**method, post=post))

    def post(self, number: int) -> None:
        self.posted.append(number)
        self.result = Ending(EXIT_PREEMPTED)

    def wait(self, refs: list[str], timeout: float) -> tuple[list[str], list[str]]:
        done = self.placed if refs == ["ready"] else self.result is not None
        return (refs, []) if done else ([], refs)

    def get(self, ref: str) -> Ending:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def kill(self, actor: object) -> None:
        self.killed = True


def run(fake: FakeRay, monkeypatch, tmp_path, *numbers: signal.Signals) -> Ending:
    monkeypatch.setitem(sys.modules, "ray", fake)
    subject = FunctionTrainable(resolve({}), print, "loss")
    executor = RayExecutor(subject, Slots((Slot(0),), 1, ""), {"CPU": 2.0, "GPU": 0.5})
    with SignalInbox() as signals:
        for number in numbers:
            signals.post(number)
        ending = executor.run(TrialStart(Trial(0, {}, tmp_path), Slot(0), None, {}, signals))
    assert fake.killed
    return ending


def test_a_trial_reserves_the_resources_of_its_ranks(monkeypatch, tmp_path):
    fake = FakeRay(result=Ending(0))
    assert run(fake, monkeypatch, tmp_path) == Ending(0)
    assert (fake.resources["num_cpus"], fake.resources["num_gpus"]) == (2.0, 0.5)


def test_a_stop_request_reaches_the_trial_where_it_runs(monkeypatch, tmp_path):
    fake = FakeRay()
    assert run(fake, monkeypatch, tmp_path, signal.SIGTERM).stopped_on_request
    assert fake.posted == [signal.SIGTERM]


def test_a_trial_that_waits_for_resources_is_given_up_at_once(monkeypatch, tmp_path):
    fake = FakeRay(placed=False)
    assert run(fake, monkeypatch, tmp_path, signal.SIGTERM).stopped_on_request
    assert fake.posted == []


@pytest.mark.parametrize(
    ("kind", "text", "cause"),
    [
        ("RayActorError", "The actor died because its node has died.", "its worker was lost: its node was lost"),
        ("RayTaskError", "ray::run()\nModuleNotFoundError: No module named 'mine'", "No module named 'mine'"),
    ],
)
def test_an_error_of_ray_is_the_cause_of_the_failure(monkeypatch, tmp_path, kind, text, cause):
    fake = FakeRay(result=getattr(FakeRay.exceptions, kind)(text))
    assert cause in run(fake, monkeypatch, tmp_path).cause
