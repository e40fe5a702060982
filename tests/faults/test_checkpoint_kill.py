"""kill -9 at every system call of a save or a copy: what is there is complete, and the next one removes the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from long_proofs import long_proof

SCRIPT = Path(__file__).parents[1] / "helpers" / "kill_points.py"


@pytest.mark.parametrize(
    "kind", ["sharded", "copy", *(pytest.param(kind, marks=long_proof) for kind in ("full", "incremental"))]
)
def test_a_kill_at_any_write_point_leaves_a_whole_checkpoint(tmp_path, kind):
    done = subprocess.run([sys.executable, SCRIPT, tmp_path, kind], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    points = int(done.stdout.split()[0])
    assert points >= 20, done.stdout
