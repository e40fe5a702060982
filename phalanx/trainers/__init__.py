"""The public trainers."""
