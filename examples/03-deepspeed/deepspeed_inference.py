"""Use trained weights with DeepSpeed: its inference engine on one device, or ZeRO's stage 3 over several.

    python deepspeed_train.py --num-workers 2 --save model.safetensors           # first, some weights
    python deepspeed_inference.py --weights model.safetensors                    # the whole model on one device
    deepspeed --num_gpus 2 deepspeed_inference.py --weights model.safetensors --zero
    phalanx train --script deepspeed_inference.py --num-workers 2 -- --weights model.safetensors --zero

With `--zero` each rank holds a part of every layer and gathers layers as it needs them, so a model may be larger than
one device; `--offload` keeps the parts in CPU memory. Every rank then answers for its own share of the inputs.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from deepspeed_train import build_model
from torch import nn

import phalanx
from phalanx.zoo.data import load


def main() -> None:
    args = parse_args()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_cuda() else torch.device("cpu")
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    model = build_model()
    phalanx.Trainer(model).load(args.weights)  # a file, or a checkpoint of any layout
    images, labels = map(torch.stack, zip(*load("digits", split="val"), strict=True))
    with torch.no_grad():
        expected = model.eval()(images)
        engine = shard(model, offload=args.offload) if args.zero else one_device(model)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if args.zero else (0, 1)
        mine = torch.arange(len(images)) % ranks == rank
        output = engine(images[mine].to(device)).cpu()
    found = torch.stack([(output.argmax(1) == labels[mine]).sum(), mine.sum()]).to(device)
    if args.zero:
        dist.all_reduce(found)
    if rank == 0:
        difference = (output - expected[mine]).abs().max().item()
        print(f"accuracy {found[0].item() / found[1].item():.4f}, at most {difference:.1e} from plain torch")
    if args.zero:
        dist.destroy_process_group()


def use_cuda() -> bool:
    return torch.cuda.is_available() and os.environ.get("PHALANX_DEVICE") != "cpu"


def one_device(model: nn.Module) -> Any:
    """DeepSpeed's inference engine. For Transformers' models it can also put its own kernels in their place."""
    import deepspeed

    return deepspeed.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=False)


def shard(model: nn.Module, *, offload: bool) -> Any:
    """An engine without an optimizer: ZeRO's stage 3 for the parameters alone."""
    import deepspeed

    if not use_cuda():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for minutes
    deepspeed.init_distributed(dist_backend="nccl" if use_cuda() else "gloo")
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": use_cuda()}
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    engine = deepspeed.initialize(model=model, config=settings)[0]
    engine.eval()
    return engine


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Inference with DeepSpeed.")
    parser.add_argument("--weights", required=True, help="what deepspeed_train.py saved, or its checkpoint folder")
    parser.add_argument("--zero", action="store_true", help="shard the parameters over the ranks")
    parser.add_argument("--offload", action="store_true", help="with --zero: keep the parts in CPU memory")
    parser.add_argument("--local-rank", "--local_rank", type=int, help="from a launcher; the environment says the same")
    return parser.parse_args()


if __name__ == "__main__":
    main()
