"""Time to a target loss under each gradient compressor, over slow links, and the bytes sent.

    python benchmarks/compression_links.py [--links 100Mb,1Gb,10Gb] [--json out.json] [--plot out.svg]

Two ranks, one in each of two network namespaces; the kernel limits the rate between them, which needs root, `ip` and
`tc`. The target is the loss that the uncompressed run has after 60% of its steps.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import table

from phalanx.config.strategies import COMPRESSORS
from phalanx.tools.namespaces import HostNamespace, network
from phalanx.tools.svg import COLORS, Axis, Plot, write_picture

RATE = re.compile(r"^(\d+(?:\.\d+)?)([MG])b$")
PORT = 29431
SMOOTH = 10
"""Losses of single batches are noisy: a step counts by the mean of this many losses up to it."""
TARGET_SHARE = 0.6
CELL = (560, 320)
QUIET = [
    *("--device", "cpu", "--num-nodes", "2", "--num-workers", "2"),
    *("--no-progress", "--no-tensorboard", "--checkpoint-frequency", "none"),
]


def rate_of(link: str) -> float:
    """Return the bytes per second of a link such as 100Mb or 2.5Gb."""
    match = RATE.match(link)
    if match is None:
        sys.exit(f"{link!r} is not a link: write its bits per second, such as 100Mb, 1Gb or 2.5Gb")
    return float(match[1]) * (1e6 if match[2] == "M" else 1e9) / 8


def train(hosts: list[HostNamespace], recipe: str, compressor: str, steps: int, folder: Path) -> dict[str, Any]:
    """Train on one rank per host; return the seconds and the loss of each step, and the bytes that rank 0 sent."""
    length = ["--epochs", "none", "--max-steps", str(steps), "--eval-every", "0", "--log-every-n-steps", "1"]
    processes = []
    for rank, host in enumerate(hosts):
        own = ["--node-rank", str(rank), "--rdzv-endpoint", f"{hosts[0].address}:{PORT}", "--run-dir", str(folder)]
        command = [sys.executable, "-m", "phalanx.cli", "train", recipe, "--compression", compressor]
        output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # each rank takes the machine for its own
        processes.append(subprocess.Popen(host.command(*command, *QUIET, *length, *own), env=one_thread, **output))
    try:
        errors = [process.communicate()[1] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait()
    for process, error in zip(processes, errors, strict=True):
        if process.returncode:
            sys.exit(f"{recipe} with {compressor} failed:\n{error}")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    logged = [event for event in events if event["event"] == "step"]
    began = logged[0]["time"] - logged[0]["step_seconds"]
    curve = [(event["time"] - began, event["loss"]) for event in logged]
    plain = 4 * events[0]["trained_parameters"] * len(curve)  # of two ranks each sends every fp32 gradient once
    sent = events[-1]["sent_bytes"]  # none by torch's DDP, which does not count
    return {"curve": curve, "sent_bytes": plain if sent is None else sent, "plain_bytes": plain}


def smoothed(curve: list[tuple[float, float]]) -> list[float]:
    """Return the mean of each step's loss and those just before it."""
    losses = [loss for _, loss in curve]
    windows = [losses[max(0, end - SMOOTH) : end] for end in range(1, len(losses) + 1)]
    return [sum(window) / len(window) for window in windows]


def time_to(curve: list[tuple[float, float]], target: float) -> float | None:
    """Return when a run first reached a loss; None if it did not."""
    reached = (seconds for (seconds, _), loss in zip(curve, smoothed(curve), strict=True) if loss <= target)
    return next(reached, None)


def compare(runs: dict[str, dict[str, Any]], recipe: str, link: str) -> list[dict[str, Any]]:
    """Return one record per compressor, with the time to the loss that the uncompressed run has near its end."""
    losses = smoothed(runs["none"]["curve"])
    target = losses[max(0, round(TARGET_SHARE * len(losses)) - 1)]
    return [
        {
            "recipe": recipe,
            "link": link,
            "compressor": compressor,
            "steps": len(run["curve"]),
            "seconds": run["curve"][-1][0],
            "final_loss": smoothed(run["curve"])[-1],
            "target_loss": target,
            "time_to_target_s": time_to(run["curve"], target),
            **run,
        }
        for compressor, run in runs.items()
    ]


def rows_of(records: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table; `speed-up` compares times to the target loss."""
    plain = {(r["recipe"], r["link"]): r["time_to_target_s"] for r in records if r["compressor"] == "none"}
    rows = []
    for record in records:
        reached, reference = record["time_to_target_s"], plain[record["recipe"], record["link"]]
        rows.append([
            *(record["recipe"], record["link"], record["compressor"]),
            f"{1000 * record['seconds'] / record['steps']:.1f}",
            "-" if reached is None else f"{reached:.2f}",
            "-" if reached is None or reference is None else f"{reference / reached:.2f}x",
            f"{record['final_loss']:.4f}",
            f"{record['sent_bytes'] / record['plain_bytes']:.1%}",
        ])  # fmt: skip
    return rows


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Draw for each recipe the time to the target loss over each link, and the bytes sent."""
    links = list(dict.fromkeys(record["link"] for record in records))
    charts = []
    for recipe in dict.fromkeys(record["recipe"] for record in records):
        runs = [record for record in records if record["recipe"] == recipe]
        names = Axis("compressor", names=tuple(dict.fromkeys(run["compressor"] for run in runs)))
        reached = [run for run in runs if run["time_to_target_s"] is not None]
        label = f"{recipe}: s to loss {runs[0]['target_loss']:.3f} (no mark: not reached)"
        times = Plot(names, Axis.of(label, [0.0, *(run["time_to_target_s"] for run in reached)]), CELL)
        for run in reached:
            point = run["compressor"], run["time_to_target_s"]
            times.mark(point, COLORS[links.index(run["link"]) % len(COLORS)], f"{run['link']}: {point[1]:.2f} s")
        counts = {run["compressor"]: max(run["sent_bytes"], 1) for run in runs}
        title = f"bytes sent by a rank in {runs[0]['steps']} steps"
        sent = Plot(names, Axis(title, min(counts.values()), max(counts.values()), log=True), CELL)
        for point in counts.items():
            sent.mark(point, COLORS[0], f"{point[1]:,}")
        charts += [times.svg(), sent.svg()]
    write_picture(str(path), "Gradient compression, 2 ranks in network namespaces", charts, CELL, links)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="text,digits")
    parser.add_argument("--compressors", default=",".join(COMPRESSORS), help="the uncompressed run is always made")
    parser.add_argument("--links", default="100Mb,1Gb,10Gb", help="bits per second")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    rates = {link: rate_of(link) for link in options.links.split(",")}
    compressors = dict.fromkeys(["none", *options.compressors.split(",")])
    records: list[dict[str, Any]] = []
    with network(2) as hosts, tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        for link, rate in rates.items():
            for host in hosts:
                host.slow(f"{int(rate * 8)}bit", burst=str(max(1 << 16, int(rate * 0.002))), queue="50ms")
            for recipe in options.recipes.split(","):
                runs = {}
                for compressor in compressors:
                    folder = Path(directory) / f"{link}-{recipe}-{compressor}"
                    runs[compressor] = train(hosts, recipe, compressor, options.steps, folder)
                records += compare(runs, recipe, link)
    head = ["recipe", "link", "compressor", "step ms", "to target s", "speed-up", "final loss", "of plain bytes"]
    print(table(f"{options.steps} steps, 2 ranks in network namespaces", head, rows_of(records)))
    if options.json is not None:
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    if options.plot is not None:
        draw(records, options.plot)


if __name__ == "__main__":
    main()
