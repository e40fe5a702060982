"""Published measurements of training steps, as the planner's own inputs."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.tools.plan import Cluster, Goal, Layout, ModelShape

FOLDER = Path(__file__).parents[1] / "recorded" / "planner"
MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
GPUS = {"a100_40gb": "a100-40", "a100_80gb": "a100-80", "h100_80gb": "h100"}


@dataclass(frozen=True)
class Row:
    """One measured step."""

    source: str
    name: str
    seconds: float
    model: ModelShape
    cluster: Cluster
    layout: Layout
    goal: Goal
    mfu: float | None = None
    hfu: float | None = None


def table(name: str) -> list[dict[str, str]]:
    with (FOLDER / name).open(newline="") as file:
        return list(csv.DictReader(file))


def gpt(name: str, layers: int, hidden: int, heads: int, vocab: int = 51200, seq_len: int = 2048) -> ModelShape:
    return ModelShape(name=name, layers=layers, hidden=hidden, heads=heads, vocab=vocab, positions=seq_len)


def llama(name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn_hidden=ffn,
        vocab=vocab,
        gated_mlp=True,
        tied_embeddings=False,
        biases=False,
        rms_norm=True,
    )


def nemotron(name: str, layers: int, hidden: int, heads: int, kv_heads: int) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        vocab=256000,
        tied_embeddings=False,
        biases=False,
    )


NEMO = {
    shape.name: shape
    for shape in (
        gpt("gpt3-5b", 24, 4096, 32),
        gpt("gpt3-20b", 44, 6144, 48),
        gpt("gpt3-175b", 96, 12288, 96),
        llama("llama2-7b", 32, 4096, 32, 32, 11008, 32000),
        llama("llama2-13b", 40, 5120, 40, 40, 13824, 32000),
        llama("llama2-34b", 48, 8192, 64, 8, 22016, 32000),
        llama("llama2-70b", 80, 8192, 64, 8, 28672, 32000),
        llama("llama3-8b", 32, 4096, 32, 8, 14336, 128256),
        llama("llama3.1-8b", 32, 4096, 32, 8, 14336, 128256),
        llama("llama3-70b", 80, 8192, 64, 8, 28672, 128256),
        nemotron("nemotron-8b", 32, 4096, 32, 32),
        nemotron("nemotron-22b", 40, 6144, 48, 48),
        nemotron("nemotron-340b", 96, 18432, 96, 8),
    )
}


def _shape(row: dict[str, str]) -> ModelShape:
    return gpt(row["model"], int(row["layers"]), int(row["hidden"]), int(row["heads"]))


def megatron() -> Iterator[Row]:
    """Megatron-LM, SC'21: full recomputation, replicated weights."""
    for row in table("megatron_sc21_table1.csv"):
        layout = Layout(
            tp=int(row["tp"]),
            pp=int(row["pp"]),
            dp_replicate=int(row["dp"]),
            virtual_stages=int(row["virtual_stages_per_gpu"]),
            micro_batch=int(row["micro_batch"]),
            recompute="full",
        )
        cluster = Cluster(gpu="a100-80", gpus=int(row["gpus"]), inter_node_gbps=1600)
        goal = Goal(global_batch=int(row["global_batch"]), seq_len=int(row["seq"]))
        yield Row("megatron", row["model"], float(row["derived_step_s"]), _shape(row), cluster, layout, goal)


def recomputation() -> Iterator[Row]:
    """Reducing Activation Recomputation: full, and selective with sequence parallelism."""
    columns = {"full": "iter_s_full_recompute", "selective": "iter_s_seqpar_selective"}
    for row in table("korthikanti_2205.05198.csv"):
        for recompute, column in columns.items():
            layout = Layout(
                tp=int(row["tp"]),
                pp=int(row["pp"]),
                virtual_stages=int(row["interleave"]),
                micro_batch=int(row["micro_batch"]),
                sequence_parallel=recompute == "selective",
                recompute=recompute,
            )
            cluster = Cluster(gpu="a100-80", gpus=int(row["gpus"]), inter_node_gbps=1600)
            goal = Goal(global_batch=int(row["global_batch"]), seq_len=2048)
            rates = (float(row["mfu_pct"]) / 100, float(row["hfu_pct"]) / 100)
            known = rates if recompute == "selective" else (None, None)
            name = f"{row['model']} {recompute}"
            yield Row("recomputation", name, float(row[column]), _shape(row), cluster, layout, goal, *known)


