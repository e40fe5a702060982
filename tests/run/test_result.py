"""A result from the ranks: complete, without weights that were too large to be sent, or lost."""

from __future__ import annotations

import pytest
import torch

from phalanx.errors import UsageError
from phalanx.observe.history import History
from phalanx.run.result import RESULT_NAME, WEIGHTS_NAME, JobResult, read_result, write_result


def trained() -> JobResult:
    return JobResult(history=History(), weights={"bias": torch.ones(2)}, optimizers=[{"state": {}}])


def test_a_result_comes_back_whole(tmp_path, capsys):
    write_result(trained(), tmp_path)
    result = read_result(tmp_path)
    assert result.history == History()
    assert torch.equal(result.weights["bias"], torch.ones(2))
    assert result.optimizers == [{"state": {}}]
    assert capsys.readouterr().err == ""


def test_a_history_comes_back_without_its_weights_and_says_so(tmp_path, capsys):
    write_result(trained(), tmp_path)
    (tmp_path / WEIGHTS_NAME).unlink()
    result = read_result(tmp_path)
    assert result.history == History()
    assert result.weights is None
    assert "the trained weights did not come back" in capsys.readouterr().err


def test_metrics_have_no_weights_to_miss(tmp_path, capsys):
    write_result(JobResult(metrics={"loss": 0.5}), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [RESULT_NAME]
    assert read_result(tmp_path).metrics == {"loss": 0.5}
    assert capsys.readouterr().err == ""


def test_a_result_that_did_not_come_back_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="result did not come back"):
        read_result(tmp_path)


def test_a_machine_whose_ranks_were_all_scaled_away_ends_well(tmp_path, capsys):
    result = read_result(tmp_path, may_have_none=True)
    assert (result.history.status, result.weights) == ("finished", None)
    assert "this one had no rank left" in result.history.reason
    assert "the model here is as it was before" in capsys.readouterr().err
