"""Memory of a frozen base in bfloat16 and in 4 bits: `phalanx train --script qlora_memory.py --num-workers 2`.

Bytes of parameters and optimizer states per rank after a step, for a Llama of 308 million parameters with adapters.
"""

from __future__ import annotations

import time

import torch
from torch.distributed.tensor import DTensor

from phalanx import Formation
from phalanx.zoo.models import build

SHAPE = {"vocab_size": 32_000, "layers": 4, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn_hidden": 8192}


def held(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of tensors on this rank."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(part.nbytes for part in parts)


def measure(strategy: str, base: str | None) -> None:
    """Train two steps, and print what this rank holds and how long the second took."""
    torch.manual_seed(0)
    with Formation(strategy=strategy, lora_rank=16, lora_base=base) as formation:
        model = formation.prepare(build("llama", seq_len=64, **SHAPE).to(torch.bfloat16))
        optimizer = formation.prepare(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4))
        tokens = torch.randint(32_000, (1, 65), device=formation.device)
        for _ in range(2):
            began = time.perf_counter()
            loss = model(tokens[:, :-1], tokens[:, 1:]).loss
            formation.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.perf_counter() - began
        layers = [p for name, p in model.named_parameters() if "layers." in name and not p.requires_grad]
        others = [p for name, p in model.named_parameters() if "layers." not in name]
        trained = [p for p in model.parameters() if p.requires_grad]
        states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        sizes = [f"{held(part) / 2**20:7.1f}" for part in (layers, others, trained + states)]
        formation.print(f"{strategy:5} {base or 'bfloat16':9} {' '.join(sizes)}   {seconds:.1f} s   loss {loss:.4f}")


if __name__ == "__main__":
    print("MiB per rank: frozen layers, embedding and head, adapters with their states; seconds of a step")
    for strategy in ("ddp", "fsdp"):
        for base in (None, "nf4"):
            measure(strategy, base)
