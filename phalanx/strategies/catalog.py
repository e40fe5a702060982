"""What each strategy is for, in words: for `phalanx strategies` and the documentation. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One strategy: how it is asked for, what it does, when to choose it, what it goes together with."""

    name: str
    flag: str
    summary: str
    choose: str
    combines: str


CATALOG = (
    Entry(
        "ddp",
        "--strategy ddp (the default; without the flag, CPU ranks of one machine average in shared memory)",
        "every rank holds the whole model; gradients are averaged during backward",
        "the model, its gradients and optimizer states fit on one device",
        "everything below but fsdp and zero; beside another axis the data axis is sharded",
    ),
    Entry(
        "ring",
        "--strategy ring [--compression NAME], and --fixed-order",
        "what ddp does, written here: gradients in shared memory within a machine, our own collectives between them",
        "the ranks are CPUs of one machine (faster than ddp), or a run must give equal bits at 1, 2, 4 and 8 ranks",
        "accumulation, clipping, compression, compile; no other axis",
    ),
    Entry(
        "local-sgd",
        "--strategy local-sgd --sync-every H",
        "every rank steps by itself; weights are averaged every H steps",
        "the link between ranks is so slow that no compression of every step's gradients will do",
        "accumulation, clipping, precision; no other axis",
    ),
    Entry(
        "diloco",
        "--strategy diloco --sync-every H [--outer-learning-rate 0.7] [--outer-momentum 0.9]",
        "local-sgd whose average movement is followed by an outer step with Nesterov's momentum",
        "as local-sgd, with rounds of tens or hundreds of steps",
        "as local-sgd",
    ),
    Entry(
        "fsdp",
        "--strategy fsdp [--sharding full|grad-op|hybrid|hybrid-grad-op] [--offload cpu]",
        "parameters, gradients and optimizer states are sharded; blocks are gathered one at a time",
        "they do not fit; grad-op trades memory for less traffic, hybrid shards within a machine only",
        "tensor, pipeline (not zero-bubble), context, expert, lora; one rank runs the bare model",
    ),
    Entry(
        "zero",
        "--zero-stage 1|2|3",
        "ZeRO in fsdp's means: optimizer states sharded (1), gradients too (2), parameters too (3)",
        "you think in ZeRO's stages",
        "what fsdp combines with",
    ),
    Entry(
        "deepspeed",
        "--strategy deepspeed, --deepspeed-config ds.json (extra: deepspeed)",
        "DeepSpeed's own engine, by its JSON: ZeRO's stages 0 to 3, offload to CPU memory or NVMe",
        "a DeepSpeed configuration is there already, or optimizer states belong in CPU memory or on disk",
        "accumulation, clipping, bf16, activation checkpointing, offload; no other axis",
    ),
    Entry(
        "horovod",
        "--backend horovod [--compression fp16] [--hosts node1:8,node2:8] [--min-workers N]",
        "what ddp does, by Horovod's all-reduce, on ranks that horovodrun starts",
        "scripts and clusters are made for Horovod, or workers come and go (elastic Horovod)",
        "accumulation, clipping, precision, compile, lora; no other axis, no zero",
    ),
    Entry(
        "tensor",
        "--tensor-parallel N",
        "every layer is split over N neighbouring ranks, by the model's plan; sequence and loss parallel",
        "a layer or its activations do not fit, and N ranks share fast links",
        "ddp, fsdp, pipeline, context",
    ),
    Entry(
        "pipeline",
        "--pipeline-parallel N [--pipeline-schedule gpipe|1f1b|interleaved|zero-bubble] [--microbatches M]",
        "the model is cut into stages on different ranks; parts of a batch go through them one by one",
        "the model does not fit, and links between machines are slow",
        "ddp, fsdp, tensor, context",
    ),
    Entry(
        "context",
        "--context-parallel N",
        "every sequence is cut over N ranks, with ring attention between them",
        "sequences are so long that their activations do not fit",
        "ddp, fsdp, tensor, pipeline",
    ),
    Entry(
        "expert",
        "--expert-parallel N",
        "the experts of a mixture lie on N data-parallel ranks; tokens travel to them",
        "the model is a mixture of experts that does not fit, or whose experts are many",
        "ddp, fsdp (the rest of the model is sharded over the same ranks)",
    ),
    Entry(
        "tensorflow",
        "--backend tensorflow --strategy mirrored|multiworker|parameter-server (extra: tensorflow)",
        "tf.distribute for Keras models: replicas in one process, a process a worker, or parameter servers",
        "the model is a Keras model",
        "mixed precision, backups, restarts; what else Keras does is told in compile()",
    ),
    Entry(
        "parameter-server",
        "--strategy parameter-server [--num-servers N] [--server-mode sync|async|bounded] [--staleness S]",
        "processes of their own hold the parameters and step; ranks push gradients and pull values",
        "ranks differ in speed (bounded, async), or a few rows of large embeddings change in each step",
        "accumulation, clipping, bf16, compile, lora; no other axis, no zero",
    ),
)
