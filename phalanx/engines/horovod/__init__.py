"""Horovod: horovodrun as launcher, its all-reduce as strategy, its elastic driver."""
