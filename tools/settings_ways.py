"""Where each setting counts, as the refusals say: the table of docs/configuration.md, and the walk of the tests.

A setting counts in a way if it is accepted there when it is changed, together with the settings that it goes with.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from phalanx.config import resolve
from phalanx.config.option import kinds
from phalanx.config.settings import FIELDS
from phalanx.config.ways import SCRIPT, in_loop, refuse_in_loop, unused_by_script
from phalanx.errors import ConfigError, UsageError

WAYS: dict[str, dict[str, Any]] = {
    "trainer": {},
    "own loop": {},
    "script": {},
    "horovod": {"backend": "horovod", "strategy": "horovod"},
    "deepspeed": {"backend": "deepspeed", "strategy": "deepspeed"},
    "ray": {"backend": "ray"},
    "tensorflow": {"backend": "tensorflow"},
    "parameter servers": {"strategy": "parameter-server"},
}
"""The ways to train, with the settings that choose each."""

_TWO = {"num_workers": 2}
_PIPELINE = {"pipeline_parallel": 2, **_TWO}
_STOPPING = {"early_stopping": "val/loss"}
_CHECKED = {"check_replicas_every": 1, **_TWO}
_STRAGGLER = {"straggler_factor": 2.0, **_TWO}
_FSDP = {"strategy": "fsdp", **_TWO}
_DILOCO = {"strategy": "diloco", **_TWO}
_LORA = {"lora_rank": 2, "lora_targets": "0"}
EXAMPLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "num_workers": (2, {}),
    "num_nodes": (2, {"num_workers": 2, "rdzv_endpoint": "node0:29400", "node_rank": 0}),
    "node_rank": (1, {"num_workers": 2, "num_nodes": 2, "rdzv_endpoint": "node0:29400"}),
    "rdzv_endpoint": ("node0:29400", {"num_workers": 2, "num_nodes": 2, "node_rank": 0}),
    "device": ("cpu", {}),
    "share_gpus": (True, {"device": "auto"}),
    "backend": ("pytorch-fsdp", {}),
    "strategy": ("fsdp", _TWO),
    "tensor_parallel": (2, _TWO),
    "pipeline_parallel": (2, _TWO),
    "pipeline_schedule": ("gpipe", _PIPELINE),
    "microbatches": (4, _PIPELINE),
    "pipeline_cuts": ("1", _PIPELINE),
    "context_parallel": (2, _TWO),
    "expert_parallel": (2, _TWO),
    "zero_stage": (2, _TWO),
    "sharding": ("grad-op", _FSDP),
    "shard_size": (1, {**_FSDP, "sharding": "hybrid"}),
    "wrap_class": ("Linear", _FSDP),
    "offload": ("cpu", _FSDP),
    "deepspeed_config": ('{"zero_optimization": {"stage": 1}}', {}),
    "batch_size": (2, {}),
    "epochs": (2, {}),
    "max_steps": (1, {}),
    "optimizer": ("sgd", {}),
    "momentum": (0.5, {}),
    "weight_decay": (0.5, {}),
    "lr_schedule": ("linear", {}),
    "warmup": (2, {}),
    "lr_scaling": ("linear", {"gradient_accumulation_steps": 2}),
    "eval_every": (0, {}),
    "limit_val_batches": (1, {}),
    "fast_dev_run": (True, {}),
    "max_time": ("1h", {}),
    "early_stopping": ("val/loss", {}),
    "patience": (1, _STOPPING),
    "mixed_precision": ("bf16", {}),
    "gradient_clipping": (0.01, {}),
    "activation_checkpointing": (True, {}),
    "ema_decay": (0.5, {}),
    "loss_weighting": ("samples", {}),
    "lora_rank": (2, {"lora_targets": "0"}),
    "lora_alpha": (1.0, _LORA),
    "lora_targets": ("0", {"lora_rank": 2}),
    "communication_backend": ("gloo", _TWO),
    "find_unused_parameters": (True, _TWO),
    "sync_batch_norm": (True, _TWO),
    "timeout": (300.0, {}),
    "fixed_order": (True, {"strategy": "ring", **_TWO}),
    "compression": ("fp16", _TWO),
    "compression_ratio": (0.5, {"compression": "topk", **_TWO}),
    "powersgd_rank": (1, {"compression": "powersgd", **_TWO}),
    "sync_every": (1, {"strategy": "local-sgd", **_TWO}),
    "num_servers": (2, {"strategy": "parameter-server"}),
    "server_mode": ("async", {"strategy": "parameter-server"}),
    "staleness": (1, {"strategy": "parameter-server"}),
    "address": ("ray://head:10001", {"backend": "ray"}),
    "min_workers": (1, _TWO),
    "hosts": ("a:1,b:1", {"num_workers": 2}),
    "resources_per_worker": ("CPU=1", {"backend": "ray"}),
    "cpus_per_worker": (2.0, {"backend": "ray"}),
    "placement": ("spread", {"backend": "ray"}),
    "host_discovery_script": ("./hosts.sh", {"backend": "horovod"}),
    "adasum": (True, {"backend": "horovod"}),
    "horovod_timeline": ("wire.json", {"backend": "horovod"}),
    "nvme_path": ("fast", {"strategy": "deepspeed"}),
    "checkpoint_dir": ("kept", {"checkpoint_frequency": 1}),
    "checkpoint_frequency": (1, {}),
    "checkpoint_kind": ("full", {"checkpoint_frequency": 1}),
    "async_checkpoint": (False, {"checkpoint_frequency": 1}),
    "keep_last": (1, {"checkpoint_frequency": 1, "epochs": 3}),
    "keep_best": (False, {"checkpoint_frequency": 1}),
    "load_best_at_end": (True, {"checkpoint_frequency": 1, "epochs": 2}),
    "resume_from_checkpoint": (True, {"checkpoint_dir": "kept", "checkpoint_frequency": 1}),
    "run_dir": ("another", {}),
    "name": ("another", {"run_dir": None, "tensorboard": True}),
    "sinks": ("other", {}),
    "metrics_port": (0, {}),
    "tensorboard": (True, {}),
    "mlflow": (True, {}),
    "wandb": (True, {}),
    "debug": ("nan", {}),
    "profile": ("steps=1:2", {}),
    "verbosity": ("quiet", {}),
    "progress": (False, {}),
    "console_ranks": ("all", {}),
    "max_restarts": (1, _TWO),
    "spares": (1, {"max_restarts": 1, **_TWO}),
    "heartbeat_timeout": (5.0, {"max_restarts": 1, **_TWO}),
    "stall_timeout": (9.0, {"max_restarts": 1, **_TWO}),
    "memory_frequency": (2, {"max_restarts": 1, **_FSDP}),
    "preemption_file": ("asked", {}),
    "check_replicas_every": (1, _TWO),
    "on_corruption": ("warn", _CHECKED),
    "straggler_factor": (2.0, _TWO),
    "on_straggler": ("rebalance", _STRAGGLER),
    "straggler_steps": (2, _STRAGGLER),
    "base_batch_size": (2, {"lr_scaling": "linear"}),
    "decay_norms": (False, {"weight_decay": 0.5}),
    "lora_dropout": (0.5, _LORA),
    "lora_base": ("nf4", _LORA),
    "min_delta": (9.0, {"early_stopping": "val/loss", "patience": 1, "epochs": 4}),
    "compression_warmup": (1, {"compression": "topk", **_TWO}),
    "outer_learning_rate": (0.5, _DILOCO),
    "outer_momentum": (0.5, _DILOCO),
    "keep_every": (1, {"checkpoint_frequency": 1, "epochs": 5}),
    "tensorboard_histograms": (1, {"tensorboard": True}),
    "bucket_cap_mb": (0.001, {"strategy": "ddp", **_TWO}),
    "scaler_init_scale": (1024.0, {"mixed_precision": True}),
    "scaler_growth_interval": (5, {"mixed_precision": True}),
}
"""By setting: a changed value, and the settings that it goes with. Others are changed by `changed`."""


def changed(name: str) -> Any:
    """Return a value that is not the default of a setting."""
    if name in EXAMPLES:
        return EXAMPLES[name][0]
    field: dataclasses.Field[Any] = FIELDS[name]
    if field.metadata["choices"]:
        return next(choice for choice in field.metadata["choices"] if choice not in (field.default, None))
    if "bool" in kinds(field):
        return not field.default
    if "float" in kinds(field):
        return (field.default or 1.0) / 2
    return (field.default or 1) + 1


def companions(name: str) -> dict[str, Any]:
    """Return the settings that a changed setting goes with."""
    return EXAMPLES[name][1] if name in EXAMPLES else {}


def refusal(name: str, way: str) -> str | None:
    """Return why a changed setting is refused in a way, before anything starts; None: it counts there."""
    if name in ("backend", "strategy") and WAYS[way]:
        return None  # they choose the way
    given = {**companions(name), name: changed(name), **{k: v for k, v in WAYS[way].items() if k != name}}
    try:
        if way == "own loop":
            refuse_in_loop([name])
        if way == "script" and (text := unused_by_script([name], SCRIPT, "pytorch-ddp").get(name)):
            return text
        resolve(given, environ={})
    except (ConfigError, UsageError) as error:
        return str(error)
    return None


def table() -> str:
    """Return the settings that do not count in every way, and what to write in a loop of the user's."""
    rows = [f"| setting | {' | '.join(WAYS)} | in a loop of your own |", "|---|" + "---|" * (len(WAYS) + 1)]
    everywhere = []
    for name in FIELDS:
        refused = {way: refusal(name, way) for way in WAYS}
        if not any(refused.values()):
            everywhere.append(f"`{name}`")
            continue
        cells = ["" if refused[way] else "yes" for way in WAYS]
        instead = _sentence(in_loop(name)) if refused["own loop"] else ""
        rows.append(f"| `{name}` | {' | '.join(cells)} | {instead} |")
    return "\n".join([*rows, "", f"In every way: {', '.join(everywhere)}."])


def _sentence(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
