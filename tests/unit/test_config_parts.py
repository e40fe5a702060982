"""Settings with parts (`engine_options`, `console`) and forms of text: every mistake at once, each with its origin."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from phalanx import DistributedConfig
from phalanx.config import resolve
from phalanx.errors import ConfigError


def problems(**given):
    with pytest.raises(ConfigError) as caught:
        DistributedConfig(**given)
    return caught.value.problems


def test_every_wrong_option_is_reported_at_once():
    found = problems(engine_options="stop_grace=-1,bucket_cap_mb=x,bogus=1,outer_momentum=0.5,min_delta=1")
    said = [
        "stop_grace = -1.0: must be greater than 0.",
        "bucket_cap_mb = 'x': expected a number.",
        "engine_options: backend = 'pytorch-ddp' has no option 'bogus'.",
        "min_delta = 1.0 without early_stopping",
        "outer_momentum = 0.5 with strategy = 'ddp', which does not follow it",
    ]
    assert len(found) == len(said)
    for expected, problem in zip(said, found, strict=True):
        assert problem.startswith(expected)


def test_an_option_that_an_engine_ignores_is_refused_as_an_argument():
    config = DistributedConfig(backend="tensorflow", bucket_cap_mb=5)
    assert "bucket_cap_mb = 5.0" in config.unused_note
    for given in ({"bucket_cap_mb": 5}, {"engine_options": {"bucket_cap_mb": 5}}):
        with pytest.raises(ConfigError, match=r"bucket_cap_mb = 5.0 with backend = 'tensorflow'"):
            config.refuse_unused(given)
    config.refuse_unused({"stop_grace": 5})


def test_a_mistake_names_the_source_of_its_part(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('console = "quit"\n[engine_options]\nstop_grace = -1\nkeep_every = 0\n')
    variables = {
        "PHALANX_MIN_DELTA": "-3",
        "PHALANX_ENGINE_OPTIONS": "bucket_cap_mb",
        "PHALANX_MLFLOW_TRACKING": "loud",
    }
    with pytest.raises(ConfigError) as caught:
        resolve({"keep_every": 5, "progress": False, "start_timeout": 0}, given_as="flag", file=file, environ=variables)
    origins = {problem.split()[0]: problem.rpartition(" (")[2] for problem in caught.value.problems}
    assert origins == {
        "console": f"file {file})",
        "stop_grace": f"file {file})",
        "min_delta": "environment PHALANX_MIN_DELTA)",
        "engine_options": "environment PHALANX_ENGINE_OPTIONS)",
        "mlflow_tracking": "environment PHALANX_MLFLOW_TRACKING)",
        "start_timeout": "flag)",
    }


@pytest.mark.parametrize("given", ["5", "GPU", "GPU=-1", "GPU=nan", "GPU=inf", "GPU=many", "=3"])
def test_resources_of_ray_are_checked_with_the_settings(given):
    options = f"resources{'=' if given == '5' else '.'}{given}"
    assert len(found := problems(backend="ray", engine_options=options)) == 1
    assert "write resources.GPU=0.5" in found[0] or "is not name=value" in found[0]
    assert DistributedConfig(backend="ray", engine_options={"resources": {"GPU": 0.5}}).engine_options


@pytest.mark.parametrize("given", ["::1", "http://h:9400", "a b:9400", "[h]:9400", "h:", "70000", 70000])
def test_a_port_has_a_host_that_can_be_one(given):
    assert len(found := problems(metrics_port=given)) == 1
    assert found[0].startswith(f"metrics_port = {given!r}: ")
    assert "9400" in found[0]


@pytest.mark.parametrize(
    ("given", "address"),
    [("[::1]:9400", ("::1", 9400)), ("node-1.lan:9", ("node-1.lan", 9)), (0, ("127.0.0.1", 0))],
)
def test_hosts_of_ports(given, address):
    assert DistributedConfig(metrics_port=given).metrics_address == address


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"engine_options": ["stop_grace=1"]}, "expected 'name=value,name=value', or a table {'name': value}"),
        ({"engine_options": 5}, "expected 'name=value,name=value'"),
        ({"engine_options": "stop_grace=1,stop_grace=2"}, "stop_grace is given twice"),
        ({"engine_options": "stop_grace=1,2"}, "'2' is not name=value, .* a comma separates options"),
        ({"engine_options": {"timeline": "a,b"}, "backend": "horovod"}, "timeline = 'a,b': a comma separates options"),
        ({"nvme_path": "/a,b"}, "nvme_path = '/a,b': nvme_path = '/a,b': a comma separates options"),
        ({"resources_per_worker": "GPU=1,GPU=2", "backend": "ray"}, "resources.GPU is given twice"),
        ({"checkpoint_frequency": [1]}, "expected a number of epochs .10., '500 steps', 'auto', or 'auto 12h'"),
        ({"console": 5}, "expected words of quiet, normal, verbose"),
        ({"console": ""}, "expected words of quiet, normal, verbose"),
        ({"mlflow": ""}, "the text is empty: give a value, or leave mlflow out"),
        ({"gpus_per_node": 2, "num_workers": "many"}, "num_workers = 'many': expected a whole number"),
        ({"gpus_per_node": 2, "num_workers": "1:4"}, "num_workers = 1:4 is not num_nodes x gpus_per_node = 1 x 2 = 2"),
        ({"tensorboard": False, "tensorboard_dir": "board"}, "tensorboard_dir = 'board' with tensorboard = False"),
        ({"mlflow_tracking": False, "mlflow_experiment": "mine"}, "mlflow_experiment = 'mine' with mlflow = False"),
    ],
)
def test_a_wrong_form_is_answered_with_the_right_one(given, said):
    assert len(found := problems(**given)) == 1
    assert re.search(said, found[0])


def test_a_malformed_value_has_no_further_mistakes():
    """The options that it would have had are not missed by rules, such as that of offload."""
    given = {"offload": "nvme", "strategy": "deepspeed", "zero_stage": 3, "engine_options": "nvme_path"}
    assert len(problems(**given)) == 1
    with pytest.raises(ConfigError, match="1 mistake:\n  - engine_options = 'nvme_path': "):
        resolve(given, environ={})


@pytest.mark.parametrize("empty", [{}, "", None])
def test_an_empty_table_of_options_clears_them(empty):
    config = DistributedConfig(stop_grace=2, keep_every=5)
    assert config.replace(engine_options=empty) == DistributedConfig()
    assert config.replace(engine_options={"stop_grace": 3}).options.keep_every == 5
    assert resolve({"engine_options": empty}, environ={"PHALANX_STOP_GRACE": "2"}).config == DistributedConfig()


def test_words_that_say_the_default_change_nothing():
    for given in ({"progress": True}, {"console": "normal"}, {"console": "progress rank-0"}):
        assert DistributedConfig(**given) == DistributedConfig()
    assert resolve({"progress": True}, environ={"PHALANX_CONSOLE": "plain"}).config == DistributedConfig()


def test_an_option_is_named_where_it_is_read_as_a_setting():
    config = DistributedConfig()
    with pytest.raises(AttributeError, match=r"no attribute 'stop_grace': write config.options.stop_grace"):
        _ = config.stop_grace
    with pytest.raises(AttributeError, match="no attribute 'bogus'"):
        _ = config.bogus
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
