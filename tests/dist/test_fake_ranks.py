"""A dry run runs the code of training: its collectives and memory are those of arithmetic, and of a real step."""

import random
from dataclasses import replace

import pytest
import torch

from phalanx.config import DistributedConfig
from phalanx.errors import PhalanxError, UsageError
from phalanx.loop.formation import Formation
from phalanx.models.gpt import gpt
from phalanx.models.llama import llama
from phalanx.models.moe import moe
from phalanx.models.resnet import resnet
from phalanx.tools.plan import fake_ranks
from phalanx.tools.plan.cluster import Cluster
from phalanx.tools.plan.estimator import Estimator
from phalanx.tools.plan.fake_layouts import dry_run_layout
from phalanx.tools.plan.fake_ranks import dry_run
from phalanx.tools.plan.memory_trace import DryRun, FakeRank, Recorder
from phalanx.tools.plan.model import ModelShape
from phalanx.tools.plan.plans import Goal, Layout
from phalanx.tools.plan.rank_memory import WORKSPACE
from phalanx.tools.plan.rules import refusal
from phalanx.tools.plan.trace import trace_module
from phalanx.world.splits import SCHEDULES
from tests.long_proofs import ALL, long_proof

LLAMA = {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 8, "ffn_hidden": 128, "vocab_size": 256}
BLOCK = 4 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64)
"""Bytes of one layer's parameters."""
ROOT = 4 * (2 * 256 * 64 + 64)
"""Those of embedding, norm and head."""
WHOLE = 4 * BLOCK + ROOT


PIPELINE = {"pipeline_parallel": 2, "batch_size": 10, "microbatches": 10}


def tried(ranks: int = 8, **settings: object) -> DryRun:
    def batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(count, 32, dtype=torch.long), torch.zeros(count, 32, dtype=torch.long)

    config = DistributedConfig(**{"batch_size": 2, **settings})
    return dry_run(lambda: llama("debug", **LLAMA), batch, config, ranks, ranks)


def calls(rank: FakeRank) -> dict[tuple[str, str, int], float]:
    return {(sent.op, sent.axis, sent.bytes): sent.count for sent in rank.collectives}


def test_ddp_holds_whole_copies_and_averages_every_gradient_once():
    [rank] = tried(strategy="ddp").ranks
    assert calls(rank) == {("all-reduce", "dp_replicate", WHOLE): 1}  # less than a bucket of 25 MB
    found = rank.by_kind()
    assert (found["parameters"], found["gradients"]) == (WHOLE, WHOLE)
    assert 2 * WHOLE <= found["optimizer"] <= 2 * WHOLE + 4 * 40  # and a count of steps for each parameter
    assert found["communication"] == 0
    assert rank.memory["layers.*"]["parameters"] == 4 * BLOCK


def test_fsdp_holds_shards_and_gathers_every_block_twice():
    [rank] = tried(strategy="fsdp").ranks
    assert calls(rank) == {
        ("all-gather", "dp_shard", BLOCK): 8,
        ("reduce-scatter", "dp_shard", BLOCK): 4,
        ("all-gather", "dp_shard", ROOT): 2,
        ("reduce-scatter", "dp_shard", ROOT): 1,
    }
    assert rank.by_kind()["parameters"] == WHOLE // 8
    assert rank.memory["layers.*"]["parameters"] == 4 * BLOCK // 8


