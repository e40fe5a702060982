"""Five mixes of random faults on real runs, each compared with a quiet run: `fault_mixes.py --faults 200`.

Each mix has something that faults alone do not show: objects of the user's, no checkpoint, shards, other numbers of
ranks, several machines. The last one makes network namespaces, which needs root.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMON = (
    "--device",
    "cpu",
    "--heartbeat-timeout",
    "1",
    "--json",
    "--no-checkpoints",
    "--seed",
    "5",
    "--epochs",
    "1000",
)
EXACT = ("--strategy", "ring", "--fixed-order")
OBJECTS = ("--own-objects", "--ema-decay", "0.9")
MIXED = ("--kinds", "kill,exception,scale")
MIXES = {
    "objects": ["digits", "--num-workers", "4", *OBJECTS, *EXACT],
    "objects, torch's ddp": ["digits", "--num-workers", "2", *OBJECTS, "--strategy", "ddp", "--lr-schedule", "cosine"],
    "shards (fsdp)": ["digits", "--num-workers", "2", *OBJECTS, "--strategy", "fsdp", "--memory-frequency", "1"],
    "kills and requests": ["digits", "--num-workers", "2:4", *OBJECTS, *EXACT, *MIXED],
    "two machines": ["digits", "--num-workers", "2:4", "--num-nodes", "2", *OBJECTS, *EXACT, *MIXED],
}


def run_mix(words: list[str], faults: int, steps: int, folder: Path) -> dict[str, object]:
    """Run one mix and return its report."""
    kinds = [] if "--kinds" in words else ["--kinds", "kill,exception"]
    command = [sys.executable, "-m", "phalanx", "verify", *words, *kinds, *COMMON]
    command += ["--faults", str(faults), "--max-steps", str(steps), "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    report: dict[str, object] = json.loads(done.stdout)
    return report


def main() -> int:
    """Run the mixes and print a row for each; 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=20, help="random faults of each mix")
    parser.add_argument("--mix", action="append", choices=MIXES, help="only this one; may be repeated")
    options = parser.parse_args()
    failed = False
    print(f"{'mix':<22} {'faults':>6} {'recovered, median':>18} {'longest':>8} {'difference':>11} {'minutes':>8}")
    for name in options.mix or MIXES:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            report = run_mix(MIXES[name], options.faults, 4 * options.faults + 20, Path(folder) / "out")
        results = [fault for fault in report["faults"] if fault["mark"]]  # type: ignore[attr-defined]
        times = sorted(fault["recovered"] for fault in results if fault["recovered"] is not None)
        middle, longest = (times[len(times) // 2], times[-1]) if times else (0.0, 0.0)
        minutes = (time.monotonic() - began) / 60
        row = f"{len(results):>6} {middle:>16.2f} s {longest:>6.1f} s {report['difference']!s:>11} {minutes:>8.1f}"
        print(f"{name:<22} {row}", flush=True)
        for problem in report["problems"]:  # type: ignore[attr-defined]
            failed = True
            print(f"    {problem}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