def mpt() -> Iterator[Row]:
    """MPT under FSDP."""
    for row in table("llm_foundry_mpt.csv"):
        seq_len, gpus, batch = int(row["SeqLen (T)"]), int(row["# GPUs"]), int(row["GlobalBatchSize"])
        layers, hidden, heads = MPT[row["Model"]]
        gpu = GPUS[row["GPU"]]
        recompute = "full" if row["Activation Checkpointing"] == "True" else "none"
        layout = Layout(dp_shard=gpus, micro_batch=int(row["MicroBatchSize"]), recompute=recompute)
        cluster = Cluster(gpu=gpu, gpus=gpus, inter_node_gbps=3200 if gpu == "h100" else 1600)
        precision = "fp8" if row["Precision"] == "amp_fp8" else "bf16"
        goal = Goal(global_batch=batch, seq_len=seq_len, precision=precision)
        name = f"{row['Model']} seq {seq_len} on {gpus}, micro-batch {row['MicroBatchSize']}"
        seconds = batch * seq_len / float(row["Throughput (T/s)"])
        model = gpt(row["Model"], layers, hidden, heads, 50368, seq_len)
        rates = (float(row["MFU"]) / 100, float(row["HFU"]) / 100)
        yield Row(f"mpt {gpu} {precision}", name, seconds, model, cluster, layout, goal, *rates)


def _nemo_row(source: str, row: dict[str, str], precision: str, seconds: float, mfu: float) -> Row:
    """A run of Megatron Core: distributed optimizer, fused kernels."""
    tp, pp, cp, gpus = (int(row[key]) for key in ("tp", "pp", "cp", "gpus"))
    shards = gpus // (tp * pp * cp)
    layout = Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        dp_shard=shards,
        zero_stage=1,
        virtual_stages=int(row["vp"]),
        micro_batch=int(row["mbs"]),
        sequence_parallel=tp > 1,
    )
    cluster = Cluster(gpu="h100", gpus=gpus, inter_node_gbps=3200)
    goal = Goal(global_batch=int(row["gbs"]), seq_len=int(row["seq"]), precision=precision)
    name = f"{row['model']} seq {row['seq']} on {gpus}"
    return Row(source, name, seconds, NEMO[row["model"]], cluster, layout, goal, mfu)


def nemo() -> Iterator[Row]:
    """NeMo on H100 in bf16."""
    for row in table("nvidia_dgxc_h100_sample.csv"):
        yield _nemo_row("nemo", row, "bf16", float(row["step_s"]), float(row["mfu_pct_recomputed"]) / 100)


def nemo_fp8() -> Iterator[Row]:
    """NeMo on H100 in fp8."""
    for row in table("nemo_h100_fp8.csv"):
        seconds = int(row["gbs"]) * int(row["seq"]) / float(row["tokens_s_gpu"]) / int(row["gpus"])
        yield _nemo_row("nemo fp8", row, "fp8", seconds, float(row["model_tflops"]) / 1978.9)


def ibm_meta() -> Iterator[Row]:
    """IBM and Meta, FSDP of torch with sequences of 4,096: no constant was fitted to these rows."""
    for row in table("ibm_meta_fsdp.csv"):
        gpus, micro_batch = int(row["gpus"]), int(row["micro_batch"])
        layout = Layout(dp_shard=gpus, micro_batch=micro_batch, recompute=row["recompute"])
        cluster = Cluster(gpu=row["gpu"], gpus=gpus, inter_node_gbps=float(row["gbps"]))
        goal = Goal(global_batch=gpus * micro_batch, seq_len=4096)
        seconds = micro_batch * 4096 / float(row["tokens_s_gpu"])
        rates = (float(row["mfu_pct"]) / 100, float(row["hfu_pct"]) / 100)
        name = f"{row['model']} on {gpus} x {row['gpu']}"
        yield Row("ibm + meta", name, seconds, NEMO[row["model"]], cluster, layout, goal, *rates)


def published() -> list[Row]:
    """The rows that constants were fitted to."""
    return [*megatron(), *recomputation(), *mpt(), *nemo(), *nemo_fp8()]
