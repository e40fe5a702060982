"""Settings that have no effect without another one are refused, and allowed together with it."""

from __future__ import annotations

import pytest

from phalanx import DistributedConfig
from phalanx.cli import main
from phalanx.config import FIELDS
from phalanx.config.pairs import PAIRS
from phalanx.engines.deepspeed.rules import PAIRS as DEEPSPEED
from phalanx.engines.horovod.rules import PAIRS as HOROVOD
from phalanx.errors import ConfigError
from phalanx.tools.verify.proofs import _ONE_PROCESS
from phalanx.world.mesh import Mesh, plan_mesh

PIPELINE = [
    ("microbatches", 4),
    ("pipeline_schedule", "zero-bubble"),
    ("pipeline_cuts", "layers.1"),
    ("pipeline_cuts", "measured"),
]
SHARDING = [
    {"sharding": "full"},
    {"sharding": "hybrid", "shard_size": 2},
    {"offload": "cpu"},
    {"wrap_class": "Block"},
]


@pytest.mark.parametrize(("name", "value"), PIPELINE)
def test_settings_of_a_pipeline_need_one(name, value):
    with pytest.raises(ConfigError, match=f"1 mistake:\n  - {name} = {value!r} without pipeline_parallel"):
        DistributedConfig(**{name: value})
    assert getattr(DistributedConfig(**{name: value}, pipeline_parallel=2), name) == value


def test_spare_ranks_need_losses_that_are_survived_in_place():
    with pytest.raises(ConfigError, match="spares = 2 without max_restarts: no lost rank is replaced"):
        DistributedConfig(spares=2)
    with pytest.raises(ConfigError, match="spares = 2 with strategy = 'deepspeed', where all ranks start again"):
        DistributedConfig(spares=2, max_restarts=1, strategy="deepspeed")
    DistributedConfig(spares=2, max_restarts=1)


def test_default_values_of_a_pipeline_need_none():
    DistributedConfig(pipeline_schedule="1f1b", pipeline_cuts=None, microbatches=None)


def test_a_wrong_number_of_stages_is_the_only_reported_mistake():
    with pytest.raises(ConfigError, match="1 mistake:\n  - pipeline_parallel = 0"):
        DistributedConfig(pipeline_parallel=0, microbatches=4)


@pytest.mark.parametrize("cuts", [" ", ",", "layers.1,,layers.2", "layers.1,"])
@pytest.mark.parametrize("stages", [1, 2])
def test_empty_names_of_cuts_are_refused(cuts, stages):
    with pytest.raises(ConfigError, match=r"1 mistake:\n  - pipeline_cuts = .*one of them is empty"):
        DistributedConfig(pipeline_cuts=cuts, pipeline_parallel=stages)


@pytest.mark.parametrize("strategy", ["ddp", "auto"])
@pytest.mark.parametrize("settings", SHARDING)
def test_settings_of_sharding_need_something_sharded(strategy, settings):
    with pytest.raises(ConfigError) as caught:
        DistributedConfig(strategy=strategy, **settings)
    assert [problem.split()[0] for problem in caught.value.problems] == list(settings)
    assert "strategy = 'ddp' replicates: write strategy = 'fsdp'" in str(caught.value)


@pytest.mark.parametrize("settings", SHARDING)
@pytest.mark.parametrize("beside", [{"strategy": "fsdp"}, {"strategy": "ddp", "tensor_parallel": 2}])
def test_settings_of_sharding_are_allowed_where_something_is_sharded(settings, beside):
    DistributedConfig(**settings, **beside)


def test_whole_stages_are_not_sharded():
    with pytest.raises(ConfigError, match=r"offload = 'cpu' .* 'zero-bubble' keeps whole stages"):
        DistributedConfig(offload="cpu", pipeline_parallel=2, pipeline_schedule="zero-bubble")


@pytest.mark.parametrize("recompute", [True, "full", "selective", "every 2"])
def test_a_split_backward_pass_does_not_recompute(recompute):
    """Each of its parts would run the block again: nine times for a layer of Llama."""
    with pytest.raises(ConfigError, match=r"activation_checkpointing = .*write pipeline_schedule = 'interleaved'"):
        DistributedConfig(activation_checkpointing=recompute, pipeline_parallel=2, pipeline_schedule="zero-bubble")


@pytest.mark.parametrize("sharding", ["auto", "full", "grad-op"])
def test_a_group_size_needs_groups(sharding):
    with pytest.raises(ConfigError, match=f"shard_size = 2 with sharding = '{sharding}': only sharding = 'hybrid'"):
        DistributedConfig(strategy="fsdp", sharding=sharding, shard_size=2)


def test_expert_parallelism_excludes_hybrid_sharding():
    with pytest.raises(ConfigError, match="sharding = 'hybrid' with expert_parallel = 2"):
        DistributedConfig(expert_parallel=2, sharding="hybrid")


