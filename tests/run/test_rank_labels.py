"""A rank is named by its position on the mesh only where the launcher, and not a script, lays it out."""

from __future__ import annotations

import pytest

from phalanx import DistributedConfig
from phalanx.launch import CallTarget, ModuleTarget, ScriptTarget
from phalanx.run.spec import launch_spec
from phalanx.world.mesh import plan_layout

OURS = CallTarget("phalanx.worker:run_job", "recipe.json")
SCRIPT = ScriptTarget("train.py", ())


@pytest.mark.parametrize(
    ("target", "settings", "label"),
    [
        (OURS, {}, "r3 dp3"),
        (SCRIPT, {}, "r3"),
        (ModuleTarget("train", ()), {"strategy": "fsdp"}, "r3"),
        (SCRIPT, {"pipeline_parallel": 4}, "r3 pp3"),
        (SCRIPT, {"tensor_parallel": 2}, "r3 dp1 tp1"),
        (SCRIPT, {"strategy": "fsdp", "sharding": "hybrid", "shard_size": 2}, "r3 dp_replicate1 dp_shard1"),
    ],
)
def test_labels_show_what_is_known(tmp_path, target, settings, label):
    config = DistributedConfig(num_workers=4, device="cpu", **settings)
    spec = launch_spec(config, plan_layout(config, 0), target, tmp_path, env={})
    assert spec.label(3) == label
