"""The tokens that every T5 has: its model, its data sets and its texts share them."""

from __future__ import annotations

T5_PAD, T5_END = 0, 1
"""Padding, which also begins each answer, and the end of a text."""
