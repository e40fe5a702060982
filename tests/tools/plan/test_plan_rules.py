"""What the planner calls possible, train accepts, and the reverse: random layouts go through both."""

import random
import sys

import pytest

from phalanx.config import DistributedConfig
from phalanx.errors import ConfigError, PhalanxError
from phalanx.tools.plan.cluster import Cluster
from phalanx.tools.plan.model import ModelShape, TracedShape
from phalanx.tools.plan.plans import Goal, Layout
from phalanx.tools.plan.rules import accepted, layout_of, refusal, settings_of
from phalanx.world.mesh import plan_mesh
from phalanx.world.splits import SCHEDULES, choose_microbatches

MODEL = ModelShape(layers=8, hidden=64, heads=8, kv_heads=4, vocab=128, ffn_hidden=128, name="toy")
MIXTURE = ModelShape(layers=4, hidden=64, heads=8, vocab=128, ffn_hidden=128, experts=8, name="mixture")
SIZES = (1, 2, 3, 4, 8)


def features(layout: Layout) -> set[str]:
    """The axes, schedules and kinds of sharding of a layout."""
    axes = {axis for axis in ("tp", "pp", "cp", "ep", "dp_replicate", "dp_shard") if getattr(layout, axis) > 1}
    schedule = {layout.schedule} if layout.pp > 1 else set()
    adapters = {"lora"} if layout.lora_rank else set()
    return axes | schedule | adapters | {f"stage {layout.stage}", layout.offload, layout.recompute}


EVERYTHING = {
    *("tp", "pp", "cp", "ep", "dp_replicate", "dp_shard", "lora", "cpu", "none", "selective", "full"),
    *(f"stage {stage}" for stage in range(4)),
    *SCHEDULES,
}


def random_layout(draw: random.Random) -> Layout:
    schedule = draw.choice(list(SCHEDULES))
    pp = draw.choice(SIZES)
    honest = draw.random() < 0.8
    tp = draw.choice(SIZES)
    return Layout(
        tp=tp,
        pp=pp,
        cp=draw.choice((1, 1, 2, 4)),
        ep=draw.choice((1, 1, 1, 2)),
        dp_replicate=draw.choice((1, 1, 2, 3)),
        dp_shard=draw.choice((1, 2, 4)),
        virtual_stages=SCHEDULES[schedule].stages_per_rank if honest and pp > 1 else 1,
        micro_batch=draw.choice((1, 2, 3)),
        sequence_parallel=tp > 1 if honest else draw.random() < 0.5,
        recompute=draw.choice(("none", "selective", "full")),
        zero_stage=draw.choice((None, None, None, 0, 1, 2, 3)),
        schedule=schedule,
        offload=draw.choice(("none", "none", "none", "cpu")),
        lora_rank=draw.choice((None, None, None, 4)),
    )


def random_goal(draw: random.Random) -> Goal:
    return Goal(
        global_batch=draw.choice((8, 24, 48, 96, 144)),
        seq_len=draw.choice((16, 24, 64)),
        precision=draw.choice(("bf16", "fp16", "fp32")),
    )


