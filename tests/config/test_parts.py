"""Settings with parts (`console`) and forms of text: every mistake at once, each with its origin."""

from __future__ import annotations

import copy
import dataclasses
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
    found = problems(stop_grace=-1, bucket_cap_mb="x", bogus=1, outer_momentum=0.5, min_delta=1)
    said = [
        "unknown setting 'bogus'.",
        "stop_grace = -1: must be greater than 0.",
        "bucket_cap_mb = 'x': expected a number.",
        "min_delta = 1 without early_stopping",
        "outer_momentum = 0.5 with strategy = 'ddp', which does not follow it",
    ]
    assert len(found) == len(said)
    for expected, problem in zip(said, found, strict=True):
        assert problem.startswith(expected)


def test_an_option_that_an_engine_ignores_is_refused_as_an_argument():
    config = DistributedConfig(backend="tensorflow", bucket_cap_mb=5)
    assert "bucket_cap_mb = 5" in config.unused_note
    with pytest.raises(ConfigError, match=r"bucket_cap_mb = 5 with backend = 'tensorflow'"):
        config.refuse_unused({"bucket_cap_mb": 5})
    config.refuse_unused({"stop_grace": 5})


def test_a_mistake_names_the_source_of_its_part(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('verbosity = "quit"\n[advanced]\nstop_grace = -1\nkeep_every = 0\n')
    variables = {
        "PHALANX_MIN_DELTA": "-3",
        "PHALANX_BUCKET_CAP_MB": "large",
        "PHALANX_MLFLOW_TRACKING": "loud",
    }
    with pytest.raises(ConfigError) as caught:
        resolve({"keep_every": 5, "progress": False, "start_timeout": 0}, given_as="flag", file=file, environ=variables)
    origins = {problem.split()[0]: problem.rpartition(" (")[2] for problem in caught.value.problems}
    assert origins == {
        "verbosity": f"file {file})",
        "stop_grace": f"file {file})",
        "min_delta": "environment PHALANX_MIN_DELTA)",
        "bucket_cap_mb": "environment PHALANX_BUCKET_CAP_MB)",
        "mlflow_tracking": "environment PHALANX_MLFLOW_TRACKING)",
        "start_timeout": "flag)",
    }


@pytest.mark.parametrize("given", ["5", "GPU", "GPU=-1", "GPU=nan", "GPU=inf", "GPU=many", "=3"])
def test_resources_of_ray_are_checked_with_the_settings(given):
    assert len(found := problems(backend="ray", resources_per_worker=given)) == 1
    assert found[0].startswith(f"resources_per_worker = {given!r}: ")
    assert "write 'GPU=0.5,big_memory=1'" in found[0]
    config = DistributedConfig(backend="ray", resources_per_worker={"GPU": 0.5, "big": 1})
    assert config.to_dict()["resources_per_worker"] == "GPU=0.5,big=1"


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
        ({"nvme_path": "/a,b"}, "nvme_path = '/a,b' with strategy = 'ddp', .* write strategy = 'deepspeed'"),
        ({"resources_per_worker": "GPU=1,GPU=2", "backend": "ray"}, "GPU is given twice"),
        ({"resources_per_worker": {"GPU": 1}}, "with backend = 'pytorch-ddp', .* write backend = 'ray'"),
        ({"resources_per_worker": ["GPU"], "backend": "ray"}, "expected a table or text"),
        ({"checkpoint_frequency": [1]}, "expected a number of epochs .10., '500 steps', 'auto', or 'auto 12h'"),
        ({"verbosity": "quite"}, "verbosity = 'quite': not one of 'quiet', 'normal', 'verbose'. Did you mean 'quiet'"),
        ({"console_ranks": "al"}, "console_ranks = 'al': .* Did you mean 'all'"),
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


def test_a_config_is_frozen_plain_data_with_the_fields_of_engines():
    config = DistributedConfig(backend="horovod", adasum=True)
    assert dataclasses.asdict(config) == config.to_dict()
    assert dataclasses.asdict(config)["adasum"] is True
    assert repr(config) == "DistributedConfig(backend='horovod', adasum=True)"
    assert hash(config) == hash(config.replace()) != hash(DistributedConfig())
    for name in ("epochs", "adasum"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot assign to '{name}'"):
            setattr(config, name, 1)
    with pytest.raises(AttributeError, match="no attribute 'bogus'"):
        _ = config.bogus
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
