"""A rank's side of recovery."""
