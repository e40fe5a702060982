"""Proofs that take minutes: left out of `make test`, which must stay within a quarter of an hour on two cores."""

from __future__ import annotations

import os

import pytest

ALL = os.environ.get("PHALANX_ALL_TESTS") == "1"
long_proof = pytest.mark.skipif(not ALL, reason="takes long: make test-all runs it")
