"""All settings, in groups. Each field is a Python argument, a flag, a TOML key and an environment variable.

The groups have fields only; `Settings`, which inherits them, has the methods, which take time to generate.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.config.option import option

BACKENDS: dict[str, tuple[str, str]] = {
    "pytorch-ddp": ("local", "ddp"),
    "pytorch-fsdp": ("local", "fsdp"),
    "deepspeed": ("local", "deepspeed"),
    "horovod": ("horovodrun", "horovod"),
    "ray": ("ray", "ddp"),
    "tensorflow": ("local", "tensorflow"),
}
"""A backend is a name for a pair (launcher, strategy)."""

ZERO_SHARDING = {1: "grad-op", 2: "grad-op", 3: "full"}
"""The `sharding` of fsdp that equals a ZeRO stage."""

HYBRID = {"full": "hybrid", "grad-op": "hybrid-grad-op"}
"""The same sharding within groups of ranks."""

TORCH_SHARDING = {
    "FULL_SHARD": "full",
    "SHARD_GRAD_OP": "grad-op",
    "HYBRID_SHARD": "hybrid",
    "HYBRID_SHARD_ZERO2": "hybrid-grad-op",
}
"""Our names for torch.distributed.fsdp.ShardingStrategy; NO_SHARD is strategy = 'ddp'."""

TENSORFLOW_STRATEGIES = ("mirrored", "multiworker", "parameter-server")
"""Strategies of backend = 'tensorflow'; torch ranks use Phalanx's parameter servers."""

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

