"""How long the dashboard takes to open many long runs: the server's first data, and charts drawn in Chromium.

    python benchmarks/ui_open.py --runs 50 --points 100000

Writes the events of the runs into a temporary folder, starts `phalanx ui` on it, and opens the table and the charts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from browser import browser  # noqa: E402  (the tests' driver of Chromium)

from phalanx.observe.events import RunEnded, RunStarted, StepDone  # noqa: E402


def write_runs(folder: Path, runs: int, points: int) -> int:
    """Write runs with different curves and return their bytes."""
    total = 0
    for number in range(runs):
        sizes = {"parameters": 1, "batch_size": 1, "accumulation": 1, "global_batch": 2, "world_size": 2}
        texts = {"name": "x", "run_dir": "x", "device": "cpu", "strategy": "ddp", "precision": "fp32"}
        begin = RunStarted(**texts, **sizes, total_steps=points, rank=0, time=1000.0 + number).to_json()
        first, second = (
            StepDone(step=1, epoch=1, loss=77777.5, learning_rate=0.1, grad_norm=1.0, time=88888.5, rank=0)
            .to_json()
            .split('"step":1,', 1)
        )
        lines = [begin]
        for step in range(1, points + 1):
            loss = (number + 2) / (1 + step / 500) + (step * 7919 % 1000) / 2000
            head = first.replace("88888.5", str(2000 + step))
            lines.append(f'{head}"step":{step},{second.replace("77777.5", f"{loss:.4f}")}')
        end = RunEnded(status="finished", step=points, total_time=1.0, throughput=1.0, time=2000.0 + points)
        lines.append(end.to_json())
        path = folder / f"run-{number:02d}" / "events.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("\n".join(lines) + "\n")
        total += path.stat().st_size
    return total


def timed(address: str) -> float:
    """Return the seconds until an answer is complete."""
    begin = time.perf_counter()
    with urllib.request.urlopen(address, timeout=600) as answer:
        answer.read()
    return time.perf_counter() - begin


def drawn(page, address: str) -> float:
    """Open a page and return the seconds until it has drawn what it asked for."""
    begin = time.perf_counter()
    page.open(address)
    page.wait("document.body.dataset.drawn", 300)
    return time.perf_counter() - begin


def main() -> None:
    """Measure, and print one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--points", type=int, default=100_000)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        total = write_runs(Path(place) / "runs", chosen.runs, chosen.points)
        print(f"{chosen.runs} runs x {chosen.points:,} points, {total / 2**20:,.0f} MiB of events")
        command = [sys.executable, "-m", "phalanx", "ui", "--no-browser", "--port", "0"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        server = subprocess.Popen(command, cwd=place, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = "http://" + server.stdout.readline().strip().split("http://")[1]
            print(f"server: list of all runs               {timed(f'{address}api/runs'):6.2f} s")
            preview = f"{address}api/curves/run-00?width=600&preview=300"
            print(f"server: first curves of a run          {timed(preview):6.2f} s")
            with browser() as page:
                page.resize(1400)
                print(f"browser: table of all runs             {drawn(page, address):6.2f} s")
                compare = f"{address}#page=compare&runs=*"
                print(f"browser: all runs compared, first look {drawn(page, compare):6.2f} s")
                begin = time.perf_counter()
                page.wait("[...cache.curves.values()].every(entry => entry.preview === false)", 600)
                print(f"server: every point of all runs read   {time.perf_counter() - begin:6.2f} s")
                again = min(drawn(page, compare) for _ in range(3))
                print(f"browser: all runs compared, once read  {again:6.2f} s")
                page.leave()
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    main()
