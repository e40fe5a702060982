"""The engine `tensorflow`: the processes of a TensorFlow cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

from phalanx.config import DistributedConfig
from phalanx.engine import Engine
from phalanx.engines.tensorflow.tf_config import ROLES_VARIABLE, check_against, read_task, role_names, roles_of
from phalanx.errors import UsageError
from phalanx.world.mesh import JobLayout, Mesh


class TensorFlow(Engine):
    """The processes of a TensorFlow cluster, started by the local launcher."""

    strategy = "tensorflow"
    prelude = "phalanx.engines.tensorflow.cluster:enter"

    def check_recipe(self, name: str) -> None:
        """Raise: the models of recipes are torch models."""
        raise UsageError(
            f"the recipe '{name}' is a torch model, and backend = 'tensorflow' trains Keras models",
            hint="Give it a script: phalanx train --backend tensorflow --script train.py",
        )

    def run_as_task(self, config: DistributedConfig, settings: Collection[str]) -> Callable[[], None] | None:
        """Join the cluster of TF_CONFIG, where a scheduler such as Kubeflow started this process as a task of it."""
        task = read_task()
        if task is None:
            return None
        check_against(task, config, settings)
        from phalanx.engines.tensorflow.cluster import enter_alone

        return lambda: enter_alone(config.start_timeout)

    def layout(self, config: DistributedConfig, device: str) -> JobLayout:
        """Return the processes of a TensorFlow cluster; TensorFlow itself chooses the devices of each."""
        roles = roles_of(config)
        per_node, left = divmod(len(roles), config.num_nodes)
        if left:
            raise UsageError(
                f"a chief, {roles.count('worker')} workers and {roles.count('ps')} parameter servers are {len(roles)} "
                f"processes, which cannot be spread evenly over num_nodes = {config.num_nodes}",
                hint="Choose num_workers and num_servers so that 1 + num_workers + num_servers is a multiple of it.",
            )
        names = role_names(roles) if len(roles) > 1 else ()
        return JobLayout(device, config.num_nodes, per_node, Mesh(dp_replicate=len(roles)), names)

    def environment(self, config: DistributedConfig, device: str) -> tuple[dict[str, str], list[str]]:
        """Return the roles of the ranks and TensorFlow's variables; on CPUs the fork server imports TensorFlow."""
        from phalanx.engines.tensorflow.cluster import import_environment, tensorflow_modules

        roles = roles_of(config)
        variables = {ROLES_VARIABLE: ",".join(roles), **import_environment(os.environ, len(roles))}
        # What TensorFlow may do with a GPU while it is imported must not happen before a fork.
        return variables, [*tensorflow_modules({**os.environ, **variables})] if device == "cpu" else []


ENGINE = TensorFlow()
