"""TF_CONFIG: the roles in a TensorFlow cluster, and what contradicts the settings. No TensorFlow is needed."""

from __future__ import annotations

import json
import os
import socket

import numpy as np
import pytest
import torch.distributed as dist

import phalanx
from phalanx import DistributedConfig
from phalanx.cli import main
from phalanx.config import resolve
from phalanx.engines.tensorflow import cluster as tf_cluster
from phalanx.engines.tensorflow.tf_config import check_against, read_task, role_names, roles_of, task_of
from phalanx.errors import ConfigError, UsageError
from phalanx.launch.forkserver.client import import_settings
from phalanx.launch.forkserver.preload import extra_modules
from phalanx.observe.trial_control import CONTROL, TrialControl
from phalanx.run.spec import engine_environment
from phalanx.world.env import RankEnv
from phalanx.world.mesh import plan_layout

TWO_WORKERS = {"worker": ["a:1", "b:2"]}
SERVED = {"chief": ["a:1"], "worker": ["a:2", "b:3"], "ps": ["c:4"]}


def environ(cluster, role, index):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})}


def test_what_is_written_is_read_back():
    roles = roles_of(DistributedConfig(backend="tensorflow", strategy="parameter-server", num_workers=2))
    assert roles == ("chief", "worker", "worker", "ps")
    assert role_names(roles) == ("chief", "worker 0", "worker 1", "ps 0")
    task = task_of(2, roles, ["a:1", "a:2", "b:3", "c:4"])
    assert read_task({"TF_CONFIG": task.to_json()}) == task
    assert (task.role, task.index, task.serves, task.leads) == ("worker", 1, True, False)
    assert task.cluster == SERVED


@pytest.mark.parametrize(("role", "index", "leads"), [("worker", 0, True), ("worker", 1, False)])
def test_the_first_worker_leads_where_there_is_no_chief(role, index, leads):
    task = read_task(environ(TWO_WORKERS, role, index))
    assert task.leads is leads
    assert not task.serves


@pytest.mark.parametrize("text", ["", "{}", '{"cluster": {}}'])
def test_a_single_process_has_no_task(text):
    assert read_task({"TF_CONFIG": text}) is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{", "is not JSON"),
        (json.dumps({"cluster": TWO_WORKERS}), '"cluster" and "task"'),
        (json.dumps({"cluster": {"boss": ["a:1"]}, "task": {"type": "boss", "index": 0}}), '"boss"'),
        (json.dumps({"cluster": TWO_WORKERS, "task": {"type": "ps", "index": 0}}), "has only worker"),
        (json.dumps({"cluster": TWO_WORKERS, "task": {"type": "worker", "index": 2}}), "has 2 of them"),
        (
            json.dumps({"cluster": {"chief": ["a:1", "b:2"]}, "task": {"type": "chief", "index": 0}}),
            "has 2 chiefs in its cluster; there can be one",
        ),
        (
            json.dumps({"cluster": {"worker": ["a:1"], "ps": ["b:2"]}, "task": {"type": "ps", "index": 0}}),
            "has ps in its cluster and no chief",
        ),
    ],
)
def test_wrong_values_are_refused(value, words):
    with pytest.raises(UsageError, match=words):
        read_task({"TF_CONFIG": value})


@pytest.mark.parametrize(
    ("cluster", "settings", "words"),
    [
        (TWO_WORKERS, {"num_workers": 3}, "has 2 workers, but num_workers = 3"),
        (TWO_WORKERS, {"strategy": "parameter-server"}, "has no ps"),
        (TWO_WORKERS, {"strategy": "mirrored"}, "strategy = 'mirrored' is one process"),
        (SERVED, {"strategy": "multiworker"}, "has 1 ps in its cluster, but strategy = 'multiworker'"),
        (SERVED, {"strategy": "parameter-server", "num_servers": 2}, "has 1 ps, but num_servers = 2"),
    ],
)
def test_a_cluster_that_contradicts_the_settings_is_refused(cluster, settings, words):
    task = read_task(environ(cluster, "worker", 0))
    with pytest.raises(UsageError, match=words):
        check_against(task, DistributedConfig(backend="tensorflow", **settings))


