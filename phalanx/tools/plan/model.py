"""What a planner must know of a model: its shape, parameter counts and floating-point operations. No torch.

`ModelShape` describes a transformer by its dimensions; `TracedShape` any other module by what tracing it found.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A transformer: decoder, encoder, vision transformer or mixture of experts."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    name: str = "model"
    kv_heads: int | None = None
    """Heads of keys and values (None: as many as `heads`)."""
    head_dim: int | None = None
    """Features per head (None: hidden / heads)."""
    ffn_hidden: int | None = None
    """Width of the feed-forward layer (None: 4 x hidden). In a mixture: of one expert."""
    gated_mlp: bool = False
    """Whether the feed-forward layer has a third matrix (SwiGLU, GeGLU)."""
    tied_embeddings: bool = True
    """Whether the output layer shares the weights of the input embedding."""
    positions: int = 0
    """Learned positions (0: rotary, ALiBi, or others without parameters)."""
    biases: bool = True
    """Whether linear layers have biases."""
    rms_norm: bool = False
    """Whether norms have a weight only, not a bias."""
    causal: bool = True
    experts: int = 0
    """Experts per mixture layer (0: not a mixture)."""
    active_experts: int = 2
    """Experts that each token is sent to."""
    shared_experts: int = 0
    """Experts that every token passes through."""
    dense_layers: int = 0
    """Leading layers of a mixture that have a plain feed-forward layer of width `dense_ffn_hidden`."""
    dense_ffn_hidden: int | None = None
    patches: int = 0
    """Vision transformer: patches per image, which set the sequence length (0: tokens)."""
    patch_inputs: int = 0
    """Vision transformer: values per patch (16 x 16 x 3 = 768)."""
    outputs: int | None = None
    """Classes, where the output is not the vocabulary."""
    reference: bool = False
    """Whether it is a decoder of Phalanx: training has the logits of a chunk of tokens at a time, not of all, and under
    bf16 the hidden states between layers are in it."""
    layer_extra: int = 0
    """Parameters of each layer that the dimensions above do not give (norms of queries and keys, fewer biases)."""
    extra: int = 0
    """Parameters outside the layers that the dimensions do not give (a norm of the embedding, an output bias)."""

    @property
    def attention_width(self) -> int:
        """Features of all heads."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv_width(self) -> int:
        """Features of the keys (or values) of all heads."""
        return (self.kv_heads or self.heads) * (self.head_dim or self.hidden // self.heads)

    @property
    def ffn(self) -> int:
        """Width of the feed-forward layer, or of one expert."""
        return self.ffn_hidden or 4 * self.hidden

    @property
    def mixture_layers(self) -> int:
        """Layers whose feed-forward part is a mixture of experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def mlp_matrices(self) -> int:
        """Matrices of one feed-forward layer."""
        return 3 if self.gated_mlp else 2

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention, with its biases."""
        weights = self.hidden * (2 * self.attention_width + 2 * self.kv_width)
        return weights + (self.attention_width + 2 * self.kv_width + self.hidden if self.biases else 0)

    def mlp_parameters(self, width: int) -> int:
        """Return the parameters of one feed-forward layer (or expert) of a width."""
        biases = (self.mlp_matrices - 1) * width + self.hidden if self.biases else 0
        return self.mlp_matrices * self.hidden * width + biases

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return self.hidden if self.rms_norm else 2 * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts of one mixture layer."""
        return self.experts * self.mlp_parameters(self.ffn)

    def layer_parameters(self, layer: int = -1) -> int:
        """Return the parameters of one layer (-1: the last)."""
        plain = self.attention_parameters + 2 * self.norm_parameters + self.layer_extra
        if not self.experts or 0 <= layer < self.dense_layers:
            return plain + self.mlp_parameters((self.dense_ffn_hidden or self.ffn) if self.experts else self.ffn)
        shared = self.shared_experts * self.mlp_parameters(self.ffn)
        return plain + self.hidden * self.experts + self.expert_parameters + shared

    @property
    def embedding_parameters(self) -> int:
        """Parameters before the first layer."""
        if self.patches:
            return (self.patch_inputs + 1) * self.hidden + (self.patches + 2) * self.hidden
        return (self.vocab + self.positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters after the last layer that are not shared with the embedding."""
        classes = self.vocab if self.outputs is None else self.outputs
        shared = self.tied_embeddings and self.outputs is None
        return self.norm_parameters + (0 if shared else classes * self.hidden + (classes if self.outputs else 0))

    @property
    def parameters(self) -> int:
        """All parameters."""
        layers = sum(self.layer_parameters(layer) for layer in range(self.dense_layers))
        layers += (self.layers - self.dense_layers) * self.layer_parameters()
        return layers + self.embedding_parameters + self.head_parameters + self.extra

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through."""
        idle = (self.experts - self.active_experts) * self.mlp_parameters(self.ffn) if self.experts else 0
        return self.parameters - self.mixture_layers * idle

    def matmul_parameters(self) -> int:
        """Return the weights that multiply each token: the layers' matrices and the output layer."""
        attention = self.hidden * (2 * self.attention_width + 2 * self.kv_width) + self.layer_extra
        dense = self.mlp_matrices * self.hidden * ((self.dense_ffn_hidden or self.ffn) if self.experts else self.ffn)
        routed = self.mlp_matrices * self.hidden * self.ffn * (self.active_experts + self.shared_experts)
        mixture = routed + self.hidden * self.experts
        plain_layers = self.layers - self.mixture_layers
        classes = self.vocab if self.outputs is None else 0
        return self.layers * attention + plain_layers * dense + self.mixture_layers * mixture + classes * self.hidden

    def forward_flops(self, tokens: int, seq_len: int) -> float:
        """Return the operations of a forward pass over tokens, with the whole square of attention, as is usual."""
        attention = 4.0 * self.layers * seq_len * self.attention_width
        return tokens * (2.0 * self.matmul_parameters() + attention)


@dataclass(frozen=True, kw_only=True)
class TracedShape:
    """Any module, by what tracing its forward and backward pass on one sample found."""

    name: str
    parameters: int
    trainable: int
    forward_flops_per_sample: float
    activation_bytes_per_sample: float
    """Bytes that forward keeps for backward, in the traced precision, without parameters."""
    traffic_bytes_per_sample: float
    """Bytes that forward reads and writes in memory, which bounds kernels without matrix products."""
    output_bytes_per_sample: float = 0.0
    blocks: int = 1
    """Repeated blocks, which full recomputation and fsdp handle one at a time."""
    largest_block_parameters: int = 0
    block_boundary_bytes_per_sample: float = 0.0
    """Bytes of the inputs of all blocks: what full recomputation keeps."""
    buffers: int = 0
    supports: tuple[str, ...] = field(default=())
    """Axes that the module's own methods allow: tensor, pipeline, context, expert."""
    example: str = ""
    """One sample that it was traced with: 3x224x224, tokens:1024."""
