"""The parent side of `phalanx bench compression`: links, ranks, records, their table and picture. No torch here."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from phalanx.errors import RankFailedError, UsageError, unknown_name
from phalanx.host.files import scratch_folder
from phalanx.host.processes import own_python
from phalanx.launch import CallTarget, LaunchSpec
from phalanx.observe.format import size, table
from phalanx.runs.start import run_on_ranks
from phalanx.tools.namespaces import HostNamespace, network
from phalanx.tools.svg import COLORS, Axis, Plot, write_picture

RECIPES = ("text", "digits")
LINKS = ("100Mb", "1Gb", "10Gb")
RANKS = 2
NAMESPACES = "network namespaces, the rate by the kernel's token bucket"
SLEEPING = "an exchange that sleeps for bytes / rate"
_RATE = re.compile(r"^(\d+(?:\.\d+)?)\s*(M|G)b(?:/s|it)?$", re.IGNORECASE)
_PORT = 29431
_SMOOTH = 10
"""Losses of single batches are noisy: a step counts by the mean of this many before it."""
_TARGET_SHARE = 0.6
"""The target is the loss of the uncompressed run after this share of its steps."""
_CELL = (560, 320)


def read_names(text: str, kind: str, allowed: Sequence[str]) -> list[str]:
    """Read names separated by commas; raise for an unknown one, with the nearest."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in allowed:
            raise UsageError(unknown_name(kind, name, allowed))
    if not names:
        raise UsageError(f"no {kind} was named", hint=f"Allowed, separated by commas: {', '.join(allowed)}")
    return names


def read_link(text: str) -> float:
    """Return the bytes per second of a link such as `100Mb` or `1Gb`."""
    match = _RATE.match(text.strip())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"'{text}' is not a link", hint="Write its bits per second: 100Mb, 1Gb or 2.5Gb.")
    return float(match[1]) * (1e6 if match[2].upper() == "M" else 1e9) / 8