def test_grad_op_gathers_once_and_bf16_halves_what_is_gathered():
    [rank] = tried(strategy="fsdp", sharding="grad-op", mixed_precision="bf16").ranks
    found = calls(rank)
    assert found["all-gather", "dp_shard", BLOCK // 2] == 4
    assert found["reduce-scatter", "dp_shard", BLOCK] == 4  # in fp32
    assert rank.by_kind()["communication"] >= WHOLE // 2  # all blocks stay whole until the end


def test_hybrid_reduces_within_groups_and_between_them():
    [rank] = tried(strategy="fsdp", sharding="hybrid", shard_size=2).ranks
    found = calls(rank)
    assert found["reduce-scatter", "dp_shard", BLOCK] == 4
    assert found["all-reduce", "dp_replicate", BLOCK // 2] == 4


def test_tensor_and_context_parallel_ranks_hold_less_and_talk_on_their_axes():
    [rank] = tried(strategy="fsdp", tensor_parallel=2, context_parallel=2).ranks
    axes = {sent.axis for sent in rank.collectives}
    assert {"tp", "cp"} <= axes
    assert any(axis == "dp_shard x cp" for axis in axes)  # parameters are sharded over both
    parts = rank.by_kind()["parameters"]
    assert WHOLE // 8 <= parts <= WHOLE // 8 + 4 * 9 * 64  # norms are on both tensor-parallel ranks


def test_experts_are_spread_and_tokens_are_sent_to_them_and_back():
    def batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(count, 32, dtype=torch.long), torch.zeros(count, 32, dtype=torch.long)

    config = DistributedConfig(strategy="fsdp", expert_parallel=2, batch_size=2)
    result = dry_run(lambda: moe("debug"), batch, config, 4, 4)
    assert result.mesh["dp_shard"] == result.mesh["dp_replicate"] == 2
    found, rows = calls(result.ranks[0]), 2 * 32 * 2  # samples x tokens x experts of each token
    expert = 4 * 2 * 64 * 48  # a matrix of this rank's two experts
    assert found["all-to-all", "dp_shard", 4 * rows * 48] == 2 * 4  # layers; there and back, also gradients
    assert found["all-reduce", "dp_replicate", expert] == 2 * 3
    assert "all experts get the same number of tokens" in result.text()


def test_kinds_of_pipeline_stages_differ():
    result = tried(pipeline_parallel=4, batch_size=8)
    assert [(rank.kind, rank.rank) for rank in result.ranks] == [
        ("first stage", 0),
        ("middle stage", 2),
        ("last stage", 6),
    ]
    first, middle, last = (calls(rank) for rank in result.ranks)
    hidden = 4 * 32 * 64
    assert first["send", "pp", hidden] == 8  # 8 micro-batches of one sample
    assert middle["send", "pp", hidden] == middle["receive", "pp", hidden] == 16  # forward and backward
    assert last["receive", "pp", hidden] == 8
    assert "embed" in result.ranks[0].memory
    assert "head" not in result.ranks[1].memory
    assert result.peak_bytes == max(rank.peak_bytes for rank in result.ranks)
    assert "first stage (rank 0): peak" in result.text()
    assert result.to_dict()["ranks"][2]["kind"] == "last stage"


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "fsdp", "gradient_accumulation_steps": 5},
        pytest.param({"zero_stage": 2, "gradient_accumulation_steps": 4}, marks=long_proof),
        pytest.param({**PIPELINE, "pipeline_schedule": "gpipe"}, marks=long_proof),
        {"pipeline_parallel": 2, "pipeline_schedule": "1f1b", "batch_size": 4, "microbatches": 4},
        pytest.param({**PIPELINE, "pipeline_schedule": "interleaved"}, marks=long_proof),
        pytest.param({**PIPELINE, "pipeline_schedule": "zero-bubble"}, marks=long_proof),
    ],
    ids=lambda settings: settings.get("pipeline_schedule") or next(iter(settings)),
)
def test_fewer_micro_batches_tell_what_all_of_them_hold_and_send(settings, monkeypatch):
    short = tried(4, **settings)
    original = fake_ranks._Job._counts
    monkeypatch.setattr(fake_ranks._Job, "_counts", lambda job: (original(job)[0],) * 3)
    whole = tried(4, **settings)
    for ours, theirs in zip(short.ranks, whole.ranks, strict=True):
        assert ours.peak_bytes == theirs.peak_bytes
        assert calls(ours) == calls(theirs)


def test_fake_tensors_need_what_real_ones_need():
    def batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(count, 16, dtype=torch.long), torch.zeros(count, 16, dtype=torch.long)

    config = DistributedConfig(device="cpu", batch_size=4, strategy="ddp")
    [rank] = dry_run(lambda: gpt("debug", layers=3), batch, config, 1, 1).ranks
    recorder = Recorder()
    with Formation(config) as formation, recorder, torch.device("meta"):
        model = gpt("debug", layers=3)
        with torch.device("cpu"):
            memory, _ = fake_ranks._take_step(formation, recorder, model, batch, None)
    assert {(unit, kind): size for unit, parts in rank.memory.items() for kind, size in parts.items()} == memory


def test_what_train_refuses_a_dry_run_refuses_with_the_same_words():
    with pytest.raises(UsageError, match="8 ranks cannot be divided by tensor_parallel = 3"):
        tried(tensor_parallel=3)
    with pytest.raises(UsageError, match="does not divide heads = 8, kv_heads = 8"):
        tried(16, tensor_parallel=16)
    with pytest.raises(UsageError, match="8 pipeline stages need as many layers, and Llama has 4"):
        tried(pipeline_parallel=8, batch_size=8)
    with pytest.raises(UsageError, match="class of modules in Llama 'Layer'"):
        tried(strategy="fsdp", wrap_class="Layer")
    with pytest.raises(UsageError, match="strategy = 'diloco' is not possible"):
        tried(strategy="diloco")


def test_the_traceback_of_a_model_that_fails_reaches_the_caller():
    def batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(count, 3), torch.zeros(count, dtype=torch.long)

    config = DistributedConfig(strategy="ddp", batch_size=2)
    with pytest.raises(PhalanxError, match="failed in rank 0: RuntimeError") as caught:
        dry_run(lambda: torch.nn.Sequential(torch.nn.Linear(4, 4)), batch, config, 2, 2)
    assert "F.linear" in caught.value.__notes__[0]


SHAPE = ModelShape(
    layers=8, hidden=64, heads=8, vocab=256, ffn_hidden=128, gated_mlp=True, rms_norm=True, tied_embeddings=False
)


