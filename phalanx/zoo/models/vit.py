"""A vision transformer: an image is a sequence of patches, read by blocks like those of a language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from phalanx import model as contract
from phalanx.errors import ModelError
from phalanx.zoo.models.attention import Block, check_drop_path, drop_path_shares
from phalanx.zoo.models.decoder import Decoder
from phalanx.zoo.models.init import from_preset, init_transformer, is_meta


@dataclass(frozen=True, kw_only=True, slots=True)
class ViTConfig:
    """The shape of a vision transformer. The defaults fit the 8x8 digits.

    `drop_path`: the share of samples for which training leaves the last layer's branches out; less in earlier ones.
    """

    image_size: int = 8
    patch_size: int = 2
    channels: int = 1
    classes: int = 10
    layers: int = 4
    heads: int = 4
    hidden: int = 48
    ffn_hidden: int = 96
    dropout: float = 0.0
    drop_path: float = 0.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ModelError(f"hidden={self.hidden} cannot be split into heads={self.heads}: it must be a multiple.")
        if self.image_size % self.patch_size:
            raise ModelError(
                f"image_size={self.image_size} cannot be cut into patches of patch_size={self.patch_size}: "
                "it must be a multiple."
            )
        check_drop_path(self.drop_path)

    @property
    def patches(self) -> int:
        """The patches of one image."""
        return (self.image_size // self.patch_size) ** 2

    def dimensions(self) -> dict[str, Any]:
        """Return the sizes by which `phalanx plan` knows it."""
        sizes = {"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "ffn_hidden": self.ffn_hidden}
        patch = self.channels * self.patch_size**2
        ends = {"patches": self.patches, "patch_inputs": patch, "outputs": self.classes, "vocab": 0}
        return {**sizes, **ends, "causal": False}

    def layer_weights(self) -> int:
        """Return the matrix weights of one layer: 4 hidden^2 + 2 hidden x ffn_hidden."""
        return 4 * self.hidden**2 + 2 * self.hidden * self.ffn_hidden

    def num_parameters(self) -> int:
        """Return layers x (matrices + 9 hidden + ffn_hidden) + patch, class and position embeddings, norm and head."""
        layer = self.layer_weights() + 9 * self.hidden + self.ffn_hidden
        embedding = (self.channels * self.patch_size**2 + 1 + 1 + self.patches + 1) * self.hidden
        return self.layers * layer + embedding + 2 * self.hidden + (self.hidden + 1) * self.classes

    def flops_per_sample(self) -> int:
        """Return the operations of training on one image, forward and backward.

        For each of (patches + 1) positions: 6 for each weight of a layer, 12 x hidden x positions per layer for
        attention; 4 for each weight of the patch embedding, since the image needs no gradient; and 6 for each
        weight of the head, once.
        """
        time = self.patches + 1
        layers = self.layers * time * (6 * self.layer_weights() + 12 * self.hidden * time)
        embedding = 4 * self.patches * self.channels * self.patch_size**2 * self.hidden
        return layers + embedding + 6 * self.hidden * self.classes


_IMAGENET = {"image_size": 224, "patch_size": 16, "channels": 3, "classes": 1000, "layers": 12}
PRESETS = {
    "debug": ViTConfig(),
    "tiny": ViTConfig(**_IMAGENET, heads=3, hidden=192, ffn_hidden=768),
    "small": ViTConfig(**_IMAGENET, heads=6, hidden=384, ffn_hidden=1536),
    "base": ViTConfig(**_IMAGENET, heads=12, hidden=768, ffn_hidden=3072),
}
"""About 0.1, 5.7, 22 and 87 million parameters."""


class Embedding(nn.Module):
    """A vector for each patch, one more for the class, and the positions' vectors added to them."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.patch = nn.Conv2d(config.channels, config.hidden, config.patch_size, stride=config.patch_size)
        self.label = nn.Parameter(torch.empty(1, 1, config.hidden))
        self.positions = nn.Parameter(torch.empty(1, config.patches + 1, config.hidden))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, images: Tensor) -> Tensor:
        """Return [batch, 1 + patches, hidden]."""
        patches = self.patch(images).flatten(2).transpose(1, 2)
        sequence = torch.cat([self.label.expand(images.shape[0], -1, -1), patches], dim=1)
        return cast("Tensor", self.dropout(sequence + self.positions))


class ViT(nn.Module):
    """Patch embeddings, a stack of blocks, and class scores read off the class position."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config)
        shape = (config.hidden, config.heads, config.ffn_hidden)
        self.layers = nn.ModuleList(
            Block(*shape, causal=False, eps=config.norm_eps, dropout=config.dropout, drop_path=share)
            for share in drop_path_shares(config.drop_path, config.layers)
        )
        self.norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.classes)
        if not is_meta(self):
            self.init_weights()

    def init_weights(self) -> None:
        """Draw the weights again, also after a start on the meta device: N(0, 0.02), residual outputs narrower.

        The patch embedding keeps the variance of the pixels, whatever the size of a patch.
        """
        init_transformer(self, layers=self.config.layers, residual=["project"])
        nn.init.normal_(self.embed.patch.weight, std=(self.config.channels * self.config.patch_size**2) ** -0.5)
        nn.init.normal_(self.embed.label, std=0.02)
        nn.init.normal_(self.embed.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores of images [batch, channels, image_size, image_size]."""
        size = self.config.image_size
        if images.shape[-2:] != (size, size):
            raise ModelError(f"images of {tuple(images.shape[-2:])} pixels given to a ViT of image_size={size}.")
        hidden = Decoder.stream(self.embed(images))
        for layer in self.layers:
            hidden = layer(hidden)
        return cast("Tensor", self.head(self.norm(hidden[:, 0])))

    def num_parameters(self) -> int:
        """Count the parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_sample(self) -> int:
        """Return the operations of training on one image."""
        return self.config.flops_per_sample()

    def compile_regions(self) -> list[tuple[nn.Module, str]]:
        """Return what torch.compile compiles: the layers, once for all of them."""
        return [(layer, "forward") for layer in self.layers]

    def tensor_plan(self) -> dict[str, str]:
        """Return which module is split how under tensor parallelism, in the terms of `models.contract`.

        Patches plus class make an odd number, so the sequence stays whole and the norms are not named.
        """
        return {
            "layers.*.attention.qkv": contract.COLWISE,
            "layers.*.attention.project": contract.ROWWISE,
            "layers.*.feed.expand": contract.COLWISE,
            "layers.*.feed.project": contract.ROWWISE,
        }

    def tensor_divides(self) -> dict[str, int]:
        """Return what the number of tensor-parallel ranks must divide."""
        return {"heads": self.config.heads, "ffn_hidden": self.config.ffn_hidden}


def vit(preset: str = "debug", **changes: Any) -> ViT:
    """Return a vision transformer of a preset's shape, with some of its `ViTConfig` fields changed."""
    return ViT(from_preset("vit", PRESETS, preset, changes))