def run_bench(
    recipes: Sequence[str],
    compressors: Sequence[str],
    links: Sequence[str],
    *,
    steps: int,
    settings: dict[str, Any],
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Train every recipe under every compressor over every link, on two ranks; return one record per run."""
    cases = [(recipe, compressor) for recipe in recipes for compressor in compressors]
    records: list[dict[str, Any]] = []
    with ExitStack() as stack:
        hosts, obstacle = open_hosts(stack)
        emulation = NAMESPACES if hosts else SLEEPING
        say(f"links: {emulation}" + (f" ({obstacle})" if obstacle else ""))
        for link in links:
            say(f"{link}: {len(cases)} runs of {steps} steps on {RANKS} ranks")
            rate = read_link(link)
            request = {"cases": cases, "steps": steps, "settings": settings, "rate": None if hosts else rate}
            for host in hosts:
                host.slow(f"{int(rate * 8)}bit", burst=str(max(1 << 16, int(rate * 0.002))), queue="50ms")
            found = _run(request, hosts)
            records += [_record(found, *case, link, emulation) for case in cases]
    return records


def open_hosts(stack: ExitStack) -> tuple[list[HostNamespace], str]:
    """Return two hosts whose links the kernel can slow down; none, and the reason, where that is not possible."""
    with ExitStack() as made:
        try:
            hosts = made.enter_context(network(RANKS))
            hosts[0].slow("1gbit")
        except UsageError as error:
            return [], error.message
        except (OSError, subprocess.CalledProcessError) as error:  # no tc, or a kernel without token buckets
            return [], f"the link cannot be shaped: {getattr(error, 'stderr', None) or error}".strip()
        stack.enter_context(made.pop_all())
        return hosts, ""


def probe(recipes: Sequence[str]) -> dict[str, Any]:
    """Measure on two ranks of this machine what the adviser needs."""
    with scratch_folder("probe") as folder:
        payload = folder / "request.json"
        payload.write_text(json.dumps({"recipes": list(recipes)}), encoding="utf-8")
        launch_ranks("run_probe", payload)
        found: dict[str, Any] = json.loads((folder / "probe.json").read_text(encoding="utf-8"))
        return found


def launch_ranks(function: str, payload: Path, **spec: Any) -> None:
    """Start ranks of the benchmark here and wait for them; their failure is raised."""
    target = CallTarget(f"phalanx.tools.bench.compression.rank:{function}", str(payload))
    log_dir = payload.parent / f"logs-{spec.get('node_rank', 0)}"
    run_on_ranks(LaunchSpec(target=target, **{"ranks_per_node": RANKS, "log_dir": log_dir, **spec}))


def run_node(payload: str, node: str, endpoint: str) -> None:
    """Run one of two nodes with one rank each; called in a process inside a namespace."""
    where = {"num_nodes": RANKS, "node_rank": int(node), "rdzv_endpoint": endpoint}
    launch_ranks("run_cases", Path(payload), ranks_per_node=1, threads_per_rank=1, **where)


def _run(request: dict[str, Any], hosts: Sequence[HostNamespace]) -> dict[tuple[str, str], Any]:
    """Run all cases over one link; return the result of each."""
    with scratch_folder("bench") as folder:
        payload = folder / "request.json"
        payload.write_text(json.dumps(request), encoding="utf-8")
        if hosts:
            _run_on_hosts(payload, hosts)
        else:
            launch_ranks("run_cases", payload, threads_per_rank=1)
        cases = request["cases"]
        return {case: json.loads((folder / f"{'-'.join(case)}.json").read_text("utf-8")) for case in cases}


def _run_on_hosts(payload: Path, hosts: Sequence[HostNamespace]) -> None:
    """Run a node on each host; when one fails, or this process is interrupted, the other is ended too."""
    code = f"from {__name__} import run_node; run_node(*sys.argv[1:])"
    streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    commands = [own_python(code, payload, node, f"{hosts[0].address}:{_PORT}") for node in range(RANKS)]
    processes = [subprocess.Popen(host.command(*words), **streams) for host, words in zip(hosts, commands, strict=True)]
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


def _record(
    found: dict[tuple[str, str], Any], recipe: str, compressor: str, link: str, emulation: str
) -> dict[str, Any]:
    target, result = target_loss(found[recipe, "none"]["curve"]), found[recipe, compressor]
    curve = result["curve"]
    return {
        "recipe": recipe,
        "compressor": compressor,
        "link": link,
        "emulation": emulation,
        "ranks": RANKS,
        "steps": len(curve),
        "seconds": curve[-1][0],
        "final_loss": smoothed(curve)[-1],
        "target_loss": target,
        "time_to_target_s": time_to(curve, target),
        **result,
    }


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
    reached = (seconds for (seconds, _), loss in zip(curve, smoothed(curve), strict=True) if loss <= target)
    return next(reached, None)


def bench_table(records: Sequence[dict[str, Any]]) -> str:
    """Return the runs as aligned columns; `speed-up` compares times to the target loss."""
    head = ("recipe", "link", "compressor", "step ms", "to target s", "speed-up", "final loss", "sent", "of plain")
    plain = {(r["recipe"], r["link"]): r["time_to_target_s"] for r in records if r["compressor"] == "none"}
    rows = []
    for record in records:
        reached, reference = record["time_to_target_s"], plain[record["recipe"], record["link"]]
        rows.append(
            (
                *(record["recipe"], record["link"], record["compressor"]),
                f"{1000 * record['seconds'] / record['steps']:.1f}",
                "-" if reached is None else f"{reached:.2f}",
                "-" if reached is None or reference is None else f"{reference / reached:.2f}x",
                f"{record['final_loss']:.4f}",
                size(record["sent_bytes"]),
                f"{record['sent_bytes'] / record['plain_bytes']:.1%}",
            )
        )
    return table([head, *rows])


def plot(records: Sequence[dict[str, Any]], path: str) -> None:
    """Draw, for each recipe, the time to the target loss over each link, and the bytes sent."""
    links = list(dict.fromkeys(record["link"] for record in records))
    charts = []
    for recipe in dict.fromkeys(record["recipe"] for record in records):
        own = [record for record in records if record["recipe"] == recipe]
        names = Axis("compressor", names=tuple(dict.fromkeys(record["compressor"] for record in own)))
        reached = [record for record in own if record["time_to_target_s"] is not None]
        label = f"{recipe}: s to loss {own[0]['target_loss']:.3f} (no mark: not reached)"
        times = Plot(names, Axis.of(label, [0.0, *(record["time_to_target_s"] for record in reached)]), _CELL)
        for record in reached:
            point = record["compressor"], record["time_to_target_s"]
            times.mark(point, COLORS[links.index(record["link"]) % len(COLORS)], f"{record['link']}: {point[1]:.2f} s")
        counts = {record["compressor"]: max(record["sent_bytes"], 1) for record in own}
        title = f"bytes sent by a rank in {own[0]['steps']} steps"
        sent = Plot(names, Axis(title, min(counts.values()), max(counts.values()), log=True), _CELL)
        for point in counts.items():
            sent.mark(point, COLORS[0], size(point[1]))
        charts += [times.svg(), sent.svg()]
    title = f"Gradient compression, {RANKS} ranks, {records[0]['emulation']}"
    write_picture(path, title, charts, _CELL, links)
