"""The fields of `DistributedConfig`, in small groups. Each field is a Python argument, a flag and a TOML key."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.config.engine_groups import Engines
from phalanx.config.option import option

BACKENDS: dict[str, tuple[str, str]] = {
    "pytorch-ddp": ("local", "ddp"),
    "pytorch-fsdp": ("local", "fsdp"),
    "deepspeed": ("local", "deepspeed"),
    "horovod": ("horovodrun", "horovod"),
    "ray": ("ray", "ddp"),
    "tensorflow": ("local", "tensorflow"),
}
"""A backend is only a name for a pair (launcher, strategy)."""

ZERO_SHARDING = {1: "grad-op", 2: "grad-op", 3: "full"}
"""What a stage of ZeRO is in fsdp's words."""

TORCH_SHARDING = {
    "FULL_SHARD": "full",
    "SHARD_GRAD_OP": "grad-op",
    "HYBRID_SHARD": "hybrid",
    "HYBRID_SHARD_ZERO2": "hybrid-grad-op",
}
"""What members of torch.distributed.fsdp.ShardingStrategy are called here; NO_SHARD is strategy = 'ddp'."""

TENSORFLOW_STRATEGIES = ("mirrored", "multiworker", "parameter-server")
"""What backend = 'tensorflow' can be told; torch has parameter servers of its own."""