def test_a_number_of_servers_that_was_given_counts_even_where_it_is_the_default():
    task = read_task(environ({**SERVED, "ps": ["c:4", "d:5"]}, "worker", 0))
    config = DistributedConfig(backend="tensorflow", strategy="parameter-server", num_servers=1)
    check_against(task, config)
    with pytest.raises(UsageError, match="has 2 ps, but num_servers = 1 was given"):
        check_against(task, config, {"num_servers"})


def test_the_trainer_and_the_command_line_know_what_was_given(monkeypatch, capsys, tmp_path):
    cluster = {**SERVED, "ps": ["c:4", "d:5"]}
    monkeypatch.setenv("TF_CONFIG", environ(cluster, "worker", 0)["TF_CONFIG"])
    script = tmp_path / "train.py"
    script.write_text("")
    words = ["--backend", "tensorflow", "--strategy", "parameter-server", "--num-servers", "1"]
    assert main(["train", *words, "--script", str(script)]) == 2
    assert "has 2 ps, but num_servers = 1 was given" in capsys.readouterr().err
    data = (np.zeros((4, 2)), np.zeros(4))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)  # TensorFlow is not reached
    trainer = phalanx.TensorFlowDistributedTrainer(model_fn=lambda: None, strategy="parameter-server", num_servers=1)
    with pytest.raises(UsageError, match="has 2 ps, but num_servers = 1 was given"):
        trainer.fit(data)
    trainer = phalanx.TensorFlowDistributedTrainer(model_fn=lambda: None, strategy="parameter-server")
    with pytest.raises(UsageError, match="has 2 ps, but num_servers = 1 was given"):
        trainer.fit(data, num_servers=1)


def test_a_chief_without_servers_is_one_of_the_workers():
    task = read_task(environ({"chief": ["a:1"], "worker": ["b:2"]}, "chief", 0))
    check_against(task, DistributedConfig(backend="tensorflow", num_workers=2))


def test_the_command_line_compares_them_too(monkeypatch, capsys, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.setenv("TF_CONFIG", environ(TWO_WORKERS, "worker", 0)["TF_CONFIG"])
    assert main(["train", "--backend", "tensorflow", "--num-workers", "4", "--script", str(script)]) == 2
    assert "has 2 workers, but num_workers = 4 was given" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "seen"), [("", "1"), ("2,3", "3"), ("5", "5")])
def test_each_worker_of_a_machine_sees_one_gpu(given, seen, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    env = RankEnv(1, 1, 2, 2, 0, "127.0.0.1", 0, "phalanx")
    tf_cluster._keep_to_own_gpu(env)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_layouts():
    def ranks(**settings):
        return plan_layout(DistributedConfig(backend="tensorflow", **settings), 0)

    assert ranks(num_workers=2, strategy="mirrored").world_size == 1
    assert ranks(num_workers=2).labels == ("worker 0", "worker 1")
    assert ranks(num_workers=2, strategy="parameter-server", num_servers=2).world_size == 5
    with pytest.raises(UsageError, match="5 processes, which cannot be spread evenly over num_nodes = 2"):
        ranks(num_workers=2, strategy="parameter-server", num_servers=2, num_nodes=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"gradient_clipping": 1.0},
            r"write in model_fn, by your model's Keras: keras.optimizers.Adam\(\.\.\., global_clipnorm=1\.0\)",
        ),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4"),
        ({"lr_schedule": "cosine"}, "schedules.CosineDecay"),
        ({"warmup": 10}, r"warmup_steps=10\)"),
        ({"compile": True}, "jit_compile=True"),
        ({"keep_last": 1}, "which does not follow it: leave keep_last out"),
        ({"tensor_parallel": 2}, "which does not follow it"),
        ({"strategy": "fsdp"}, "which has 'mirrored', 'multiworker', 'parameter-server'"),
        ({"backend": "pytorch-ddp", "strategy": "multiworker"}, "write backend = 'tensorflow'"),
    ],
)
def test_settings_that_keras_does_not_follow_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        resolve({"backend": "tensorflow", **settings})