def possible_layouts(count: int, seed: int) -> list[tuple[Layout, Goal, Cluster]]:
    """Layouts that the planner calls possible."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        schedule = draw.choice(list(SCHEDULES))
        tp, pp = draw.choice((1, 2, 4)), draw.choice((1, 2, 3))
        layout = Layout(
            tp=tp,
            pp=pp,
            cp=draw.choice((1, 1, 2)),
            dp_replicate=draw.choice((1, 2)),
            dp_shard=draw.choice((1, 2, 4)),
            virtual_stages=SCHEDULES[schedule].stages_per_rank if pp > 1 else 1,
            micro_batch=draw.choice((1, 2)),
            sequence_parallel=tp > 1,
            recompute=draw.choice(("none", "selective", "full")),
            zero_stage=draw.choice((None, None, 1, 2)),
            schedule=schedule,
            offload=draw.choice(("none", "none", "cpu")),
            lora_rank=draw.choice((None, None, 4)),
        )
        goal = Goal(global_batch=layout.dp * layout.micro_batch * draw.choice((1, 4)), seq_len=32)
        cluster = Cluster(gpu="h100", gpus=layout.gpus)
        if refusal(SHAPE, layout, goal, cluster) is None:
            found.append((layout, goal, cluster))
    return found


@pytest.mark.timeout(900)
def test_what_the_planner_calls_possible_starts():
    for layout, goal, cluster in possible_layouts(40 if ALL else 2, seed=3):
        try:
            result = dry_run_layout(SHAPE, layout, goal, cluster)
        except PhalanxError as error:
            raise AssertionError(f"{layout} {goal}") from error
        assert result.world_size == layout.gpus


PREDICTED = ModelShape(
    layers=4,
    hidden=512,
    heads=8,
    vocab=2048,
    ffn_hidden=1408,
    gated_mlp=True,
    rms_norm=True,
    tied_embeddings=False,
    biases=False,
    reference=True,
)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_replicate=2, micro_batch=32),
        pytest.param(Layout(pp=2, micro_batch=2), marks=long_proof),
        pytest.param(Layout(pp=2, virtual_stages=2, schedule="zero-bubble", micro_batch=2), marks=long_proof),
        Layout(dp_shard=2, ep=2, zero_stage=3, micro_batch=4),
    ],
    ids=["ddp", "1f1b", "zero-bubble", "experts"],
)
def test_the_planner_predicts_the_peak_of_a_dry_run(layout):
    shape = replace(PREDICTED, experts=4) if layout.ep > 1 else PREDICTED
    layout = replace(layout, attention="flash", kernels="autocast", balanced=True)
    goal, cluster = Goal(global_batch=32 * layout.dp, seq_len=256), Cluster(gpu="h100", gpus=layout.gpus)
    parts = Estimator(shape, cluster, goal).memory(layout).values()
    predicted = max(sum(rank.values()) - rank["reserve"] for rank in parts) * 2**30 - WORKSPACE
    assert predicted == pytest.approx(dry_run_layout(shape, layout, goal, cluster).peak_bytes, rel=0.12)


def test_a_traced_module_is_tried_with_the_samples_of_its_trace():
    with torch.device("meta"):
        shape = trace_module(resnet("resnet18"), "3x32x32")
    goal, cluster = Goal(global_batch=32, precision="fp32"), Cluster(gpu="h100", gpus=8)
    result = dry_run_layout(shape, Layout(dp_replicate=8, micro_batch=4), goal, cluster, lambda: resnet("resnet18"))
    assert result.ranks[0].by_kind()["parameters"] >= 4 * shape.parameters
    assert sum(sent.total for sent in result.ranks[0].collectives if sent.op == "all-reduce") == 4 * shape.parameters
    with pytest.raises(UsageError, match="needs the model itself"):
        dry_run_layout(shape, Layout(dp_replicate=8, micro_batch=4), goal, cluster)
    encoder = ModelShape(layers=2, hidden=64, heads=4, vocab=64, causal=False, name="bert-tiny")
    with pytest.raises(UsageError, match="none of the reference models has the shape of bert-tiny"):
        dry_run_layout(encoder, Layout(dp_replicate=8, micro_batch=4), goal, cluster)


@long_proof
@pytest.mark.timeout(900)
def test_seventy_billion_parameters_on_64_ranks():
    shape = ModelShape(
        name="llama-70b",
        layers=80,
        hidden=8192,
        heads=64,
        kv_heads=8,
        vocab=128_256,
        ffn_hidden=28_672,
        gated_mlp=True,
        rms_norm=True,
        tied_embeddings=False,
        biases=False,
    )
    layout = Layout(dp_shard=64, recompute="full")
    result = dry_run_layout(shape, layout, Goal(global_batch=64, seq_len=4096), Cluster(gpu="h100", gpus=64))
    [rank] = result.ranks
    assert rank.by_kind()["parameters"] == 4 * shape.parameters // 64
    assert sum(sent.total for sent in rank.collectives if sent.op == "all-gather") == 2 * 2 * shape.parameters
