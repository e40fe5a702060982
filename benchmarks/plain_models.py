"""Models as people write or take them, the reference of `gpu_table.py`; vision models are ours without torchvision."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal attention from one projection to queries, keys and values; rotary positions where `angles` are given."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head = hidden // heads
        self.sizes = [hidden, kv_heads * self.head, kv_heads * self.head]
        self.qkv = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, inputs: Tensor, angles: Tensor | None) -> Tensor:
        parts = self.qkv(inputs).split(self.sizes, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in parts)
        if angles is not None:
            query, key = _rotate(query, angles), _rotate(key, angles)
        grouped = query.shape[1] != key.shape[1]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return self.out(mixed.transpose(1, 2).flatten(2))


def _rotate(heads: Tensor, angles: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    cosine, sine = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class Gelu(nn.Module):
    """GPT-2's feed-forward net."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(inputs), approximate="tanh"))


class SwiGlu(nn.Module):
    """Llama's feed-forward net."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(inputs)) * self.up(inputs))


class Block(nn.Module):
    """Attention and feed-forward net, each with a norm before it and a residual around it."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, width: int, llama: bool) -> None:
        super().__init__()
        self.first = nn.RMSNorm(hidden, eps=1e-5) if llama else nn.LayerNorm(hidden, bias=False)
        self.attention = Attention(hidden, heads, kv_heads)
        self.second = nn.RMSNorm(hidden, eps=1e-5) if llama else nn.LayerNorm(hidden, bias=False)
        self.feed = (SwiGlu if llama else Gelu)(hidden, width)

    def forward(self, hidden: Tensor, angles: Tensor | None) -> Tensor:
        hidden = hidden + self.attention(self.first(hidden), angles)
        return hidden + self.feed(self.second(hidden))


class PlainDecoder(nn.Module):
    """A GPT-2 (learned positions, no biases, vocabulary padded to 50,304: the fast choices) or a Llama.

    forward(tokens, targets) is the loss alone: compiled, nothing else is kept.
    """

    def __init__(
        self, vocabulary: int, time: int, layers: int, hidden: int, heads: int,
        kv_heads: int = 0, width: int = 0, *, llama: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.vocabulary, self.llama, self.head_size = vocabulary, llama, hidden // heads
        padded = -(-vocabulary // 64) * 64
        self.tokens = nn.Embedding(padded, hidden)
        self.positions = None if llama else nn.Embedding(time, hidden)
        shape = (hidden, heads, kv_heads or heads, width or 4 * hidden, llama)
        self.blocks = nn.ModuleList(Block(*shape) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5) if llama else nn.LayerNorm(hidden, bias=False)
        self.head = nn.Linear(hidden, padded, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens)
        angles = None
        if self.positions is not None:
            hidden = hidden + self.positions(places)
        else:
            exponents = torch.arange(0, self.head_size, 2, device=tokens.device) / self.head_size
            angles = places[:, None] * 500_000.0**-exponents
        for block in self.blocks:
            hidden = block(hidden, angles)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Images(nn.Module):
    """ResNet-50 or ViT-B/16 of torchvision, or ours where that is not installed; forward(bytes, labels) is the loss.

    `channels_last`: by hand, as people write it.
    """

    def __init__(self, name: str, *, channels_last: bool = False) -> None:
        super().__init__()
        model = _vision_model(name)
        self.format = torch.channels_last if channels_last else torch.preserve_format
        self.model = model.to(memory_format=torch.channels_last) if channels_last else model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        scaled = images.to(memory_format=self.format).float() / 128 - 1
        return F.cross_entropy(self.model(scaled), labels)


def _vision_model(name: str) -> nn.Module:
    try:
        import torchvision
    except ModuleNotFoundError:
        from phalanx.zoo.models.resnet import resnet
        from phalanx.zoo.models.vit import vit

        return resnet(name) if name == "resnet50" else vit("base")
    model: nn.Module = getattr(torchvision.models, name)()
    return model


class Bert(nn.Module):
    """BERT-Large of transformers; forward(tokens, labels) is the loss of masked tokens."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
        self.model = BertForMaskedLM(config)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=labels).loss
