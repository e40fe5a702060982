"""The table of a search on Ray: its callback travels as Ray's own pickle, and finds the table again."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from phalanx.config import resolve
from phalanx.engines.ray.tune.table import show_callback, shown_on
from phalanx.engines.ray.tune.trial import ENDED, Work
from phalanx.tools.tune import choice
from phalanx.tools.tune.objective import Objective
from phalanx.tools.tune.space import SearchSpace
from phalanx.tools.tune.table import LiveTable, PlainTable
from phalanx.tools.tune.trainable import FunctionTrainable

pytest.importorskip("ray", reason="ray is not installed: pip install 'phalanx[ray]'")
LOSS = Objective("loss", "min")


def searched() -> Work:
    subject = FunctionTrainable(resolve({}), lambda config: config["x"], "loss")
    return Work(subject, SearchSpace({"x": choice([1, 2])}), LOSS, "/nowhere", ({"x": 1}, {"x": 2}))


def tell(callback, number: int) -> None:
    trial = SimpleNamespace(trial_id=f"abc_{number:05d}", config={"point": number}, last_result={ENDED: True})
    callback.on_trial_start(iteration=1, trials=[], trial=trial)
    callback.on_trial_result(iteration=1, trials=[], trial=trial, result={"iteration": 1, "loss": 0.5, "pid": 7})
    callback.on_trial_complete(iteration=1, trials=[], trial=trial)


def test_what_ray_pickles_finds_the_terminal_again():
    from ray import cloudpickle

    work, table = searched(), LiveTable(LOSS)
    try:
        with shown_on(table, work):
            tell(cloudpickle.loads(cloudpickle.dumps(show_callback(work))), 1)
        assert [(one.number, one.params, one.reports) for one in table._trials] == [(1, {"x": 2}, {1: {"loss": 0.5}})]
    finally:
        table.close(())


def test_each_search_writes_to_its_own_table(capsys):
    work, out = searched(), io.StringIO()
    callback = show_callback(work)
    with shown_on(PlainTable(LOSS, out), work):
        tell(callback, 0)
    first, second = out.getvalue().splitlines()
    assert first.endswith("trial 0 started: x 1")
    assert second.endswith("trial 0 finished at iteration 1, loss 0.5 [1 done, best 0.5 (trial 0)]")
    tell(show_callback(work), 1)
    assert "trial 1 finished at iteration 1, loss 0.5" in capsys.readouterr().out, "elsewhere: lines, and no error"
