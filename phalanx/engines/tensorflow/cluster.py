"""Before a rank imports TensorFlow: find its task in the cluster, write TF_CONFIG, or serve.

Ranks choose free ports themselves and exchange them through the launcher's store.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from phalanx.engines.tensorflow.tf_config import ROLES_VARIABLE, VARIABLE, Task, read_task, task_of, watch_peers
from phalanx.host.addresses import free_port, own_address
from phalanx.observe.sinks import announce
from phalanx.observe.trial_control import TrialControl
from phalanx.world.env import RankEnv, read_rank_env

if TYPE_CHECKING:
    import torch.distributed as dist


_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
_LEGACY = "TF_USE_LEGACY_KERAS"
_KERAS_2, _KERAS_3 = "tf_keras.api._v2.keras", "keras._tf_keras.keras"
"""The modules that `tf.keras` imports at its first use."""
_POLL = timedelta(seconds=3600 * 24 * 365)


def enter() -> None:
    """Join the cluster. A rank that serves others stays in this function until the chief has finished."""
    env = read_rank_env()
    assert env is not None, "the launcher started this process"
    roles = tuple(os.environ[ROLES_VARIABLE].split(","))
    os.environ.update(quiet_environment(os.environ))
    announce("joining", env.rank)
    if len(roles) > 1:
        store = _open_store(env)
        task = task_of(env.rank, roles, _exchange_addresses(env, store))
        os.environ[VARIABLE] = task.to_json()
        prepare_task(task)
        announce("joined", env.rank)
        if task.serves:
            _serve_until_done(task, store)
        if task.leads and "ps" in task.cluster:
            atexit.register(store.set, "done", "1")
    else:
        announce("joined", env.rank)
    _keep_to_own_gpu(env)


def enter_alone(start_timeout: float | None) -> None:
    """Join the cluster that TF_CONFIG names, where another program started this process."""
    task = read_task()
    os.environ.update(quiet_environment(os.environ))
    if task is None:
        return
    prepare_task(task)
    if task.serves:
        _start_server(task).join()
    watch_peers(task, start_timeout)


def open_store(task: Task | None) -> dist.Store | None:
    """Return the store through which the workers of a tuning trial agree; None where they need none.

    Only the Phalanx launcher has a store: ranks that mpirun started with their own TF_CONFIG have none.
    """
    env = read_rank_env()
    trains_alone = task is None or "ps" in task.cluster or sum(map(len, task.cluster.values())) == 1
    if env is None or not env.supervised or trains_alone or TrialControl.from_environment() is None:
        return None
    return _open_store(env)


def prepare_task(task: Task) -> None:
    """Choose the Keras whose `fit` runs on several nodes, where the user has not chosen one."""
    os.environ.update(legacy_environment(os.environ))
    if task.cluster.get("ps"):
        os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")  # else the chief gives up before a server listens


def legacy_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that makes `tf.keras` Keras 2, whose fit runs on several nodes; Keras 3's does not."""
    is_needed = _LEGACY not in environ and importlib.util.find_spec("tf_keras") is not None
    return {_LEGACY: "1"} if is_needed else {}


def import_environment(environ: Mapping[str, str], processes: int) -> dict[str, str]:
    """Return the variables that TensorFlow reads when it is imported."""
    variables = {name: value for name, value in _QUIET.items() if name not in environ}
    return variables | (legacy_environment(environ) if processes > 1 else {})


def tensorflow_modules(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the modules that a rank needs to build a model: TensorFlow, and the Keras behind `tf.keras`."""
    return ("tensorflow", _KERAS_2 if environ.get(_LEGACY) in ("1", "true", "True") else _KERAS_3)


def quiet_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that reduce TensorFlow's messages and set the rank's number of threads."""
    threads = environ.get("OMP_NUM_THREADS", "")
    variables = {**_QUIET, "TF_NUM_INTRAOP_THREADS": threads} if threads.isdecimal() else _QUIET
    return {name: value for name, value in variables.items() if name not in environ}


def _open_store(env: RankEnv) -> dist.Store:
    import torch.distributed as dist

    store = dist.TCPStore(env.master_addr, env.master_port, is_master=False, timeout=timedelta(seconds=600))
    return dist.PrefixStore(f"tensorflow/{env.attempt}", store)


def _exchange_addresses(env: RankEnv, store: dist.Store) -> list[str]:
    """Publish this rank's address; return those of all ranks."""
    host = own_address(env.master_addr, one_node=env.local_world_size == env.world_size)
    store.set(str(env.rank), f"{host}:{free_port(env.local_rank)}")
    return [store.get(str(rank)).decode() for rank in range(env.world_size)]


def _keep_to_own_gpu(env: RankEnv) -> None:
    """Let each of several ranks of a node see one GPU: TensorFlow takes all that it sees."""
    if env.local_world_size == 1:
        return
    gpus = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(env.local_rank)
    elif len(gpus) >= env.local_world_size:  # a scheduler's choice for all ranks; with fewer, ranks share them
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[env.local_rank]


def _serve_until_done(task: Task, store: dist.Store) -> None:
    """Run as a worker or parameter server; the launcher ends this process if the chief fails."""
    _start_server(task)
    store.wait(["done"], _POLL)
    sys.stdout.flush()
    os._exit(0)  # TensorFlow's server cannot be stopped


def _start_server(task: Task) -> Any:
    import tensorflow as tf

    return tf.distribute.Server(
        tf.train.ClusterSpec(dict(task.cluster)), job_name=task.role, task_index=task.index, protocol="grpc"
    )
