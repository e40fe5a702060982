"""Which engine a config selects, and which engines a rank finds itself under."""

from __future__ import annotations

import sys

import pytest

from phalanx.config import DistributedConfig
from phalanx.engine import ENGINES, VARIABLE, Engine, engine_name, engine_of, engines_here, find_engine
from phalanx.run.spec import engine_environment


@pytest.mark.parametrize(
    ("settings", "name"),
    [({}, ""), ({"strategy": "fsdp"}, ""), ({"backend": "ray"}, "ray"), ({"backend": "tensorflow"}, "tensorflow")],
)
def test_ranks_find_the_engine_that_the_config_selects(settings, name, monkeypatch):
    config = DistributedConfig(**settings)
    assert engine_name(config) == name
    assert engine_environment(config, "cpu").get(VARIABLE, "") == name
    monkeypatch.setenv(VARIABLE, name)
    for home in ENGINES.values():  # another test of this process may have imported an engine's package
        monkeypatch.delitem(sys.modules, home.script_imports, raising=False)
    assert engines_here() == ([engine_of(config)] if name else [])


def test_a_run_inside_a_rank_of_an_engine_is_not_one_of_that_engine(monkeypatch):
    monkeypatch.setenv(VARIABLE, "ray")
    assert engine_environment(DistributedConfig(), "cpu")[VARIABLE] == ""


def test_torch_has_the_engine_that_changes_nothing():
    assert type(find_engine("pytorch-ddp")) is Engine
    assert find_engine("pytorch-ddp").starter(DistributedConfig(), None) is None
