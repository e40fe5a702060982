"""The words of a tensor-parallel plan, in one place.

A model's `tensor_plan()` maps module-name patterns ("*" stands for one part of a dotted name) to these words: plain
data that a strategy turns into shards. Between layers every rank holds its slice of the sequence (dim 1 of
[batch, time, width]); inside attention and feed-forward it holds the whole sequence and its slice of heads or features.

`tensor_divides()` goes with the plan: what the number of tensor-parallel ranks must divide. Vocabulary and positions
are not in it, because they may be cut unevenly (GPT-2's 50257 tokens over 2 ranks). The sequence length must be a
multiple too, but only a batch knows that.
"""

from __future__ import annotations

COLWISE = "colwise"
"""A linear layer, split by output features (dim 0 of weight and bias). Whole input in, this rank's features out."""

ROWWISE = "rowwise"
"""A linear layer, split by input features (dim 1 of the weight; whole bias). This rank's features in; the products are
summed over the ranks and scattered along the sequence."""

SEQUENCE = "sequence"
"""A norm: whole weights on every rank, applied to this rank's slice of the sequence. Its gradients must be summed over
the ranks."""

GATHER = "gather"
"""A module with several column-wise layers: its first input is gathered along the sequence once, before it runs."""

EMBEDDING_ROWWISE = "embedding-rowwise"
"""A token embedding, split by vocabulary (dim 0). Whole token ids in; the vectors are summed over the ranks and
scattered along the sequence (dim 1)."""

EMBEDDING_POSITIONS = "embedding-positions"
"""A position embedding, split by position (dim 0). Whole positions [time] in, this rank's slice [time, width] (dim 0)
out."""

HEAD_COLWISE = "head-colwise"
"""The output layer, split by vocabulary (dim 0). Its input is gathered along the sequence; the logits may stay split
for a parallel loss. With tied weights it shares the shards of the token embedding."""

WHOLE = "whole"
"""A module that every rank keeps whole, and feeds with the same whole inputs."""

PLAN_NAMES = frozenset(
    {COLWISE, ROWWISE, SEQUENCE, GATHER, EMBEDDING_ROWWISE, EMBEDDING_POSITIONS, HEAD_COLWISE, WHOLE}
)
"""Every word a plan may use."""
