"""Shared memory between the ranks of one machine."""

from __future__ import annotations

from phalanx.comm.shm.group import SharedGroup

__all__ = ["SharedGroup"]
