"""Failure models, without torch: failure rates, the best interval between checkpoints, effective training time."""
