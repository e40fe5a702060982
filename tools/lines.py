"""Print the lines and files of the package per capability: `python tools/lines.py`. Lines are a cost."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "phalanx"

CAPABILITIES = {
    "Training loop and trainers": ("loop", "trainers", "worker"),
    "Launcher, failures, restarts": ("launch", "runs", "host"),
    "Rank environment, layout, mesh": ("world",),
    "Configuration": ("config", "engine_rules", "recipes"),
    "Command line": ("cli",),
    "Strategies: ddp, fsdp, ring, local-sgd, expert, compose": ("strategies",),
    "Pipeline, tensor and context parallelism": ("strategies/pipeline", "strategies/tensor", "strategies/context"),
    "Parameter servers": ("comm/ps", "strategies/parameter_server", "strategies/server_group"),
    "Collectives, shared memory, reducer, backend": ("comm",),
    "Gradient compression": ("comm/compress", "bench/compression", "cli/bench/compression"),
    "Benchmark of collectives": ("bench", "cli/bench/comm"),
    "Checkpoints": ("checkpoint",),
    "Data": ("data",),
    "Models, Hugging Face, LoRA": ("models",),
    "Events, console, TensorBoard, MLflow": ("observe",),
    "Profiles: record, merge, analyse": ("trace", "cli/trace", "loop/profiling", "config/profile", "world/clock"),
    "Dashboard": ("ui", "cli/ui"),
    "phalanx verify": ("verification", "cli/verify"),
    "Tuning": ("tune", "engines/ray/tune", "cli/tune"),
    "Planner, dry run, calibration": (
        "plan",
        "cli/plan",
        "bench/calibrate",
        "trainers/auto",
        "trainers/fake_ranks",
        "trainers/fake_report",
        "trainers/memory_trace",
        "trainers/shapes",
        "torch_fakes",
    ),
    "Clusters: submit, jobs": ("submit", "cli/submit", "cli/jobs", "cli/status", "cli/logs", "cli/cancel"),
    "Doctor": ("doctor", "cli/doctor"),
    "Hangs: records, comparison, stacks": (
        "launch/blame",
        "launch/collectives",
        "launch/inquiry",
        "launch/stacks",
        "observe/collectives",
        "cli/stacks",
    ),
    "Failure models": ("reliability", "cli/simulate", "cli/chaos"),
    "Horovod": ("engines/horovod",),
    "Ray": ("engines/ray",),
    "TensorFlow": ("engines/tensorflow",),
    "DeepSpeed": ("engines/deepspeed", "config/deepspeed"),
    "Public names, errors, engine protocol, private torch": ("",),
}
"""By path below the package, without the suffix; the longest match counts."""


def capability_of(path: Path) -> str:
    """Return the capability that a module belongs to."""
    name = path.relative_to(PACKAGE).with_suffix("").as_posix()
    matches = [
        (len(prefix), capability)
        for capability, prefixes in CAPABILITIES.items()
        for prefix in prefixes
        if not prefix or name == prefix or name.startswith(f"{prefix}/")
    ]
    return max(matches)[1]


def counts() -> dict[str, tuple[int, int]]:
    """Return (lines, files) per capability, the heaviest first."""
    found: dict[str, tuple[int, int]] = {}
    for path in PACKAGE.rglob("*.py"):
        lines, files = found.get(capability_of(path), (0, 0))
        found[capability_of(path)] = (lines + len(path.read_text().splitlines()), files + 1)
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def table() -> str:
    """Return the counts as a Markdown table."""
    rows = [f"| {name} | {lines:,} | {files} |" for name, (lines, files) in counts().items()]
    total = [sum(pair[place] for pair in counts().values()) for place in (0, 1)]
    return "\n".join(["| capability | lines | files |", "|---|---|---|", *rows, f"| all | {total[0]:,} | {total[1]} |"])


if __name__ == "__main__":
    print(table())
