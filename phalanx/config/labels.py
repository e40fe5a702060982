"""The label that stands for none, as everybody who counts labels must know it."""

from __future__ import annotations

IGNORED_LABEL = -100
"""The label that torch's cross entropy and Hugging Face models leave out of the mean."""
