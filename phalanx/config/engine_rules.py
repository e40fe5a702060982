"""Rules of the engines other than torch: which settings each one uses, and which packages it needs."""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

from phalanx.config.fields import TENSORFLOW_STRATEGIES
from phalanx.config.rules import RANKS, Mistakes, rule
from phalanx.config.settings import FIELDS, RECOVERY, Host, Settings, parse_hosts


class Package(NamedTuple):
    """What an engine imports, and how to install it."""

    module: str
    title: str
    install: str


PACKAGES = {
    "horovod": Package(
        "horovod",
        "Horovod",
        "Build it: make horovod, or python -m phalanx.engines.horovod.build. (The extra phalanx[horovod] alone does "
        "not compile: docs/horovod.md)",
    ),
    "ray": Package("ray", "Ray", "Run: pip install 'phalanx[ray]'"),
    "tensorflow": Package("tensorflow", "TensorFlow", "Run: pip install 'phalanx[tensorflow]'"),
}
"""By backend."""

_USED_BY = {
    "address": ("ray",),
    "cpus_per_worker": ("ray",),
    "resources_per_worker": ("ray",),
    "placement": ("ray",),
    "hosts": ("horovod", "pytorch-ddp", "pytorch-fsdp", "deepspeed"),
    "host_discovery_script": ("horovod",),
    "adasum": ("horovod",),
    "horovod_timeline": ("horovod",),
    "share_gpus": ("pytorch-ddp", "pytorch-fsdp"),
}
"""The backends that use a setting."""

_STRATEGIES_OF = {"horovod": ("horovod",), "tensorflow": TENSORFLOW_STRATEGIES}
_BACKEND_OF = {"horovod": "horovod", "mirrored": "tensorflow", "multiworker": "tensorflow"}

_USED_BY_KERAS = {
    *("num_workers", "num_gpus", "num_nodes", "gpus_per_node", "node_rank", "rdzv_endpoint", "device"),
    *("threads_per_rank", "backend", "strategy", "batch_size", "epochs", "max_steps", "learning_rate", "optimizer"),
    *("momentum", "weight_decay", "seed", "drop_last", "data_dir", "mixed_precision", "timeout", "start_timeout"),
    *("num_servers", "checkpoint_dir", "checkpoint_frequency", "resume_from_checkpoint", "run_dir", "name"),
    *("tensorboard", "tensorboard_dir", "mlflow_tracking", "mlflow_experiment", "log_every_n_steps", "progress"),
    *("console_ranks", "verbosity", "wandb", "sinks", "max_restarts", "stop_grace"),
}
_IGNORED_BY_KERAS = {
    *("gradient_accumulation_steps", "gradient_clipping", "scaler_init_scale", "scaler_growth_interval", "compile"),
    *("activation_checkpointing", "activation_offload", "on_nonfinite", "loss_weighting", "lr_schedule", "warmup"),
    *("lr_scaling", "base_batch_size", "deterministic", "eval_every", "communication_backend"),
    *("find_unused_parameters", "bucket_cap_mb", "nccl_env", "keep_last", "reference_throughput"),
    *("keep_best", "early_stopping", "patience", "min_delta", "limit_val_batches", "max_time", "ema_decay"),
    "profile",
}
"""Settings that a config for several backends may hold; without those that split a model over ranks."""
_KERAS_SCHEDULES = {
    "linear": "keras.optimizers.schedules.PolynomialDecay(0.001, decay_steps=1000, end_learning_rate=0.0)",
    "cosine": "keras.optimizers.schedules.CosineDecay(0.001, decay_steps=1000)",
    "inverse-sqrt": "MySchedule(), a class of yours derived from keras.optimizers.schedules.LearningRateSchedule",
}
_IN_KERAS = {
    "gradient_clipping": "keras.optimizers.Adam(..., global_clipnorm={value})",
    "gradient_accumulation_steps": "keras.optimizers.Adam(..., gradient_accumulation_steps={value}), of Keras 3",
    "lr_schedule": "learning_rate={schedule}",
    "warmup": "learning_rate=keras.optimizers.schedules.CosineDecay(0.0, decay_steps=1000, warmup_target=0.001, "
    "warmup_steps={steps})",
    "lr_scaling": "the scaled rate itself: keras.optimizers.Adam(0.001 * workers)",
    "scaler_init_scale": "keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale={value})",
    "scaler_growth_interval": "keras.mixed_precision.LossScaleOptimizer(optimizer, dynamic_growth_steps={value})",
    "compile": "model.compile(..., jit_compile=True)",
    "on_nonfinite": "keras.mixed_precision.LossScaleOptimizer(optimizer), which skips steps that are not finite",
    "deterministic": "tf.config.experimental.enable_op_determinism()",
    "early_stopping": "model.fit(..., callbacks=[keras.callbacks.EarlyStopping(...)])",
    "ema_decay": "keras.optimizers.Adam(..., use_ema=True, ema_momentum={value})",
    "lora_rank": "layer.enable_lora({value}) for layers of Keras 3",
}
"""What to write in `model_fn`, where Keras has the same thing; rates and numbers of steps are examples."""
_UNUSED = "with backend = 'tensorflow', which does not follow it: "


