"""What users of other libraries call our settings and values, for suggestions: `lr` is learning_rate, `gpu` is cuda."""

from __future__ import annotations

import shlex
from collections.abc import Collection

from phalanx.errors import nearest

_SETTINGS = {
    "num_workers": "devices nproc nproc_per_node ranks world_size n_ranks num_processes n_proc_per_node np num_ranks",
    "num_gpus": "gpus ngpus n_gpus num_devices gpu_count",
    "num_nodes": "nnodes nodes num_machines machines",
    "node_rank": "machine_rank",
    "rdzv_endpoint": "master_addr main_process_ip rendezvous",
    "device": "accelerator use_gpu",
    "device=cpu": "cpu use_cpu no_cuda",
    "device=cuda": "gpu cuda",
    "strategy": "distributed distributed_strategy parallel",
    "strategy=fsdp": "fsdp use_fsdp",
    "strategy=ddp": "ddp",
    "deepspeed_config": "deepspeed ds_config",
    "tensor_parallel": "tp tensor_model_parallel_size tensor_parallel_size tp_size",
    "pipeline_parallel": "pp pipeline_model_parallel_size pp_size",
    "context_parallel": "cp sequence_parallel cp_size",
    "expert_parallel": "ep ep_size",
    "zero_stage": "zero stage",
    "batch_size": "bs batch batchsize micro_batch_size per_device_train_batch_size train_batch_size mbs",
    "epochs": "max_epochs num_train_epochs num_epochs n_epochs",
    "max_steps": "steps limit_train_batches num_steps iterations iters max_iters num_train_steps",
    "learning_rate": "lr base_lr max_lr peak_lr eta",
    "optimizer": "optim opt",
    "momentum": "beta1 adam_beta1 mom",
    "weight_decay": "wd l2 decay",
    "lr_schedule": "scheduler lr_scheduler lr_scheduler_type lr_sched schedule",
    "warmup": "warmup_steps warmup_ratio num_warmup_steps warmup_epochs",
    "seed": "random_seed manual_seed",
    "data": "data_dir data_path dataset_path data_root dataset",
    "eval_every": "evaluation_strategy eval_strategy check_val_every_n_epoch",
    "eval_every=500 steps": "eval_steps val_check_interval",
    "sanity_val_batches": "num_sanity_val_steps sanity_val_steps",
    "load_best_at_end": "load_best_model_at_end restore_best_weights",
    "mixed_precision": "amp precision use_amp autocast half",
    "mixed_precision=fp16": "fp16 float16",
    "mixed_precision=bf16": "bf16 bfloat16",
    "mixed_precision=fp8": "fp8 float8",
    "gradient_accumulation_steps": "grad_accum accum accumulate_grad_batches accumulation accumulation_steps grad_acc",
    "gradient_clipping": "clip grad_clip clip_grad max_grad_norm gradient_clip_val clip_norm clip_grad_norm",
    "compile": "torch_compile jit",
    "capture": "cuda_graph cuda_graphs cudagraph cudagraphs graph",
    "channels_last": "memory_format nhwc channels_last_3d",
    "sync_batch_norm": "sync_bn syncbn sync_batchnorm convert_sync_batchnorm synchronize_batchnorm",
    "activation_checkpointing": "gradient_checkpointing checkpointing recompute remat",
    "lora_rank": "lora lora_r",
    "communication_backend": "dist_backend ddp_backend comm_backend pg_backend",
    "checkpoint_dir": "save_dir ckpt_dir save_path weights_save_path",
    "checkpoint_frequency": "save_steps save_every checkpoint_every every_n_epochs save_freq save_strategy ckpt_every",
    "keep_last": "save_total_limit save_top_k max_checkpoints",
    "resume": "resume_run continue",
    "resume_from_checkpoint": "resume ckpt_path ckpt checkpoint load_from resume_from",
    "run_dir": "output_dir out_dir log_dir logdir default_root_dir output outdir out",
    "name": "run_name experiment_name exp_name",
    "tensorboard": "tb report_to logger",
    "wandb": "weights_and_biases use_wandb project wandb_project",
    "log_every_n_steps": "logging_steps log_every log_interval print_freq log_freq",
    "console": "progress_bar enable_progress_bar disable_tqdm tqdm",
    "max_restarts": "restarts retries max_retries",
    "early_stopping": "early_stop",
    "time_limit": "time walltime wall_time",
    "max_time": "time time_limit max_duration timeout_minutes",
    "keep_best": "save_best monitor metric_for_best_model save_best_only",
    "limit_val_batches": "max_eval_samples eval_batches validation_steps",
    "ema_decay": "ema use_ema",
    "timeout": "ddp_timeout dist_timeout",
}
_BY_NAME: dict[str, list[str]] = {}
for _target, _names in _SETTINGS.items():
    for _name in _names.split():
        _BY_NAME.setdefault(_name, []).append(_target)

_VALUES = {
    "device": {"cuda": "gpu cuda:0 nvidia", "cpu": "host"},
    "strategy": {"fsdp": "zero fsdp2", "ddp": "dp ddp_spawn data", "local-sgd": "localsgd"},
    "backend": {"pytorch-ddp": "ddp torch pytorch", "pytorch-fsdp": "fsdp"},
    "mixed_precision": {"fp16": "float16 16 half", "bf16": "bfloat16", "false": "no", "true": "amp"},
    "lr_schedule": {"cosine": "cos cosineannealing", "constant": "none", "inverse-sqrt": "noam"},
    "optimizer": {"sgd": "momentum", "adamw": "adamwhf", "adamw8bit": "adam8bit pagedadamw8bit"},
    "communication_backend": {"gloo": "cpu", "nccl": "cuda gpu", "phalanx": "shm"},
    "pipeline_schedule": {"zero-bubble": "zb zbh1", "interleaved": "interleaved1f1b"},
    "nccl_env": {"infiniband": "ib", "gcp": "gce google", "aws-efa": "aws efa", "ethernet": "tcp"},
}
"""For a setting: values, and the words that others write for them."""


def like(name: str, allowed: Collection[str]) -> str | None:
    """Return the allowed setting that a name means or is closest to; "setting=value" where the name says a value."""
    plain = name.strip("-").replace("-", "_").lower()
    for target in _BY_NAME.get(plain, ()):
        if target.partition("=")[0] in allowed:
            return target
    return nearest(name, allowed)


def is_known_elsewhere(name: str) -> bool:
    """Whether other libraries call a setting by this name."""
    return name in _BY_NAME


def like_flag(name: str, flags: Collection[str]) -> str | None:
    """Return the flag, as it is written, that a word without its dashes means or is closest to."""
    found = like(name, {*flags, *(flag.replace("-", "_") for flag in flags)})
    name, _, value = (found or "").partition("=")
    return " ".join(["--" + name.replace("_", "-"), *([shlex.quote(value)] if value else [])]) if found else None


def like_value(setting: str, value: str, allowed: Collection[str]) -> str | None:
    """Return the allowed value of a setting that a word means or is closest to."""
    words = _VALUES.get(setting, {}).items()
    return next((meant for meant, names in words if value.lower() in names.split()), None) or nearest(value, allowed)


def unknown_value(setting: str, what: str, value: str, allowed: Collection[str]) -> str:
    """Return the message for an unknown value of a setting: the one that was meant, and all that are allowed."""
    close = like_value(setting, value, allowed)
    guess = f" Did you mean '{close}'?" if close else ""
    return f"unknown {what} '{value}'.{guess} Allowed: {', '.join(sorted(allowed))}."