IGNORED_LABEL = -100
"""Label index that the loss ignores, in torch's cross entropy and in Hugging Face models."""


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Resources:
    """How many ranks run, and where."""

    num_workers: int | None = option(
        None,
        "ranks in the whole job, on any device (default: every GPU, or 1 on CPU); 2:8 is elastic: from 2 to 8",
        minimum=1,
    )
    num_gpus: int | None = option(None, "the same as num_workers, for CUDA", minimum=1)
    num_nodes: int = option(1, "machines in the job", minimum=1)
    gpus_per_node: int | None = option(None, "ranks on each machine (default: num_workers / num_nodes)", minimum=1)
    node_rank: int | None = option(None, "which machine this is, from 0 (with num_nodes > 1)", minimum=0)
    rdzv_endpoint: str | None = option(None, "host:port of the rendezvous (with num_nodes > 1)")
    device: str = option("auto", "where the ranks compute", choices=("auto", "cuda", "cpu"))
    share_gpus: bool = option(
        False, "let several ranks run on each GPU over nccl, to debug a job for more GPUs: its speed says nothing"
    )
    threads_per_rank: int | None = option(None, "CPU threads of each rank (default: cores / ranks)", minimum=1)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Parallelism:
    """What starts the ranks, and how they share the work."""

    backend: str = option(
        "pytorch-ddp", "name of a launcher and a strategy", choices=tuple(BACKENDS), entry_points="phalanx.engines"
    )
    strategy: str = option(
        "auto",
        "how the ranks share the work (auto: the default of the backend, with shared memory on the CPUs of one "
        "machine, or fsdp for a model whose copies do not fit)",
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
        1, "split the model into consecutive stages, on this many groups of ranks", minimum=1
    )
    pipeline_schedule: str = option(
        "1f1b",
        "pipeline: the order of forward and backward passes (interleaved and zero-bubble: several stages per rank)",
        choices=PIPELINE_SCHEDULES,
    )
    microbatches: int | None = option(
        None,
        "pipeline: parts of a batch that are processed at once (default: as many as keep the bubble small)",
        minimum=1,
    )
    pipeline_cuts: str | None = option(
        None, "pipeline: names of the modules that begin a stage, separated by commas (default: a balanced split)"
    )
    pipeline_balance: str = option(
        "parameters",
        "pipeline: balance the stages by parameters, or by the time that each part takes (measured)",
        choices=("parameters", "measured"),
    )
    context_parallel: int = option(
        1, "split every sequence over this many ranks, with ring attention between them", minimum=1
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
        None, "fsdp, hybrid: ranks that together hold one copy (default: those of one machine)", minimum=1
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


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Training:
    """Batch size, length of the training, optimizer and learning rate."""

    batch_size: int | None = option(
        None, "samples per rank and micro-batch (default: that of the DataLoader)", minimum=1
    )
    epochs: int | None = option(None, "passes over the data (default: 1, or what max_steps needs)", minimum=1)
    max_steps: int | None = option(None, "stop after this many optimizer steps, in any epoch", minimum=1)
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
    drop_last: bool | None = option(None, "drop an incomplete last global batch (default: as the DataLoader does)")
    data_dir: str | None = option(None, "folder of a recipe's data files (mnist, imagefolder)")
    eval_every: int = option(1, "evaluate every this many epochs and at the end (0: never)", minimum=0)
    limit_val_batches: int | float | None = option(
        None, "evaluate on the first batches only: this many per rank (50), or a share of them (0.1)", above=0
    )
    max_time: int | float | str | None = option(
        None, "end training after this time: '30m', '2h', '1:30:00', or seconds; a resumed run counts anew", above=0
    )
    early_stopping: str | None = option(
        None, "end training when this metric no longer improves: val/loss, max:val/f1 (metrics: see keep_best)"
    )
    patience: int = option(3, "early_stopping: evaluations in a row without improvement before the end", minimum=1)
    min_delta: float = option(0.0, "early_stopping: a smaller change than this is not an improvement", minimum=0)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
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
        "second block), selective (all but matrix products, attention and received tensors)",
    )
    activation_offload: bool = option(False, "keep the activations of the repeated blocks in CPU memory until backward")
    ema_decay: float | None = option(
        None,
        "average the weights over the steps with this decay (0.999); evaluation and results use the average",
        above=0,
    )
    on_nonfinite: str = option("stop", "a NaN or infinite loss: stop, or skip that step", choices=("stop", "skip"))
    loss_weighting: str = option(
        "samples",
        "how micro-batches of unequal size are weighed: by samples, or by label tokens",
        choices=("samples", "tokens"),
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Adapters:
    """Training small adapters of a frozen model (LoRA)."""

    lora_rank: int | None = option(None, "freeze the model and train low-rank adapters of this rank", minimum=1)
    lora_alpha: float | None = option(
        None, "lora_alpha / lora_rank scales what adapters add (default: 2 x lora_rank)", above=0
    )
    lora_dropout: float = option(0.0, "dropout before the adapters", minimum=0)
    lora_targets: str | None = option(
        None,
        "layers that get adapters, by last parts of names (query,value) or patterns ('layers.*.feed.*'), separated "
        "by commas (default: the linear layers of attention)",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Communication:
    """How gradients are exchanged."""

    communication_backend: str | None = option(
        None,
        "nccl, gloo, mpi or phalanx (shared memory within a machine; default: nccl on CUDA, gloo on CPU)",
        choices=(None, "nccl", "gloo", "mpi", "phalanx"),
    )
    find_unused_parameters: bool = option(False, "let parameters be unused in a step (costs a graph walk each step)")
    bucket_cap_mb: float = option(25.0, "size of a gradient bucket in MB", above=0)
    nccl_env: str | None = option(
        None,
        "set the NCCL variables for this kind of cluster (`phalanx nccl-env` shows them); variables that are set stay",
        choices=(None, "gcp", "aws-efa", "infiniband", "ethernet"),
    )
    timeout: float = option(600.0, "seconds a rank waits for the others before it gives up", above=0)
    start_timeout: float | None = option(
        None, "seconds until every rank must have started (default: no limit for scripts)", above=0
    )
    stall_notice: float = option(
        60.0, "seconds that ranks wait before a notice names the rank they wait for (0: no notice)", minimum=0
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Synchronisation:
    """How and how often gradients or weights are combined, other than a plain average in every step."""

    fixed_order: bool = option(
        False,
        "ring: add up gradients in one order over micro-batches and ranks, so that 1, 2, 4 and 8 ranks give equal bits",
    )
    compression: str = option("none", "ddp, ring: compress gradients before they are sent", choices=COMPRESSORS)
    compression_ratio: float = option(0.01, "topk, randomk: the share of the gradient that is sent, up to 1", above=0)
    powersgd_rank: int = option(4, "powersgd: rank of the two thin matrices that approximate a gradient", minimum=1)
    compression_warmup: int = option(0, "steps before compression begins", minimum=0)
    sync_every: int = option(16, "local-sgd, diloco: steps that each rank takes between two averages", minimum=1)
    outer_learning_rate: float = option(0.7, "diloco: rate of the outer Nesterov step", above=0)
    outer_momentum: float = option(0.9, "diloco: momentum of the outer Nesterov step", minimum=0)
    num_servers: int = option(1, "parameter-server: server processes, each with a part of the parameters", minimum=1)
    server_mode: str = option(
        "auto",
        "parameter-server: all workers step together (sync), each at its own pace (async), or none more than "
        "`staleness` steps ahead (bounded); auto: bounded where staleness is given, else sync",
        choices=("auto", "sync", "async", "bounded"),
    )
    staleness: int | None = option(
        None, "parameter-server: how many steps a worker may be ahead of the slowest", minimum=0
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Engines:
    """Settings of Horovod and Ray."""

    address: str | None = option(
        None, "ray: the cluster to run on: ray://head:10001, head:6379 or auto (default: a local one, for this run)"
    )
    min_workers: int | None = option(
        None, "elastic: continue with as few ranks as this when others are lost (num_workers = 2:8)", minimum=1
    )
    cpus_per_worker: float = option(1.0, "ray: CPU cores that each rank reserves", above=0)
    resources_per_worker: str | None = option(
        None,
        "ray: other resources of each rank, such as 'GPU=0.5,big_memory=1' (default: a GPU where ranks use them)",
    )
    placement: str = option(
        "pack",
        "ray: ranks on as few machines as possible (pack) or as many (spread); strict: or the run does not start",
        choices=("pack", "spread", "strict-pack", "strict-spread"),
    )
    hosts: str | None = option(
        None,
        "machines and their slots, node1:8,node2:8, or a file of lines 'node1 slots=8' (./hosts): one launcher on each "
        "over ssh; horovod: for horovodrun (default: this machine)",
    )
    host_discovery_script: str | None = option(
        None, "horovod: elastic: an executable that prints the available machines, one host:slots per line"
    )
    adasum: bool = option(False, "horovod: combine gradients by Adasum instead of averaging them")
    horovod_timeline: str | None = option(
        None, "horovod: write a timeline of the communication to this file, for chrome://tracing or Perfetto"
    )