STRATEGIES = (
    "auto",
    "ddp",
    "fsdp",
    "deepspeed",
    "horovod",
    "ring",
    "local-sgd",
    "diloco",
    "parameter-server",
    "mirrored",
    "multiworker",
)
COMPRESSORS = ("none", "fp16", "bf16", "int8", "sign", "topk", "randomk", "powersgd")
PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
OPTIMIZERS = ("adamw", "adam", "sgd", "rmsprop", "adagrad")
LR_SCHEDULES = ("constant", "linear", "cosine", "inverse-sqrt")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """How many ranks, where."""

    num_workers: int | None = option(
        None, "ranks in the whole job, on any device (default: every GPU, or 1 on CPU)", minimum=1
    )
    num_gpus: int | None = option(None, "the same as num_workers, for CUDA", minimum=1)
    num_nodes: int = option(1, "machines in the job", minimum=1)
    gpus_per_node: int | None = option(None, "ranks on each machine (default: num_workers / num_nodes)", minimum=1)
    node_rank: int | None = option(None, "which machine this is, from 0 (with num_nodes > 1)", minimum=0)
    rdzv_endpoint: str | None = option(None, "host:port where the machines meet (with num_nodes > 1)")
    device: str = option("auto", "where the ranks compute", choices=("auto", "cuda", "cpu"))
    threads_per_rank: int | None = option(None, "CPU threads of each rank (default: cores / ranks)", minimum=1)


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Who starts the ranks and who keeps them in step."""

    backend: str = option("pytorch-ddp", "a launcher and a strategy under one name", choices=tuple(BACKENDS))
    strategy: str = option(
        "auto",
        "how the ranks share the work (auto: the backend's own, by shared memory on the CPUs of one machine)",
        choices=STRATEGIES,
        entry_points="phalanx.strategies",
    )
    tensor_parallel: int = option(
        1, "split every layer of the model over this many neighbouring ranks, by the model's tensor_plan()", minimum=1
    )
    loss_parallel: bool = option(
        True, "tensor_parallel: compute the built-in models' loss on logits that stay split by vocabulary"
    )
    pipeline_parallel: int = option(
        1, "cut the model into stages, one after the other, on this many groups of ranks", minimum=1
    )
    pipeline_schedule: str = option(
        "1f1b",
        "pipeline: the order of forward and backward passes (interleaved and zero-bubble: several stages a rank)",
        choices=PIPELINE_SCHEDULES,
    )
    microbatches: int | None = option(
        None,
        "pipeline: parts of a batch that are under way at once (default: as many as keep the bubble small)",
        minimum=1,
    )
    pipeline_cuts: str | None = option(
        None, "pipeline: names of the modules that begin a stage, with commas (default: a balanced split)"
    )
    pipeline_balance: str = option(
        "parameters",
        "pipeline: balance the stages by parameters, or by the time that each part takes (measured)",
        choices=("parameters", "measured"),
    )
    context_parallel: int = option(
        1, "cut every sequence over this many ranks, with ring attention between them", minimum=1
    )
    expert_parallel: int = option(
        1, "spread the experts of a mixture-of-experts model over this many data-parallel ranks", minimum=1
    )
    zero_stage: int | None = option(
        None,
        "shard what ddp replicates, by fsdp or deepspeed: optimizer states (1), gradients too (2), parameters too (3)",
        choices=(None, 1, 2, 3),
    )
    sharding: str = option(
        "auto",
        "fsdp: shard parameters too (full), keep them whole between forward and backward (grad-op), or shard within "
        "groups of shard_size ranks and replicate over the groups (hybrid, hybrid-grad-op); torch's names FULL_SHARD, "
        "SHARD_GRAD_OP, HYBRID_SHARD, HYBRID_SHARD_ZERO2 and NO_SHARD mean the same; auto: by zero_stage, else full",
        choices=("auto", "full", "grad-op", "hybrid", "hybrid-grad-op"),
    )
    shard_size: int | None = option(
        None, "fsdp, hybrid: ranks that together hold one copy (default: those of one machine)", minimum=2
    )
    wrap_class: str | None = option(
        None, "fsdp: class of the blocks that are gathered one at a time (default: the model's repeated blocks)"
    )
    offload: str = option(
        "none",
        "fsdp, deepspeed: keep parameters, gradients and optimizer states in CPU memory; nvme: deepspeed, on disk",
        choices=("none", "cpu", "nvme"),
    )
    nvme_path: str | None = option(None, "folder on a fast disk (with offload=nvme)")
    deepspeed_config: str | None = option(
        None, 'train with DeepSpeed\'s engine by this JSON file (in Python also a dict); "auto" in it: as set here'
    )


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, for how long, at which rate."""

    batch_size: int | None = option(None, "samples per rank and micro-batch (default: the DataLoader's own)", minimum=1)
    epochs: int | None = option(None, "passes over the data (default: 1, or as many as max_steps needs)", minimum=1)
    max_steps: int | None = option(None, "stop after this many optimizer steps, whatever the epoch", minimum=1)
    learning_rate: float = option(1e-3, "peak learning rate, before lr_scaling", above=0)
    optimizer: str = option("adamw", "optimizer, when none is given in Python", choices=OPTIMIZERS)
    momentum: float = option(0.9, "momentum of sgd and rmsprop, beta1 of adam and adamw", minimum=0)
    weight_decay: float = option(0.0, "decay of weights (decoupled for adamw)", minimum=0)
    lr_schedule: str = option("constant", "shape of the learning rate after warm-up", choices=LR_SCHEDULES)
    warmup: int | float = option(0, "warm-up: a number of steps (500), or a share of the run (0.1)", minimum=0)
    lr_scaling: str = option("none", "scale learning_rate with the global batch", choices=("none", "linear", "sqrt"))
    base_batch_size: int | None = option(
        None, "the batch that learning_rate was chosen for (with lr_scaling; default: one rank's batch)", minimum=1
    )
    seed: int = option(0, "seed of weights, sample order and dropout", minimum=0)
    deterministic: bool = option(False, "use deterministic kernels only (slower)")
    drop_last: bool | None = option(None, "drop the ragged last global batch (default: as the DataLoader says)")
    data_dir: str | None = option(None, "folder of a recipe's data files (mnist, imagefolder)")
    eval_every: int = option(1, "evaluate every this many epochs (0: only at the end)", minimum=0)


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """Precision, accumulation, clipping, compilation."""

    mixed_precision: bool | str = option(
        False,
        "false, bf16, fp16 (with loss scaling), or true: fp16 on CUDA, bf16 on a CPU that has it",
        choices=(False, True, "fp16", "bf16"),
    )
    scaler_init_scale: float = option(65536.0, "first loss scale of fp16", above=0)
    scaler_growth_interval: int = option(2000, "steps without overflow before the loss scale doubles", minimum=1)
    gradient_accumulation_steps: int = option(1, "micro-batches added up for one optimizer step", minimum=1)
    gradient_clipping: float | None = option(None, "largest global gradient norm", above=0)
    compile: bool = option(False, "compile the model with torch.compile")
    activation_checkpointing: bool | str = option(
        False,
        "recompute in backward instead of keeping activations: full (or true: every repeated block), 'every 2' (every "
        "second block), selective (all but matrix products, attention and what other ranks sent)",
    )
    activation_offload: bool = option(False, "keep what backward needs of the repeated blocks in CPU memory")
    on_nonfinite: str = option("stop", "a NaN or infinite loss: stop, or skip that step", choices=("stop", "skip"))
    loss_weighting: str = option(
        "samples",
        "how micro-batches of unequal size are weighed: by samples, or by label tokens",
        choices=("samples", "tokens"),
    )


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Training a few new weights beside a frozen model (LoRA)."""

    lora_rank: int | None = option(None, "freeze the model and train adapters of this rank", minimum=1)
    lora_alpha: float | None = option(
        None, "lora_alpha / lora_rank scales what adapters add (default: 2 x lora_rank)", above=0
    )
    lora_dropout: float = option(0.0, "dropout before the adapters", minimum=0)
    lora_targets: str | None = option(
        None,
        "layers that get adapters, by last parts of names (query,value) or patterns ('layers.*.feed.*'), with commas "
        "between (default: the linear layers of attention)",
    )


@dataclass(frozen=True, kw_only=True)
class Communication:
    """How gradients travel."""

    communication_backend: str | None = option(
        None,
        "nccl, gloo, mpi or phalanx (ours: shared memory within a machine; default: nccl on CUDA, gloo on CPU)",
        choices=(None, "nccl", "gloo", "mpi", "phalanx"),
    )
    find_unused_parameters: bool = option(False, "let parameters be unused in a step (costs a graph walk each step)")
    bucket_cap_mb: float = option(25.0, "size of a gradient bucket in MB", above=0)
    nccl_env: str | None = option(
        None,
        "tell NCCL what it cannot know about this kind of cluster (`phalanx nccl-env` shows it); what is set stays",
        choices=(None, "gcp", "aws-efa", "infiniband", "ethernet"),
    )
    timeout: float = option(600.0, "seconds a rank waits for the others before it gives up", above=0)
    start_timeout: float | None = option(
        None, "seconds until every rank must have started (default: no limit for scripts)", above=0
    )


@dataclass(frozen=True, kw_only=True)
class Synchronisation:
    """How and how often gradients or weights are brought together, beyond a plain average every step."""

    fixed_order: bool = option(
        False,
        "ring: add up gradients in one order over micro-batches and ranks, so that 1, 2, 4 and 8 ranks give equal bits",
    )
    compression: str = option("none", "ddp, ring: make gradients smaller before they travel", choices=COMPRESSORS)
    compression_ratio: float = option(0.01, "topk, randomk: the share of the gradient that is sent, up to 1", above=0)
    powersgd_rank: int = option(4, "powersgd: rank of the two thin matrices that stand for a gradient", minimum=1)
    compression_warmup: int = option(0, "steps before compression begins", minimum=0)
    sync_every: int = option(16, "local-sgd, diloco: steps that each rank takes alone between averages", minimum=1)
    outer_learning_rate: float = option(0.7, "diloco: rate of the outer Nesterov step", above=0)
    outer_momentum: float = option(0.9, "diloco: momentum of the outer Nesterov step", minimum=0)
    num_servers: int = option(1, "parameter-server: shards that hold the parameters, processes of their own", minimum=1)
    server_mode: str = option(
        "auto",
        "parameter-server: all workers step together (sync), each at its own pace (async), or none more than "
        "`staleness` steps ahead (bounded); auto: bounded where staleness is given, else sync",
        choices=("auto", "sync", "async", "bounded"),
    )
    staleness: int | None = option(
        None, "parameter-server: how many steps a worker may be ahead of the slowest", minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """What is kept, how often, and where a run goes on."""

    checkpoint_dir: str | None = option(
        None, "where checkpoints go (default: <run_dir>/checkpoints when checkpoint_frequency or max_restarts is set)"
    )
    checkpoint_frequency: int | str | None = option(None, "every n epochs (10), or every n steps ('500 steps')")
    keep_last: int | None = option(3, "how many checkpoints of this run to keep (none: all)", minimum=1)
    resume_from_checkpoint: bool | str = option(
        False, "true: the newest complete one of checkpoint_dir, if any; or a path"
    )


@dataclass(frozen=True, kw_only=True)
class Monitoring:
    """What is written down and shown."""

    run_dir: str | None = option(None, "folder of this run: config, logs, events (default: runs/<name>-<time>)")
    name: str | None = option(None, "name of the run (default: the recipe, script or model)")
    tensorboard: bool = option(False, "write TensorBoard files")
    tensorboard_dir: str | None = option(None, "where (default: <run_dir>/tensorboard); giving it turns tensorboard on")
    mlflow_tracking: bool = option(False, "log to MLflow (extra: phalanx[mlflow])")
    mlflow_experiment: str | None = option(None, "MLflow experiment; giving it turns mlflow_tracking on")
    reference_throughput: float | None = option(
        None, "samples per second of one rank, as measured: the run's speedup against it is reported", above=0
    )
    log_every_n_steps: int = option(10, "read losses and report every this many steps", minimum=1)
    progress: bool = option(True, "show the progress bar or lines")
    console_ranks: str = option("0", "whose output the console shows", choices=("0", "all"))


@dataclass(frozen=True, kw_only=True)
class Elasticity:
    """What happens when ranks fail or are told to stop."""

    max_restarts: int = option(
        0, "restart all ranks this many times after a failure, from the newest checkpoint", minimum=0
    )
    stop_grace: float = option(4.5, "seconds between asking ranks to stop and killing them", above=0)


GROUPS = (
    Resources,
    Parallelism,
    Training,
    Optimization,
    Adapters,
    Communication,
    Synchronisation,
    Engines,
    Checkpointing,
    Monitoring,
    Elasticity,
)
