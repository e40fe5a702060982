"""The settings of a run's life: checkpoints, what is logged and shown, failures; and those that few runs change."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.config.option import option


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Checkpointing:
    """Which checkpoints a run saves, how often, and where it resumes."""

    checkpoint_dir: str | None = option(
        None,
        "where checkpoints go: a folder or a URL, s3://bucket/kept (default: <run_dir>/checkpoints when "
        "checkpoint_frequency or max_restarts is set)",
        scope="machine place",
        used_by="command trainer",
        in_loop="name the folder where you save: f.save(directory)",
    )
    checkpoint_frequency: int | str | None = option(
        None,
        "save every n epochs (10), every n steps ('500 steps'), or auto: by the cost of a save and the failure "
        "rate of the job; 'auto 12h' gives the mean time between failures (default: as seen in this run, or on a "
        "published cluster)",
        expects="a number of epochs (10), '500 steps', 'auto', or 'auto 12h'",
        used_by="trainer",
        in_loop="call f.save(directory) in your loop",
    )
    checkpoint_kind: str = option(
        "sharded",
        "sharded: one file per rank; full: one safetensors file; incremental: only changed chunks are written",
        choices=("sharded", "full", "incremental"),
    )
    async_checkpoint: bool | str = option(
        True,
        "write in the background; skip: leave out a checkpoint while the previous one is still being written",
        choices=(False, True, "skip"),
        used_by="trainer",
        in_loop="call f.save_async(directory), which returns before the files are written",
    )
    keep_last: int | None = option(3, "how many checkpoints of this run to keep (none: all)", minimum=1)
    keep_best: bool | str | None = option(
        True,
        "also keep the checkpoint with the best value of a metric: val/loss (true; or the "
        "metric of early_stopping), train/loss, val/accuracy, "
        "min:val/<name> or max:val/<name>; false: only the last ones",
        used_by="trainer",
        in_loop="call f.save(directory) when the metric is the best",
    )
    load_best_at_end: bool = option(
        False,
        "after the last step, load the checkpoint of keep_best: the model then has its weights",
        used_by="trainer",
        in_loop="call f.load(path) with the path of the best checkpoint, after your loop",
    )
    resume_from_checkpoint: bool | str = option(
        False,
        "true: resume from the newest complete checkpoint in checkpoint_dir, if any; or a checkpoint's path",
        scope="machine place",
        used_by="command trainer",
        in_loop="call f.load(directory, required=False) before your loop",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Monitoring:
    """Logging and output."""

    run_dir: str | None = option(
        None,
        "folder of this run: config, logs, events (default: runs/<name>-<time>)",
        scope="place",
        used_by="command ranks",
    )
    name: str | None = option(
        None,
        "name of the run (default: the recipe, script or model)",
        scope="place",
        used_by="command ranks",
    )
    tensorboard: bool | str = option(
        False,
        "write TensorBoard files: true, or their folder (true: run_dir, so that TensorBoard shows the run's name)",
        scope="place",
    )
    mlflow: bool | str = option(False, "log to MLflow: true, or the experiment's name (extra: phalanx[mlflow])")
    wandb: bool | str = option(False, "log to Weights & Biases: true, or the project's name (extra: phalanx[wandb])")
    sinks: str | None = option(
        None,
        "receivers of events from other packages (entry points of the group phalanx.sinks), separated by commas",
    )
    metrics_port: int | str | None = option(
        None,
        "serve metrics for Prometheus on this port of the loopback interface, 0: a free one; '0.0.0.0:9400' lets other "
        "machines read them (extra: phalanx[monitor])",
        minimum=0,
        used_by="command",
    )
    debug: str | None = option(
        None,
        "nan: check the output and the gradient of every module, and end with the first one that is not finite (slow)",
        choices=(None, "nan"),
        used_by="trainer",
        in_loop="call torch.autograd.set_detect_anomaly(True)",
    )
    profile: bool | str = option(
        False,
        "record a trace of some steps for phalanx report --profile: 'steps=10:15 ranks=0,3' (default: steps 3 to 5 of "
        "all ranks); memory: allocations too; nvtx: ranges for nsys during the whole run",
        used_by="trainer",
        in_loop="run some steps under torch.profiler.profile()",
    )
    log_every_n_steps: int = option(10, "read losses and report every n steps", minimum=1)
    verbosity: str = option(
        "normal",
        "how much the console shows: quiet (errors, what ranks print and the result), normal, or verbose (every event)",
        choices=("quiet", "normal", "verbose"),
        used_by="command",
    )
    progress: bool = option(True, "show a progress bar, or a line from time to time", used_by="command")
    console_ranks: str = option(
        "0",
        "show the output of rank 0, or of all ranks",
        choices=("0", "all"),
        used_by="command",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Elasticity:
    """Ranks that fail or have to stop."""

    max_restarts: int = option(
        0,
        "number of failures to survive: a lost rank is replaced in place, or, under strategies that cannot, all ranks "
        "restart from the newest checkpoint",
        minimum=0,
        used_by="command",
    )
    min_workers: int | None = option(
        None,
        "elastic: if ranks are lost, continue with as few as this many (num_workers = 2:8)",
        minimum=1,
        scope="layout",
        used_by="recovery",
    )
    spares: int = option(
        0, "ranks that are started in advance and wait to replace a lost one", minimum=0, used_by="recovery"
    )
    heartbeat_timeout: float = option(
        10.0,
        "seconds after which a stopped rank or a silent node counts as lost",
        above=0,
        used_by="recovery",
    )
    preemption_file: str | None = option(
        None,
        "save and exit with code 75 when this file appears on a node (a preemption notice)",
        scope="machine",
        used_by="trainer",
        in_loop="look for the file in your loop, then call f.save(directory) and sys.exit(75)",
    )
    check_replicas_every: int | None = option(
        None,
        "ddp, ring: compare a hash of the ranks' weights every n steps and before saves",
        minimum=1,
        scope="layout",
        used_by="trainer",
        in_loop="leave it out: only a trainer compares its ranks",
    )
    on_corruption: str = option(
        "stop",
        "check_replicas_every: stop the run before the weights are saved, replace the odd rank (max_restarts), or warn",
        choices=("stop", "replace", "warn"),
        needs="check_replicas_every",
        used_by="trainer",
        in_loop="leave it out: only a trainer compares its ranks",
    )
    straggler_factor: float | None = option(
        None,
        "ddp, ring: report a rank that is this many times slower than the others (2)",
        above=1,
        scope="layout",
        used_by="trainer",
        in_loop="leave it out: only a trainer compares its ranks",
    )
    on_straggler: str = option(
        "warn",
        "straggler_factor: warn about the slow rank, or replace it (max_restarts)",
        choices=("warn", "replace"),
        needs="straggler_factor",
        used_by="trainer",
        in_loop="leave it out: only a trainer compares its ranks",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Advanced:
    """Settings that few runs change."""

    start_timeout: float | None = option(
        None,
        "seconds until every rank must have started (default: timeout, and no limit for scripts)",
        above=0,
        scope="machine",
        used_by="command",
    )
    stall_timeout: float | None = option(
        None,
        "with max_restarts: replace a rank that keeps the others waiting for this many seconds",
        above=0,
        used_by="recovery",
    )
    stop_grace: float = option(
        4.5,
        "seconds between asking ranks to stop and killing them",
        above=0,
        scope="machine",
        used_by="command",
    )
    preemption_margin: float = option(
        60.0,
        "save and exit with code 75 this many seconds before a Slurm job's time limit (0: never)",
        minimum=0,
        used_by="trainer",
        in_loop="call f.save(directory) and sys.exit(75) before the time limit",
    )
    base_batch_size: int | None = option(
        None,
        "lr_scaling: the batch that learning_rate was chosen for (default: one rank's batch)",
        minimum=1,
        needs="lr_scaling",
        used_by="trainer",
        in_loop="scale the rate that you give the optimizer by f.world_size",
    )
    decay_norms: bool = option(
        True,
        "weight_decay: also decay biases and norms, the parameters of one dimension (lars and lamb never do)",
        used_by="trainer",
        in_loop="give the optimizer a group of biases and norms with weight_decay=0",
    )
    lora_dropout: float = option(0.0, "dropout before the adapters of LoRA", minimum=0, needs="lora_rank", below=1)
    lora_base: str | None = option(
        None,
        "keep the frozen weights of linear layers in 4 bits (QLoRA)",
        choices=(None, "nf4"),
        needs="lora_rank",
        strategies=("ddp", "fsdp"),
    )
    min_delta: float = option(
        0.0,
        "early_stopping: a smaller change than this is not an improvement",
        minimum=0,
        needs="early_stopping",
        used_by="trainer",
        in_loop="leave your loop when the metric no longer improves",
    )
    compression_warmup: int = option(0, "steps before compression begins", minimum=0)
    outer_learning_rate: float = option(0.7, "diloco: rate of the outer Nesterov step", above=0, strategies=("diloco",))
    outer_momentum: float = option(
        0.9, "diloco: momentum of the outer Nesterov step", minimum=0, strategies=("diloco",), below=1
    )
    keep_every: int | None = option(None, "always keep checkpoints whose step is a multiple of this", minimum=1)
    memory_frequency: int = option(
        10,
        "fsdp with max_restarts: every n steps each rank keeps a copy of its shards in another rank's memory",
        minimum=1,
        used_by="recovery",
    )
    straggler_steps: int = option(
        50,
        "straggler_factor: compare the ranks' own times over this many steps",
        minimum=1,
        needs="straggler_factor",
        used_by="trainer",
        in_loop="leave it out: only a trainer compares its ranks",
    )
    reference_throughput: float | None = option(
        None,
        "measured samples per second of one rank, to report the speedup of the run",
        above=0,
    )
    tensorboard_histograms: int = option(
        0,
        "write histograms of weights, gradients, norms, update ratios to TensorBoard every n epochs (0: never)",
        minimum=0,
        used_by="trainer",
        in_loop="write them by torch.utils.tensorboard.SummaryWriter in your loop",
    )
    bucket_cap_mb: float = option(
        25.0, "ddp, ring: size of a gradient bucket in MB", above=0, strategies=("ddp", "ring")
    )
    scaler_init_scale: float = option(65536.0, "first loss scale of fp16", above=0)
    scaler_growth_interval: int = option(2000, "steps without overflow before the loss scale doubles", minimum=1)
