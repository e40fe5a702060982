"""The settings as types of keyword arguments, for editors and type checkers; no program imports it.

Written by tools/settings_arguments.py from the fields: change those, and run it again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, TypedDict


class CommonSettings(TypedDict, total=False):
    """Every setting but `optimizer` and `compression`, which some trainers take as separate arguments."""

    num_workers: int | tuple[int, int] | None
    num_nodes: int
    node_rank: int | None
    rdzv_endpoint: str | None
    device: Literal["auto", "cuda", "cpu"]
    share_gpus: bool
    threads_per_rank: int | None
    hosts: str | None
    backend: str
    strategy: str
    tensor_parallel: int
    pipeline_parallel: int
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
    microbatches: int | None
    pipeline_cuts: str | None
    context_parallel: int
    expert_parallel: int
    zero_stage: Literal[1, 2, 3] | None
    sharding: str
    shard_size: int | None
    wrap_class: str | None
    offload: Literal["none", "cpu", "nvme"]
    batch_size: int | None
    epochs: int | None
    max_steps: int | None
    learning_rate: float
    momentum: float
    weight_decay: float
    lr_schedule: Literal["constant", "linear", "cosine", "inverse-sqrt"]
    warmup: int | float
    lr_scaling: Literal["none", "linear", "sqrt"]
    seed: int
    deterministic: bool
    drop_last: bool | None
    eval_every: int | float | str
    limit_val_batches: int | float | None
    sanity_val_batches: int
    fast_dev_run: bool | int
    max_time: int | float | str | None
    early_stopping: str | None
    patience: int
    mixed_precision: Literal[False, True, "fp16", "bf16", "fp8"]
    gradient_accumulation_steps: int
    gradient_clipping: float | None
    compile: bool
    capture: bool | None
    channels_last: bool
    sync_batch_norm: bool
    activation_checkpointing: bool | str
    activation_offload: bool
    ema_decay: float | None
    on_nonfinite: Literal["stop", "skip"]
    loss_weighting: Literal["auto", "samples", "tokens"]
    lora_rank: int | None
    lora_alpha: float | None
    lora_targets: str | None
    communication_backend: Literal["nccl", "gloo", "mpi", "phalanx"] | None
    find_unused_parameters: bool
    nccl_env: Literal["gcp", "aws-efa", "infiniband", "ethernet"] | None
    timeout: float
    fixed_order: bool
    compression_ratio: float
    powersgd_rank: int
    sync_every: int
    num_servers: int
    server_mode: Literal["auto", "sync", "async", "bounded"]
    staleness: int | None
    checkpoint_dir: str | os.PathLike[str] | None
    checkpoint_frequency: int | str | None
    checkpoint_kind: Literal["sharded", "full", "incremental"]
    async_checkpoint: Literal[False, True, "skip"]
    keep_last: int | None
    keep_best: bool | str | None
    load_best_at_end: bool
    resume_from_checkpoint: bool | str | os.PathLike[str]
    run_dir: str | os.PathLike[str] | None
    name: str | None
    tensorboard: bool | str | os.PathLike[str]
    mlflow: bool | str
    wandb: bool | str
    sinks: str | None
    metrics_port: int | str | None
    debug: Literal["nan"] | None
    profile: bool | str
    log_every_n_steps: int
    verbosity: Literal["quiet", "normal", "verbose"]
    progress: bool
    console_ranks: Literal["0", "all"]
    max_restarts: int
    min_workers: int | None
    spares: int
    heartbeat_timeout: float
    preemption_file: str | None
    check_replicas_every: int | None
    on_corruption: Literal["stop", "replace", "warn"]
    straggler_factor: float | None
    on_straggler: Literal["warn", "replace"]
    start_timeout: float | None
    stall_timeout: float | None
    stop_grace: float
    preemption_margin: float
    base_batch_size: int | None
    decay_norms: bool
    lora_dropout: float
    lora_base: Literal["nf4"] | None
    min_delta: float
    compression_warmup: int
    outer_learning_rate: float
    outer_momentum: float
    keep_every: int | None
    memory_frequency: int
    straggler_steps: int
    reference_throughput: float | None
    tensorboard_histograms: int
    bucket_cap_mb: float
    scaler_init_scale: float
    scaler_growth_interval: int
    deepspeed_config: Mapping[str, Any] | str | None
    nvme_path: str | os.PathLike[str] | None
    host_discovery_script: str | None
    adasum: bool
    horovod_timeline: str | None
    address: str | None
    cpus_per_worker: float
    resources_per_worker: Mapping[str, float] | str | None
    placement: Literal["pack", "spread", "strict-pack", "strict-spread"]
    # Other spellings.
    num_gpus: int | tuple[int, int] | None
    gpus_per_node: int | None
    mlflow_tracking: bool
    mlflow_experiment: str | None
    tensorboard_dir: str | os.PathLike[str] | None
    fast: bool
    memory: bool


class TrainerSettings(CommonSettings, total=False):
    """The settings of a trainer, which takes `optimizer` as a separate argument."""

    compression: Literal["none", "fp16", "bf16", "int8", "sign", "topk", "randomk", "powersgd"]


class AllSettings(TrainerSettings, total=False):
    """Every setting."""

    optimizer: Literal["adamw", "adamw8bit", "adam", "sgd", "rmsprop", "adagrad", "lars", "lamb"]


class TaskArguments(TypedDict, total=False):
    """What a trainer for torch models takes besides settings."""

    loss_fn: Any
    optimizer: Any
    scheduler: Any
    scheduler_interval: str
    metrics: Mapping[str, Any] | None
    callbacks: list[Any] | None
    augment: Any
    hooks: list[Any] | None


class TorchArguments(TrainerSettings, TaskArguments, total=False):
    """The keyword arguments of a trainer for torch models."""


class HorovodArguments(CommonSettings, TaskArguments, total=False):
    """The keyword arguments of HorovodTrainer, whose `compression` may be a class of Horovod."""
