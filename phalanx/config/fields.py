"""All settings, in groups. Each field is a Python argument, a flag, a TOML key and an environment variable.

The groups have fields only; `Settings`, which inherits them, has the methods, which take time to generate.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.config.backends import BACKENDS
from phalanx.config.option import option
from phalanx.config.strategies import COMPRESSORS, TABLE

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

STRATEGY_NAMES = tuple(
    dict.fromkeys(
        (
            "auto",
            *(row.name for row in TABLE if row.home is not None),
            *(name for backend in BACKENDS.values() for name in backend.strategies),
        )
    )
)
PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
OPTIMIZERS = ("adamw", "adamw8bit", "adam", "sgd", "rmsprop", "adagrad", "lars", "lamb")
LR_SCHEDULES = ("constant", "linear", "cosine", "inverse-sqrt")

IGNORED_LABEL = -100
"""Label index that the loss ignores, in torch's cross entropy and in Hugging Face models."""


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Resources:
    """How many ranks run, and where."""

    num_workers: int | None = option(
        None,
        "ranks in the whole job (default: one per GPU, or 1 on CPU); 2:8 is elastic: from 2 to 8; num_gpus=8 means "
        "8 with device=cuda, gpus_per_node=8 means 8 on each of num_nodes",
        minimum=1,
        scope="machine",
        used_by="command",
    )
    num_nodes: int = option(1, "nodes in the job", minimum=1, scope="machine", used_by="command")
    node_rank: int | None = option(
        None,
        "which node this is, from 0 (with num_nodes > 1)",
        minimum=0,
        scope="machine",
        used_by="command",
    )
    rdzv_endpoint: str | None = option(
        None, "host:port of the rendezvous (with num_nodes > 1)", scope="machine", used_by="command"
    )
    device: str = option(
        "auto",
        "where the ranks compute",
        choices=("auto", "cuda", "cpu"),
        scope="machine",
        used_by="command ranks",
    )
    share_gpus: bool = option(
        False,
        "run several NCCL ranks per GPU to debug a multi-GPU job (timings are not meaningful)",
        backends=("pytorch-ddp", "pytorch-fsdp"),
        scope="machine",
        used_by="command ranks",
    )
    threads_per_rank: int | None = option(
        None,
        "CPU threads of each rank (default: cores / ranks)",
        minimum=1,
        scope="machine",
        used_by="command ranks",
    )
    hosts: str | None = option(
        None,
        "nodes and their slots, node1:8,node2:8, or a file of lines 'node1 slots=8' (./hosts): one launcher on each "
        "over ssh (default: this one alone)",
        backends=("pytorch-ddp", "pytorch-fsdp"),
        scope="machine",
        used_by="command",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Parallelism:
    """What starts the ranks, and how they share the work."""

    backend: str = option(
        "pytorch-ddp",
        "name of a launcher and a strategy",
        choices=tuple(BACKENDS),
        entry_points="phalanx.engines",
        used_by="command ranks",
    )
    strategy: str = option(
        "auto",
        "how the ranks share the work (auto: the default of the backend, with shared memory on the CPUs of one "
        "node, or fsdp for a model whose copies do not fit)",
        choices=STRATEGY_NAMES,
        entry_points="phalanx.strategies",
    )
    tensor_parallel: int = option(
        1,
        "split every layer of the model over this many neighbouring ranks, by the model's tensor_plan()",
        minimum=1,
        scope="layout split",
    )
    pipeline_parallel: int = option(
        1, "split the model into consecutive stages, on this many groups of ranks", minimum=1, scope="layout split"
    )
    pipeline_schedule: str = option(
        "1f1b",
        "pipeline: the order of forward and backward passes (interleaved and zero-bubble: several stages per rank)",
        choices=PIPELINE_SCHEDULES,
        scope="split",
        needs="pipeline_parallel",
    )
    microbatches: int | None = option(
        None,
        "pipeline: parts of a batch that are processed at once (default: as many as keep the bubble small)",
        minimum=1,
        scope="split",
        needs="pipeline_parallel",
    )
    pipeline_cuts: str | None = option(
        None,
        "pipeline: names of the modules that begin a stage, separated by commas; measured: stages that take equal time "
        "(default: stages with equal numbers of parameters)",
        scope="split",
        needs="pipeline_parallel",
    )
    context_parallel: int = option(
        1,
        "split every sequence over this many ranks, with ring attention between them",
        minimum=1,
        scope="layout split",
    )
    expert_parallel: int = option(
        1,
        "spread the experts of a mixture-of-experts model over this many data-parallel ranks",
        minimum=1,
        scope="layout split",
    )
    zero_stage: int | None = option(
        None,
        "shard what ddp replicates: optimizer states (1), gradients too (2), parameters too (3)",
        choices=(None, 1, 2, 3),
        scope="layout split",
    )
    sharding: str = option(
        "auto",
        "fsdp: shard parameters too (full), keep them whole between forward and backward (grad-op), or shard within "
        "groups of shard_size ranks and replicate over the groups (hybrid, hybrid-grad-op); torch's names FULL_SHARD, "
        "SHARD_GRAD_OP, HYBRID_SHARD, HYBRID_SHARD_ZERO2 and NO_SHARD mean the same; auto: by zero_stage, else full",
        choices=("auto", "full", "grad-op", "hybrid", "hybrid-grad-op"),
        scope="layout split",
    )
    shard_size: int | None = option(
        None,
        "fsdp, hybrid: ranks that together hold one copy (default: those of one node)",
        minimum=1,
        scope="layout split",
    )
    wrap_class: str | None = option(
        None,
        "fsdp: class of the blocks that are gathered one at a time (default: the model's repeated blocks)",
        scope="split",
    )
    offload: str = option(
        "none",
        "fsdp: keep parameters, gradients and optimizer states in CPU memory; nvme: on disk, in nvme_path",
        choices=("none", "cpu", "nvme"),
        scope="layout split",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Training:
    """Batch size, length of the training, optimizer and learning rate."""

    batch_size: int | None = option(
        None, "samples per rank and micro-batch (default: that of the DataLoader)", minimum=1
    )
    epochs: int | None = option(
        None,
        "passes over the data (default: 1, or what max_steps needs)",
        minimum=1,
        used_by="value trainer",
        in_loop="write it in your loop: for epoch in range(3)",
    )
    max_steps: int | None = option(
        None,
        "stop after this many optimizer steps, in any epoch",
        minimum=1,
        used_by="value trainer",
        in_loop="leave your loop when f.step has reached it",
    )
    learning_rate: float = option(
        1e-3,
        "peak learning rate, before lr_scaling",
        above=0,
        used_by="value trainer",
        in_loop="give it to the optimizer that you make: torch.optim.AdamW(model.parameters(), lr=1e-3)",
    )
    optimizer: str = option(
        "adamw",
        "optimizer, if none is given in Python",
        choices=OPTIMIZERS,
        used_by="value trainer",
        in_loop="make it, and prepare it: optimizer = f.prepare(torch.optim.AdamW(model.parameters()))",
    )
    momentum: float = option(
        0.9,
        "momentum of sgd, lars and rmsprop, beta1 of adam, adamw, adamw8bit and lamb",
        minimum=0,
        used_by="value trainer",
        in_loop="give it to the optimizer that you make: torch.optim.AdamW(model.parameters(), lr=1e-3)",
    )
    weight_decay: float = option(
        0.0,
        "decay of weights (decoupled for adamw and lamb)",
        minimum=0,
        used_by="value trainer",
        in_loop="give it to the optimizer that you make: torch.optim.AdamW(model.parameters(), lr=1e-3)",
    )
    lr_schedule: str = option(
        "constant",
        "shape of the learning rate after warm-up",
        choices=LR_SCHEDULES,
        used_by="trainer",
        in_loop="make a torch scheduler and prepare it: scheduler = f.prepare(scheduler)",
    )
    warmup: int | float = option(
        0,
        "warm-up: a number of steps (500), or a share of the run (0.1)",
        minimum=0,
        used_by="trainer",
        in_loop="make a torch scheduler and prepare it: scheduler = f.prepare(scheduler)",
    )
    lr_scaling: str = option(
        "none",
        "scale learning_rate with the global batch",
        choices=("none", "linear", "sqrt"),
        used_by="trainer",
        in_loop="scale the rate that you give the optimizer by f.world_size",
    )
    seed: int = option(0, "seed of weights, sample order and dropout", minimum=0)
    deterministic: bool = option(False, "use deterministic kernels only (slower)")
    drop_last: bool | None = option(None, "drop an incomplete last global batch (default: as the DataLoader does)")
    eval_every: int | float | str = option(
        1,
        "evaluate every n epochs (2), every n steps ('500 steps') or after each share of an epoch (0.25, '25%'), and "
        "at the end; 0: never",
        minimum=0,
        expects="a number of epochs (2), '500 steps', a share of an epoch (0.25 or '25%'), or 0: never",
        used_by="trainer",
        in_loop="evaluate in your loop, with f.prepare_loader(data, training=False)",
    )
    limit_val_batches: int | float | None = option(
        None,
        "evaluate on the first batches only: this many per rank (50), or a share of them (0.1)",
        above=0,
        used_by="trainer",
        in_loop="evaluate in your loop, with f.prepare_loader(data, training=False)",
    )
    sanity_val_batches: int = option(
        2,
        "before the first step, try evaluation on this many batches per rank (0: off)",
        minimum=0,
        used_by="trainer",
        in_loop="evaluate in your loop, with f.prepare_loader(data, training=False)",
    )
    fast_dev_run: bool | int = option(
        False,
        "try this many batches of training (true: 1) and evaluation, and keep nothing",
        minimum=0,
        used_by="trainer",
        in_loop="leave your loop after a few batches",
    )
    max_time: int | float | str | None = option(
        None,
        "end training after this time: '30m', '2h', '1:30:00', or seconds; a resumed run starts from zero",
        above=0,
        used_by="trainer",
        in_loop="leave your loop when the time is over",
    )
    early_stopping: str | None = option(
        None,
        "end training when this metric no longer improves: val/loss, max:val/f1 (metrics: see keep_best)",
        used_by="trainer",
        in_loop="leave your loop when the metric no longer improves",
    )
    patience: int = option(
        3,
        "early_stopping: end after this many evaluations in a row without improvement",
        minimum=1,
        needs="early_stopping",
        used_by="trainer",
        in_loop="leave your loop when the metric no longer improves",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Optimization:
    """Precision, accumulation, clipping, compilation."""

    mixed_precision: bool | str = option(
        False,
        "false, bf16, fp16 (with loss scaling), fp8 (bf16, and linear layers in 8 bits on GPUs that have them), "
        "or true: fp16 on CUDA, bf16 on a CPU that has it",
        choices=(False, True, "fp16", "bf16", "fp8"),
    )
    gradient_accumulation_steps: int = option(
        1, "micro-batches added up for one optimizer step", minimum=1, scope="split"
    )
    gradient_clipping: float | None = option(
        None,
        "largest global gradient norm",
        above=0,
        used_by="trainer",
        in_loop="call f.clip_grad_norm(1.0) before optimizer.step()",
    )
    compile: bool = option(False, "compile the model with torch.compile")
    capture: bool | None = option(
        None,
        "launch a whole training step as one CUDA graph, which speeds up small steps (default: on if nothing in "
        "the step needs the host)",
        used_by="trainer",
        in_loop="leave it out: the steps of your loop are not recorded as CUDA graphs",
    )
    channels_last: bool = option(
        False,
        "store the weights of convolutions channels last, which GPUs compute fastest; the images follow them",
    )
    sync_batch_norm: bool = option(
        False,
        "let batch norms use the mean and variance of all ranks' samples, as one process with the global batch would",
        scope="split",
    )
    activation_checkpointing: bool | str = option(
        False,
        "recompute in backward instead of keeping activations: full (or true: every repeated block), 'every 2' (every "
        "second block), selective (all but matrix products, attention and received tensors), 'budget 0.5' (with "
        "compile: keep this share, and recompute what costs least per byte)",
    )
    activation_offload: bool = option(False, "keep the activations of the repeated blocks in CPU memory until backward")
    ema_decay: float | None = option(
        None,
        "average the weights over the steps with this decay (0.999); evaluation and results use the average",
        above=0,
        below=1,
        used_by="trainer",
        in_loop="average the weights by torch.optim.swa_utils.AveragedModel",
    )
    on_nonfinite: str = option("stop", "a NaN or infinite loss: stop, or skip that step", choices=("stop", "skip"))
    loss_weighting: str = option(
        "auto",
        "weight unequal micro-batches by samples or by labels (tokens); auto: as the loss averages",
        choices=("auto", "samples", "tokens"),
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Adapters:
    """Training small adapters of a frozen model (LoRA)."""

    lora_rank: int | None = option(
        None, "freeze the model and train low-rank adapters of this rank", minimum=1, scope="layout"
    )
    lora_alpha: float | None = option(
        None, "lora_alpha / lora_rank scales what adapters add (default: 2 x lora_rank)", above=0, needs="lora_rank"
    )
    lora_targets: str | None = option(
        None,
        "layers that get adapters, by last parts of names (query,value) or patterns ('layers.*.feed.*'), separated "
        "by commas (default: the linear layers of attention)",
        needs="lora_rank",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Communication:
    """How gradients are exchanged."""

    communication_backend: str | None = option(
        None,
        "nccl, gloo, mpi or phalanx (shared memory within a node; default: nccl on CUDA, gloo on CPU)",
        choices=(None, "nccl", "gloo", "mpi", "phalanx"),
        scope="layout",
    )
    find_unused_parameters: bool = option(False, "let parameters be unused in a step (costs a graph walk each step)")
    nccl_env: str | None = option(
        None,
        "set the NCCL variables for this kind of cluster (see phalanx doctor --nccl-env); your own values are kept",
        choices=(None, "gcp", "aws-efa", "infiniband", "ethernet"),
        scope="machine",
        used_by="command",
    )
    timeout: float = option(
        600.0,
        "seconds a rank waits for the others before it gives up",
        above=0,
        scope="machine",
        used_by="command ranks",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Synchronisation:
    """How and how often gradients or weights are combined, other than a plain average in every step."""

    fixed_order: bool = option(
        False,
        "ring: add up gradients in one order over micro-batches and ranks, so that 1, 2, 4 and 8 ranks give equal bits",
        strategies=("ring",),
        scope="layout",
    )
    compression: str = option(
        "none", "ddp, ring: compress gradients before they are sent", choices=COMPRESSORS, scope="layout"
    )
    compression_ratio: float = option(0.01, "topk, randomk: the share of the gradient that is sent", above=0, maximum=1)
    powersgd_rank: int = option(4, "powersgd: rank of the two thin matrices that approximate a gradient", minimum=1)
    sync_every: int = option(
        16,
        "local-sgd, diloco: steps that each rank takes between two averages",
        minimum=1,
        strategies=("local-sgd", "diloco"),
    )
    num_servers: int = option(1, "parameter-server: server processes, each with a part of the parameters", minimum=1)
    server_mode: str = option(
        "auto",
        "parameter-server: all workers step together (sync), each at its own pace (async), or none more than "
        "`staleness` steps ahead (bounded); auto: bounded if staleness is given, else sync",
        choices=("auto", "sync", "async", "bounded"),
    )
    staleness: int | None = option(
        None, "parameter-server: how many steps a worker may be ahead of the slowest", minimum=0
    )