@pytest.mark.parametrize(
    "layout",
    [
        {name: value for name, value in PIPELINE if name != "pipeline_schedule"}
        | {"pipeline_parallel": 2, "pipeline_schedule": "gpipe", "wrap_class": "Block", "offload": "cpu"},
        {"pipeline_parallel": 2, "pipeline_schedule": "zero-bubble"},
        {"strategy": "ddp", "tensor_parallel": 2, "sharding": "hybrid", "shard_size": 2},
    ],
)
def test_verify_has_one_process_for_every_layout(layout):
    alone = DistributedConfig(**layout).replace(**_ONE_PROCESS)
    assert plan_mesh(alone, 1, 1) == Mesh()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"compression": "topk", "compression_ratio": 1.5}, "compression_ratio = 1.5: must be 1 or less"),
        ({"compression": "topk", "compression_ratio": 0.0}, "compression_ratio = 0.0: must be greater than 0"),
        ({"compression_ratio": 0.1}, "compression_ratio = 0.1 with compression = 'none': .* 'topk' or 'randomk'"),
        ({"compression": "sign", "compression_ratio": 0.1}, "compression_ratio = 0.1 with compression = 'sign'"),
        ({"compression": "topk", "powersgd_rank": 2}, "powersgd_rank = 2 .* for compression = 'powersgd'"),
        ({"compression_warmup": 5}, "compression_warmup = 5 with compression = 'none'"),
        ({"compression": "topk", "strategy": "fsdp"}, "with strategy = 'fsdp': only strategy = 'ddp' and 'ring'"),
        ({"compression": "topk", "zero_stage": 2}, "with strategy = 'fsdp': only strategy = 'ddp' and 'ring'"),
        ({"compression": "int8", "strategy": "local-sgd"}, "with strategy = 'local-sgd': only"),
        ({"compression": "int8", "strategy": "parameter-server"}, "with strategy = 'parameter-server': only"),
        ({"compression": "topk", "tensor_parallel": 2}, "with tensor_parallel = 2: .* 'ddp' and 'ring'"),
        ({"compression": "topk", "pipeline_parallel": 2}, "with pipeline_parallel = 2: .* 'ddp' and 'ring'"),
        ({"compression": "tpok"}, "Did you mean 'topk'"),
    ],
)
def test_settings_of_compression(settings, told):
    with pytest.raises(ConfigError, match=f"1 mistake:\n  - .*{told}"):
        DistributedConfig(**settings)


@pytest.mark.parametrize("strategy", ["auto", "ddp", "ring"])
def test_compression_is_allowed_with_strategies_that_average_gradients(strategy):
    config = DistributedConfig(strategy=strategy, compression="topk", compression_ratio=1.0, compression_warmup=10)
    assert config.compression_warmup == 10
    assert DistributedConfig(strategy=strategy, compression="powersgd", powersgd_rank=8).powersgd_rank == 8


def test_the_command_line_refuses_before_anything_starts(capsys):
    assert main(["train", "gpt", "--microbatches", "4", "--shard-size", "2"]) == 2
    shown = capsys.readouterr().err
    assert "2 mistakes" in shown
    assert "microbatches = 4 without pipeline_parallel" in shown
    assert "(flag)" in shown


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"fixed_order": True},
            "fixed_order = True with strategy = 'ddp', which does not follow it: write strategy = ",
        ),
        ({"strategy": "ring", "sync_every": 4}, "strategy = 'local-sgd' or 'diloco', or leave sync_every out"),
        ({"strategy": "local-sgd", "outer_momentum": 0.5}, "strategy = 'diloco', or leave outer_momentum out"),
        ({"strategy": "ring", "tensor_parallel": 2}, "tensor_parallel = 2 does not go with strategy = 'ring'"),
        ({"strategy": "diloco", "outer_momentum": 1.0}, "outer_momentum = 1.0: must be below 1"),
        (
            {"strategy": "ring", "fixed_order": True, "num_workers": 6},
            "needs 1, 2, 4, 8, ... ranks, and num_workers = 6",
        ),
        ({"strategy": "ring", "fixed_order": True, "compression": "fp16"}, "compression = 'fp16' with fixed_order"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb = 0: must be greater than 0"),
    ],
)
def test_settings_of_synchronisation(settings, words):
    with pytest.raises(ConfigError) as caught:
        DistributedConfig(**settings)
    assert words in str(caught.value)


def test_an_option_is_set_back_by_its_own_name():
    config = DistributedConfig(keep_every=5, stop_grace=2.0)
    again = config.replace(keep_every=None)
    assert (config.keep_every, again.keep_every, again.stop_grace) == (5, None, 2.0)


def test_every_row_of_the_table_of_pairs_can_be_read():
    """Names and paths exist, and the text is one sentence, also for settings that the row does not refuse."""
    settings = DistributedConfig()
    for pair in [*PAIRS, *HOROVOD, *DEEPSPEED]:
        rule = pair.rule()
        assert rule.needs <= FIELDS.keys(), pair
        assert pair.when, pair
        for path in pair.when:
            assert hasattr(settings, path.partition(".")[0]), path
        assert not list(rule.check(settings)), "defaults go together"
        text = f"{pair.because}{pair.write}".format(s=settings)
        assert text[0] in " :", pair
        assert text[-1] != ".", pair