def settings_of_start(launcher: str) -> tuple[str, ...]:
    """Return the settings that only the launcher uses; they are not forwarded to ranks."""
    return tuple(name for name, users in _USED_BY.items() if launcher in users)


def missing_package(settings: Settings) -> Package | None:
    """Return the package that the backend needs and this environment lacks."""
    package = PACKAGES.get(settings.backend)
    return package if package is not None and importlib.util.find_spec(package.module) is None else None


@rule("backend", "strategy")
def backend_settings(settings: Settings) -> Mistakes:
    """Report settings that the backend does not use."""
    for name in settings.changed(*_USED_BY):
        users = _USED_BY[name]
        if settings.backend not in users:
            names = " or ".join(repr(user) for user in users)
            yield settings.mistake(
                name,
                f" with backend = {settings.backend!r}, which does not follow it: write backend = {names}, or leave "
                f"{name} out.",
            )


@rule("backend", "strategy")
def keras(settings: Settings) -> Mistakes:
    """Report settings that no Keras model can use."""
    if settings.backend != "tensorflow":
        return
    for name in settings.changed(*FIELDS):
        if name not in _USED_BY_KERAS | _IGNORED_BY_KERAS:
            yield settings.mistake(name, f" {_UNUSED}leave {name} out.")


@rule("backend", "strategy")
def horovod_hosts(settings: Settings) -> Mistakes:
    """Check that the machines are named once, and that an elastic run knows several."""
    if settings.backend != "horovod":
        return
    if settings.hosts is not None and settings.host_discovery_script is not None:
        yield "hosts", "hosts and host_discovery_script both say which machines there are: leave one of them out."
    if settings.min_workers is not None and settings.hosts is None and settings.host_discovery_script is None:
        yield settings.mistake(
            "min_workers",
            ": an elastic run needs several machines: write host_discovery_script = './hosts.sh', or hosts = "
            "'node1:8,node2:8'.",
        )


@rule("backend", "strategy", "adasum", *RANKS)
def adasum(settings: Settings) -> Mistakes:
    """Check what Adasum requires of the ranks."""
    if settings.backend != "horovod" or not settings.adasum:
        return
    ranks = settings.total_ranks
    if settings.min_workers is not None or settings.host_discovery_script is not None:
        yield "adasum", "adasum = True: Adasum needs MPI, which cannot lose or add ranks: leave adasum out."
    elif ranks is not None and ranks.bit_count() != 1:
        yield (
            "adasum",
            f"adasum = True with {ranks} ranks: Adasum combines pairs, then pairs of pairs, and so on: give it 2, 4, "
            "8, 16, ... ranks, or leave adasum out.",
        )


@rule("backend", "strategy", "node_rank", *RANKS)
def host_slots(settings: Settings) -> Mistakes:
    """Check the list of machines, and that it has room for the ranks."""
    if settings.hosts is None or settings.backend not in _USED_BY["hosts"]:
        return
    try:
        hosts = parse_hosts(settings.hosts)
    except ValueError as error:
        yield settings.mistake("hosts", f": {error}")
        return
    slots, ranks = sum(host.slots for host in hosts), settings.total_ranks
    if ranks is not None and ranks > slots:
        yield settings.mistake("hosts", f" has {slots} slots, but {ranks} ranks were asked for.")
    if settings.backend != "horovod":
        yield from _ssh_hosts(settings, hosts)
    elif settings.min_workers is not None and len(hosts) < 2:
        yield settings.mistake(
            "min_workers",
            " with one machine: Horovod gives up a machine that lost a rank, so there must be two. On one machine, "
            "give it under two names: hosts = 'localhost:1,127.0.0.1:1'.",
        )


