"""The tf.distribute strategies by name, over the devices of this process."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from typing import Any

from phalanx.config import DistributedConfig
from phalanx.config.settings import precision_name
from phalanx.engines.tensorflow.tf_config import read_task
from phalanx.errors import UsageError


def make_strategy(config: DistributedConfig) -> Any:
    """Return the tf.distribute strategy that the config asks for; it must be made before anything else runs."""
    import tensorflow as tf

    if config.device == "cpu":
        _hide_gpus(tf)
    task = read_task()
    if task is None:
        return tf.distribute.MirroredStrategy(_devices(tf, config))
    return _strategy_of_cluster(task.to_json())


@functools.cache
def _strategy_of_cluster(task: str) -> Any:
    """Return the strategy of this process's task. Cached: a second one would reset connections in use."""
    import tensorflow as tf

    if "ps" not in json.loads(task)["cluster"]:
        return tf.distribute.MultiWorkerMirroredStrategy()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    return tf.distribute.ParameterServerStrategy(resolver)


def _hide_gpus(tf: Any) -> None:
    try:
        tf.config.set_visible_devices([], "GPU")
    except RuntimeError as error:  # TensorFlow has looked at its devices already
        if tf.config.get_visible_devices("GPU"):
            raise UsageError(
                f"device = 'cpu', but TensorFlow uses the GPU already ({error})",
                hint="Make the trainer before anything is computed, or set CUDA_VISIBLE_DEVICES=-1.",
            ) from error


def _devices(tf: Any, config: DistributedConfig) -> list[str]:
    """Return one device per replica: GPUs, or logical CPUs."""
    gpus = tf.config.list_logical_devices("GPU") if tf.config.list_physical_devices("GPU") else []
    wanted = config.total_ranks
    if gpus and config.device != "cpu":
        if wanted is not None and wanted > len(gpus):
            raise UsageError(
                f"{wanted} replicas were asked for, and TensorFlow sees {len(gpus)} GPU{'s' * (len(gpus) != 1)}",
                hint=f"Ask for at most {len(gpus)}, or run on the CPU with device='cpu'.",
            )
        return [f"GPU:{number}" for number in range(wanted or len(gpus))]
    return _logical_cpus(tf, wanted or 1)


def _logical_cpus(tf: Any, count: int) -> list[str]:
    cpu = tf.config.list_physical_devices("CPU")[0]
    if count > 1:
        with contextlib.suppress(RuntimeError):  # an earlier run may have made them already
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    have = len(tf.config.list_logical_devices("CPU"))
    if have < count:
        raise UsageError(
            f"{count} replicas on the CPU need {count} logical devices, and TensorFlow has made {have} already",
            hint="Call fit() before anything is computed with TensorFlow in this process, or write strategy = "
            "'multiworker': each replica is a process then.",
        )
    return [f"CPU:{number}" for number in range(count)]


def set_precision(config: DistributedConfig, keras: Any, device: str) -> None:
    """Set Keras' mixed precision, where it is asked for."""
    name = precision_name(config.mixed_precision, device)
    if name != "fp32":
        keras.mixed_precision.set_global_policy("mixed_float16" if name == "fp16" else "mixed_bfloat16")


def device_kind(config: DistributedConfig) -> str:
    """Return "cuda" or "cpu": the device of this process."""
    import tensorflow as tf

    if config.device == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") == "-1":
        return "cpu"
    return "cuda" if tf.config.list_physical_devices("GPU") else "cpu"
