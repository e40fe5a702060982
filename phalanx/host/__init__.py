"""This machine: addresses, processes, GPUs, signals, small files. Imports no torch; the parent and the ranks use it."""