def test_a_config_that_backends_share_keeps_what_keras_does_not_follow_and_says_so():
    shared = DistributedConfig(gradient_clipping=1.0, gradient_accumulation_steps=4, communication_backend="nccl")
    config = shared.replace(backend="tensorflow")
    assert set(config.unused) == {"gradient_clipping", "gradient_accumulation_steps", "communication_backend"}
    assert config.unused_note.startswith("not used by backend = 'tensorflow': gradient_accumulation_steps = 4, ")
    assert "global_clipnorm=1.0" in config.unused_note
    assert shared.unused_note == ""
    with pytest.raises(ConfigError, match="tensor_parallel"):
        shared.replace(backend="tensorflow", tensor_parallel=2)


def test_horovod_needs_the_machines_only_where_it_starts_the_ranks():
    config = DistributedConfig(backend="horovod", num_nodes=2, num_workers=4)
    assert "not used by backend = 'horovod': num_nodes = 2" in config.unused_note
    with pytest.raises(UsageError, match="horovodrun must know the nodes"):
        plan_layout(config, 0)
    assert plan_layout(config.replace(hosts="a:2,b:2"), 0).num_nodes == 1
    with pytest.raises(ConfigError, match="Name the nodes instead"):
        resolve({"backend": "horovod", "num_nodes": 2, "num_workers": 4})


def test_recipes_are_torch_models(capsys):
    assert main(["train", "digits", "--backend", "tensorflow"]) == 2
    assert "is a torch model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "device", "imported"),
    [
        ({"backend": "tensorflow", "num_workers": 2}, "cpu", ("tensorflow", "tf_keras.api._v2.keras")),
        ({"backend": "tensorflow"}, "cpu", ("tensorflow", "keras._tf_keras.keras")),
        ({"backend": "tensorflow", "num_workers": 2}, "cuda", ()),
        ({"backend": "tensorflow", "mlflow_tracking": True}, "cuda", ("mlflow",)),
        ({"mlflow_experiment": "mine"}, "cpu", ("mlflow",)),
        ({}, "cpu", ()),
    ],
)
def test_what_ranks_need_is_imported_before_they_are_forked(settings, device, imported, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    environment = engine_environment(DistributedConfig(**settings), device)
    assert extra_modules(environment) == imported


def test_a_fork_server_with_another_keras_is_not_used():
    plain = {"TF_USE_LEGACY_KERAS": "1", "HOME": "/"}
    assert import_settings(plain) == {}, "torch does not read it"
    served = {**plain, "PHALANX_PRELOAD": "tensorflow"}
    assert import_settings(served) == {"TF_USE_LEGACY_KERAS": "1", "PHALANX_PRELOAD": "tensorflow"}


BY_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
BY_US = {"RANK": "0", "WORLD_SIZE": "2", "PHALANX_LOG_DIR": "logs"}


@pytest.mark.parametrize(
    ("started", "cluster", "gated", "opened"),
    [
        (BY_MPI, TWO_WORKERS, False, False),
        (BY_MPI, TWO_WORKERS, True, False),
        (BY_US, TWO_WORKERS, False, False),
        (BY_US, TWO_WORKERS, True, True),
        (BY_US, SERVED, True, False),
    ],
)
def test_only_workers_of_a_trial_of_the_local_launcher_need_a_store(started, cluster, gated, opened, monkeypatch):
    """No store listens for ranks that another launcher started."""
    tried = []
    monkeypatch.setattr(tf_cluster, "_open_store", tried.append)
    gate = {CONTROL: TrialControl("control.json").to_text()} if gated else {}
    for name, value in {**started, **gate}.items():
        monkeypatch.setenv(name, value)
    tf_cluster.open_store(read_task(environ(cluster, "worker", 0)))
    assert len(tried) == opened


class RoutedSocket(socket.socket):
    """On this machine the name "chief" maps to 127.0.1.1, as on Debian; the default route leaves by 10.0.0.5."""

    def connect(self, address):
        self.towards = address[0]

    def getsockname(self):
        return ("127.0.1.1" if self.towards == "chief" else "10.0.0.5", 1)


def test_the_chief_publishes_an_address_that_other_machines_reach(monkeypatch):
    monkeypatch.setattr(socket, "socket", RoutedSocket)
    env = RankEnv(0, 0, 2, 1, 0, "chief", 29500, started_by="phalanx")
    store = dist.HashStore()
    store.set("1", "10.0.0.6:15001")
    addresses = tf_cluster._exchange_addresses(env, store)
    assert [address.rpartition(":")[0] for address in addresses] == ["10.0.0.5", "10.0.0.6"]