def _ssh_hosts(settings: Settings, hosts: tuple[Host, ...]) -> Mistakes:
    """Check what one launcher per machine requires: ranks for each, and a list that alone numbers the machines."""
    total, are_equal = settings.total_ranks, len({host.slots for host in hosts}) == 1
    if are_equal and (total or len(hosts)) % len(hosts):
        yield settings.mistake("hosts", f": {total} ranks cannot be spread evenly over {len(hosts)} machines.")
    if not are_equal and total != sum(host.slots for host in hosts):
        text = f": {total} ranks do not fill machines with different slots: change the slots, or leave the number out."
        yield settings.mistake("hosts", text)
    if not are_equal and settings.resolved_sharding.startswith("hybrid") and settings.shard_size is None:
        yield settings.mistake("hosts", " has machines with different slots, so hybrid sharding needs shard_size.")
    # A launcher that was started for one of the machines knows its number and where the others are.
    own = () if settings.rdzv_endpoint else (("node_rank", None),)
    for name, says in (("num_nodes", 1), ("gpus_per_node", None), *own):
        if getattr(settings, name) not in (says, len(hosts) if name == "num_nodes" else says):
            yield settings.mistake(name, f" with hosts = {settings.hosts!r}, which says it: leave {name} out.")


@rule("backend", "strategy", "min_workers", *RANKS)
def min_workers(settings: Settings) -> Mistakes:
    """Check the smallest number of ranks against the largest."""
    least, most = settings.min_workers, settings.total_ranks
    if least is None:
        return
    if most is None:
        yield "min_workers", f"min_workers = {least} without num_workers: set the largest number of ranks, too."
    elif least > most:
        yield "min_workers", f"min_workers = {least} is more than num_workers = {most}."
    elif settings.backend not in ("ray", "horovod") and least < most and settings.recovery != "resize":
        yield settings.mistake(
            "min_workers",
            f" with strategy = {settings.resolved_strategy!r}: it cannot go on with fewer ranks. Strategies that can: "
            f"{', '.join(name for name, kind in RECOVERY.items() if kind == 'resize')}. With max_restarts a lost rank "
            "is replaced, or all ranks start again from the last checkpoint.",
        )


@rule("backend", "strategy")
def strategy_of_backend(settings: Settings) -> Mistakes:
    """Check that backend and strategy go together."""
    if settings.strategy == "auto":
        return
    allowed = _STRATEGIES_OF.get(settings.backend)
    if allowed is not None and settings.strategy not in allowed:
        names = ", ".join(repr(name) for name in allowed)
        yield settings.mistake(
            "strategy",
            f" does not go with backend = {settings.backend!r}, which has {names}: leave strategy out, or write "
            "backend = 'pytorch-ddp'.",
        )
    needed = _BACKEND_OF.get(settings.strategy)
    if needed is not None and settings.backend != needed:
        yield settings.mistake("strategy", f" with backend = {settings.backend!r}: write backend = {needed!r}.")


ENGINE_RULES = (
    backend_settings,
    keras,
    horovod_hosts,
    adasum,
    host_slots,
    min_workers,
    strategy_of_backend,
)
"""The last one comes last: with a wrong strategy the others could not judge."""


def unused_settings(settings: Settings) -> Mistakes:
    """Yield (setting, what to write instead) for settings that the backend ignores.

    A config that several backends share may hold them: the run warns at its start. As an argument or a flag to this
    backend they are refused.
    """
    if settings.backend == "tensorflow":
        for name in settings.changed(*FIELDS):
            if name in _IGNORED_BY_KERAS:
                yield settings.mistake(name, f" {_UNUSED}{_instead_in_keras(name, getattr(settings, name))}")
    if settings.backend != "horovod":
        return
    if settings.num_nodes > 1 and settings.hosts is None and settings.host_discovery_script is None:
        yield settings.mistake(
            "num_nodes",
            " with backend = 'horovod': horovodrun starts the ranks of all machines from one of them. Name the "
            "machines instead: hosts = 'node1:8,node2:8'.",
        )
    if settings.changed("bucket_cap_mb"):
        yield settings.mistake(
            "bucket_cap_mb",
            " with backend = 'horovod', which has its own buffer: set HOROVOD_FUSION_THRESHOLD (bytes) in the "
            "environment instead.",
        )


def _instead_in_keras(name: str, value: Any) -> str:
    if name not in _IN_KERAS:
        return f"leave {name} out."
    steps = value if isinstance(value, int) else 100
    line = _IN_KERAS[name].format(value=value, steps=steps, schedule=_KERAS_SCHEDULES.get(str(value), ""))
    return f"Keras has its own. Leave {name} out, and write in model_fn, by your model's Keras: {line}"


def unused_note(settings: Settings) -> str:
    """Return the warning about settings that the backend ignores; empty where it uses all."""
    unused = dict(unused_settings(settings))
    given = ", ".join(f"{name} = {getattr(settings, name)!r}" for name in unused)
    keras_lines = {text.rpartition("Keras: ")[2] for text in unused.values() if "Keras: " in text}
    instead = f" Write in model_fn, by your model's Keras: {'; '.join(sorted(keras_lines))}" if keras_lines else ""
    return f"not used by backend = {settings.backend!r}: {given}.{instead}" if unused else ""
