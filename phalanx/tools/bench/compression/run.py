"""The benchmark in the parent: links, ranks, results. No torch here."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from phalanx.errors import RankFailedError
from phalanx.host.files import scratch_folder
from phalanx.launch import CallTarget, LaunchSpec
from phalanx.runs.start import run_on_ranks
from phalanx.tools.bench.compression import netns
from phalanx.tools.bench.compression.plan import Case, CompressionRequest, read_link

RANKS = 2
NAMESPACES = "network namespaces, the rate by the kernel's token bucket"
SLEEPING = "an exchange that sleeps for bytes / rate"
_PORT = 29431
_SMOOTH = 10
"""Losses of single batches are noisy: a step counts by the mean of this many before it."""
_TARGET_SHARE = 0.6
"""The target is the loss of the uncompressed run after this share of its steps."""


def run_bench(
    recipes: Sequence[str],
    compressors: Sequence[str],
    links: Sequence[str],
    *,
    steps: int,
    settings: dict[str, Any] | None = None,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Train every recipe under every compressor over every link, on two ranks; return one record per run."""
    cases = [Case(recipe, compressor) for recipe in recipes for compressor in compressors]
    obstacle = netns.why_not()
    say(f"links: {NAMESPACES}" if obstacle is None else f"links: {SLEEPING} ({obstacle})")
    records = []
    with ExitStack() as stack:
        nodes = stack.enter_context(netns.two_nodes()) if obstacle is None else None
        for link in links:
            say(f"{link}: {len(cases)} runs of {steps} steps on {RANKS} ranks")
            rate = read_link(link)
            request = CompressionRequest(cases, steps, settings or {}, rate if nodes is None else None)
            found = _run_here(request) if nodes is None else _run_on_nodes(request, nodes, rate)
            records += _records(found, cases, link, SLEEPING if nodes is None else NAMESPACES)
    return records


def probe(recipes: Sequence[str]) -> dict[str, Any]:
    """Measure on two ranks of this machine what the adviser needs."""
    with scratch_folder("probe") as folder:
        payload = folder / "request.json"
        payload.write_text(json.dumps({"recipes": list(recipes)}), encoding="utf-8")
        launch_ranks("phalanx.tools.bench.compression.rank:run_probe", payload)
        found: dict[str, Any] = json.loads((folder / "probe.json").read_text(encoding="utf-8"))
        return found


def launch_ranks(function: str, payload: Path, **spec: Any) -> None:
    """Start ranks of the benchmark here and wait for them; their failure is raised."""
    log_dir = payload.parent / f"logs-{spec.get('node_rank', 0)}"
    whole = {"ranks_per_node": RANKS, "log_dir": log_dir, **spec}
    run_on_ranks(LaunchSpec(target=CallTarget(function, str(payload)), **whole))


def run_node(payload: str, node: int, endpoint: str) -> None:
    """Run one of two nodes with one rank each; called in a process inside a namespace."""
    launch_ranks(
        "phalanx.tools.bench.compression.rank:run_cases",
        Path(payload),
        ranks_per_node=1,
        num_nodes=RANKS,
        node_rank=node,
        rdzv_endpoint=endpoint,
        threads_per_rank=1,
    )


def _run_here(request: CompressionRequest) -> dict[str, Any]:
    with scratch_folder("bench") as folder:
        launch_ranks("phalanx.tools.bench.compression.rank:run_cases", _written(request, folder), threads_per_rank=1)
        return _read(request, folder)


def _run_on_nodes(request: CompressionRequest, nodes: netns.Nodes, rate: float) -> dict[str, Any]:
    with scratch_folder("bench") as folder:
        payload = _written(request, folder)
        nodes.shape(rate)
        code = f"from {__name__} import run_node; run_node({str(payload)!r}, {{}}, {f'{nodes.address}:{_PORT}'!r})"
        processes = [
            subprocess.Popen(
                nodes.command(node, [sys.executable, "-c", code.format(node)]),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for node in range(RANKS)
        ]
        _wait(processes)
        return _read(request, folder)


def _wait(processes: list[subprocess.Popen[str]]) -> None:
    """Wait for both nodes; when one fails, or this process is interrupted, the other is ended too."""
    try:
        errors = [process.communicate()[1] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait()
    for node, process in enumerate(processes):
        if process.returncode:
            raise RankFailedError(f"node {node} of the benchmark failed:\n{errors[node].strip()}")


def _written(request: CompressionRequest, folder: Path) -> Path:
    payload = folder / "request.json"
    payload.write_text(json.dumps(dataclasses.asdict(request)), encoding="utf-8")
    return payload


def _read(request: CompressionRequest, folder: Path) -> dict[str, Any]:
    return {case.name: json.loads((folder / f"{case.name}.json").read_text("utf-8")) for case in request.cases}


def _records(found: dict[str, Any], cases: Sequence[Case], link: str, emulation: str) -> list[dict[str, Any]]:
    records = []
    for case in cases:
        target = target_loss(found[Case(case.recipe, "none").name]["curve"])
        result = found[case.name]
        curve = result["curve"]
        records.append(
            {
                "recipe": case.recipe,
                "compressor": case.compressor,
                "link": link,
                "emulation": emulation,
                "ranks": RANKS,
                "steps": len(curve),
                "seconds": curve[-1][0],
                "final_loss": smoothed(curve)[-1],
                "target_loss": target,
                "time_to_target_s": time_to(curve, target),
                "sent_bytes": result["sent_bytes"],
                "plain_bytes": result["plain_bytes"],
                "curve": curve,
            }
        )
    return records


def smoothed(curve: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of each step's loss and those just before it."""
    losses = [loss for _, loss in curve]
    windows = [losses[max(0, end - _SMOOTH) : end] for end in range(1, len(losses) + 1)]
    return [sum(window) / len(window) for window in windows]


def target_loss(curve: Sequence[Sequence[float]]) -> float:
    """Return the loss that the uncompressed run has reached after a good part of its steps."""
    return smoothed(curve)[max(0, round(_TARGET_SHARE * len(curve)) - 1)]


def time_to(curve: Sequence[Sequence[float]], target: float) -> float | None:
    """Return when a run first reached a loss; None: it did not."""
    for (seconds, _), loss in zip(curve, smoothed(curve), strict=True):
        if loss <= target:
            return seconds
    return None