def test_what_the_planner_calls_possible_train_accepts():
    draw = random.Random(0)
    possible, seen = 0, set()
    for _ in range(20_000):
        layout, goal = random_layout(draw), random_goal(draw)
        cluster = Cluster(gpu="h100", gpus=layout.gpus, gpus_per_node=8)
        if refusal(MIXTURE if layout.ep > 1 else MODEL, layout, goal, cluster) is not None:
            continue
        possible += 1
        seen |= features(layout)
        config = accepted(layout, goal, cluster)
        assert plan_mesh(config, cluster.gpus, cluster.gpus // cluster.nodes) == layout.mesh
        assert config.recompute == {"none": None}.get(layout.recompute, config.recompute)
        samples = config.batch_size * config.gradient_accumulation_steps * layout.dp
        assert samples == goal.global_batch
        if layout.pp > 1:
            schedule = SCHEDULES[layout.schedule]
            count = choose_microbatches(config.microbatches, config.batch_size, layout.pp, schedule)
            assert config.batch_size // count == layout.micro_batch
    assert possible > 500
    assert seen == EVERYTHING


def random_settings(draw: random.Random) -> dict[str, object]:
    """Settings as a user may write them, for 24 ranks on three machines."""
    found: dict[str, object] = {
        "num_nodes": 3,
        "gpus_per_node": 8,
        "strategy": draw.choice(("auto", "ddp", "fsdp")),
        "batch_size": draw.choice((4, 6, 16)),
        "mixed_precision": "bf16",
    }
    axes = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
    for axis in draw.sample(axes, draw.choice((0, 1, 1, 2, 3))):
        found[axis] = draw.choice((2, 3, 4))
    if draw.random() < 0.3:
        found["sharding"] = draw.choice(("full", "grad-op", "hybrid", "hybrid-grad-op"))
    if draw.random() < 0.3:
        found["zero_stage"] = draw.choice((1, 2, 3))
    if "pipeline_parallel" in found:
        found["pipeline_schedule"] = draw.choice(list(SCHEDULES))
    if draw.random() < 0.2:
        found["offload"] = "cpu"
    if draw.random() < 0.2:
        found["lora_rank"] = 4
    if draw.random() < 0.3:
        found["activation_checkpointing"] = draw.choice((True, "full", "selective"))
    if "pipeline_parallel" not in found and draw.random() < 0.3:  # a layout has a pipeline's micro-batches in one batch
        found["gradient_accumulation_steps"] = draw.choice((2, 4))
    if draw.random() < 0.2:
        found["shard_size"] = draw.choice((2, 4, 8))
    return found


def test_what_train_accepts_the_planner_calls_possible():
    draw = random.Random(1)
    model = ModelShape(layers=24, hidden=96, heads=12, kv_heads=12, vocab=128, ffn_hidden=192, name="divisible")
    mixture = ModelShape(layers=4, hidden=96, heads=12, vocab=128, experts=12, name="mixture")
    cluster = Cluster(gpu="h100", gpus=24, gpus_per_node=8)
    accepts, seen = 0, set()
    for _ in range(5_000):
        settings = random_settings(draw)
        try:
            config = DistributedConfig(**settings)
            mesh = plan_mesh(config, 24, 8)
            layout = layout_of(config, mesh, config.batch_size)
        except PhalanxError:
            continue
        samples = config.batch_size * config.gradient_accumulation_steps * mesh.dp_size
        goal = Goal(global_batch=samples, seq_len=48)
        accepts += 1
        seen |= features(layout)
        found = refusal(mixture if layout.ep > 1 else model, layout, goal, cluster)
        assert found is None, (settings, layout, found)
    assert accepts > 500
    assert seen == EVERYTHING


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(tp=8, sequence_parallel=True), "does not divide kv_heads = 4"),
        (Layout(pp=8, schedule="interleaved", virtual_stages=2), "16 pipeline stages need as many layers, and toy has"),
        (Layout(pp=8, schedule="interleaved"), "has 2 stages per rank, not 1"),
        (Layout(dp_shard=8, micro_batch=5), "cannot be divided by 8 data ranks x micro-batches of 5"),
        (Layout(dp_shard=4), "the axes make 4 ranks, and the cluster has 8 GPUs"),
        (Layout(pp=4, dp_shard=2, schedule="zero-bubble", virtual_stages=2), "zero_stage = 0 does not"),
        (
            Layout(tp=2, dp_replicate=4, sequence_parallel=True, zero_stage=2),
            "zero_stage = 2 needs ranks to shard over",
        ),
        (Layout(tp=2, dp_shard=4), "splits norms and residuals along the sequence"),
        (Layout(cp=8), "cannot be cut into 2 x context_parallel = 16 equal chunks"),
        (Layout(dp_shard=8, ep=8), "needs a mixture of experts"),
        (Layout(tp=2, dp_shard=4, sequence_parallel=True, lora_rank=8), "adapters are not split over ranks"),
        (Layout(dp_replicate=8, offload="cpu"), "replicates: write strategy = 'fsdp'"),
        (Layout(pp=2, dp_replicate=4, schedule="zero-bubble", virtual_stages=2, recompute="full"), "for each: write"),
        (Layout(pp=8, micro_batch=16), "cannot run microbatches = 6"),
    ],
)
def test_a_refusal_says_why(layout, words):
    goal = Goal(global_batch=96, seq_len=24)
    assert words in (refusal(MODEL, layout, goal, Cluster(gpu="h100", gpus=8)) or "")


def test_kinds_of_models_without_a_plan_are_refused_their_axes():
    goal, cluster = Goal(global_batch=8), Cluster(gpu="h100", gpus=8)
    mixture = ModelShape(layers=4, hidden=64, heads=8, vocab=8, experts=8, name="moe")
    assert "a mixture of experts" in (refusal(mixture, Layout(pp=8), goal, cluster) or "")
    traced = TracedShape(
        name="net",
        parameters=1,
        trainable=1,
        forward_flops_per_sample=1.0,
        activation_bytes_per_sample=1.0,
        traffic_bytes_per_sample=1.0,
    )
    assert refusal(traced, Layout(cp=8), goal, cluster) == "net has no methods for context parallelism"
    assert "no repeated blocks" in (refusal(traced, Layout(dp_shard=8, recompute="full"), goal, cluster) or "")
    assert refusal(traced, Layout(dp_shard=8), goal, cluster) is None
    assert refusal(traced, Layout(dp_shard=8), Goal(global_batch=8, precision="int8"), cluster) is not None


def test_settings_leave_defaults_out_and_name_a_stage_where_gradients_must_stay_sharded():
    cluster = Cluster(gpu="h100", gpus=8)
    layout = Layout(dp_shard=8, micro_batch=2)
    assert settings_of(layout, Goal(global_batch=16, precision="fp32"), cluster) == {
        "num_gpus": 8,
        "strategy": "fsdp",
        "batch_size": 2,
        "mixed_precision": False,
    }
    more = settings_of(layout, Goal(global_batch=64), Cluster(gpu="cpu", gpus=8))
    assert (more["device"], more["num_workers"], more["zero_stage"]) == ("cpu", 8, 3)
    assert more["gradient_accumulation_steps"] == 4
    with pytest.raises(ConfigError, match="zero_stage = 3 means sharding = 'full'"):
        DistributedConfig(zero_stage=3, sharding="hybrid-grad-op")
    assert DistributedConfig(zero_stage=3, sharding="hybrid").resolved_sharding == "hybrid"


def test_refusals_are_quick_enough_for_a_search():
    """A search asks for thousands of layouts: counted in calls, which a busy machine does not change."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    cluster, goal, layout = Cluster(gpu="h100", gpus=8), Goal(global_batch=512), Layout(dp_shard=8)
    refusal(MODEL, layout, goal, cluster)
    sys.setprofile(count)
    try:
        refusal(MODEL, layout, goal, cluster)
    finally:
        sys.setprofile(None)
    assert calls < 500, "some tens of microseconds"
