"""`phalanx verify`: a real run under a list of faults, and what became of each of them. No torch until it compares."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.host.processes import own_python
from phalanx.loop.faults import LINK, OBJECTS, VARIABLE, weights_file
from phalanx.observe.format import table
from phalanx.observe.goodput import EVENTS, read_events
from phalanx.reliability import Fault, Mark, Marks, to_json
from phalanx.tools.namespaces import HostNamespace, network

_TOKEN = "PHALANX_FAULTS_RUN"
"""A variable by which the processes of a run under faults are recognised."""
_PORT = 29400
_ENDING_SECONDS = 3.0
_TAIL_LINES = 25
_SILENT = ("corrupt", "slow")
"""Faults after which the ranks go on as they are."""
ROUNDING = 1e-4


class PlannedFaults:
    """Faults in a file that the ranks of a run read; those that happened are marked beside it."""

    def __init__(self, file: Path, faults: Sequence[Fault], *, objects: bool = False) -> None:
        """`objects`: whether the run has an optimizer and a scheduler object."""
        self.file, self._faults = file, faults
        self.variables = {VARIABLE: str(file), **({OBJECTS: "1"} if objects else {})}
        """The environment of the run."""
        file.write_text(to_json(faults))

    def marks(self) -> dict[int, Mark]:
        """Return when each fault happened, by its number."""
        return Marks(Path(f"{self.file}.marks")).read()

    def missing(self) -> list[Fault]:
        """Return the faults that did not happen."""
        marks = self.marks()
        return [fault for number, fault in enumerate(self._faults) if number not in marks]


@dataclass(frozen=True)
class FaultResult:
    """What became of a fault."""

    fault: Fault
    mark: Mark | None
    """None where it did not happen: the run had ended before."""
    detected: float | None = None
    """Seconds until the launcher knew."""
    recovered: float | None = None
    """Seconds until the next step was complete; of a restart, until training began again."""
    lost_steps: int = 0
    how: str = "did not happen"

    @property
    def survived(self) -> bool:
        """Whether the run went on after it."""
        return self.mark is not None and (self.recovered is not None or self.fault.kind in _SILENT)


@dataclass
class FaultsReport:
    """A run under faults: what became of them, the weights, and what was left behind."""

    run_dir: Path
    exit_code: int
    results: list[FaultResult]
    left: list[str]
    exact: bool
    """Whether equal bits are required, and not only equality within rounding."""
    difference: float | None = None
    """The largest relative difference of the weights from those of the quiet run; None: not compared."""
    differs: str = ""
    """The first tensor that is not equal to the last bit."""
    output: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """What is wrong; empty where the run passed."""
        listed = [] if self.exit_code == 0 else [f"the run failed with exit code {self.exit_code}: {self.run_dir}"]
        listed += [f"{result.fault} was not survived" for result in self.results if result.mark and not result.survived]
        if self.difference is not None and self.difference > (0.0 if self.exact else ROUNDING):
            listed.append(f"the weights differ from the quiet run by {self.difference:.1e}, first in {self.differs}")
        return listed + [f"left behind: {leftover}" for leftover in self.left]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold."""
        names = ("run_dir", "exit_code", "left", "exact", "difference")
        faults = [{**dataclasses.asdict(result), "fault": str(result.fault)} for result in self.results]
        return {**{name: getattr(self, name) for name in names}, "problems": self.problems, "faults": faults}

    def __str__(self) -> str:
        head = ("fault", "after step", "detected", "recovered", "lost steps", "how")
        return "\n".join([table([head, *map(_row, self.results)]), "", *self._summary(), *self._verdict()])

    def _summary(self) -> list[str]:
        happened = [result for result in self.results if result.mark is not None]
        times = sorted(result.recovered for result in happened if result.recovered is not None)
        lines = [f"{len(happened)} of {len(self.results)} faults happened"]
        if times:
            lines[0] += f"; recovered in {times[len(times) // 2]:.2f} s (median), {times[-1]:.2f} s (longest)"
            lines[0] += f"; at most {max(result.lost_steps for result in happened)} steps lost"
        if self.difference is not None:
            equal = "bit-identical to" if self.difference == 0 else f"{self.difference:.1e} from"
            lines.append(f"weights: {equal} those of the quiet run")
        return lines

    def _verdict(self) -> list[str]:
        if not self.problems:
            return [f"PASSED  {self.run_dir}"]
        tail = self.output[-_TAIL_LINES:] if self.exit_code else []
        return [*(f"  {line}" for line in tail), "FAILED", *(f"  {problem}" for problem in self.problems)]


def _row(result: FaultResult) -> tuple[str, ...]:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f} s"

    step = "-" if result.mark is None else str(result.mark.step)
    times = (seconds(result.detected), seconds(result.recovered))
    return (str(result.fault), step, *times, str(result.lost_steps) if result.mark else "-", result.how)


def train_under_faults(
    words: Sequence[str],
    faults: Sequence[Fault],
    folder: Path,
    *,
    nodes: int = 1,
    exact: bool,
    compare: bool,
    checkpoints: bool = True,
    objects: bool = False,
) -> FaultsReport:
    """Run `phalanx train` with these words under the faults, and without them where the weights are compared.

    `checkpoints`: whether the hosts of several nodes get a folder that all of them see. `objects`: whether the runs
    have an optimizer and a scheduler object.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan = PlannedFaults(folder / "faults.json", faults, objects=objects)
    no_faults = PlannedFaults(folder / "quiet.json", (), objects=objects)
    if compare:
        quiet = _Run(words, folder / "quiet", folder / "quiet.txt", no_faults.variables, checkpoints)
        if code := quiet.run([None]):
            return FaultsReport(folder / "quiet", code, [], quiet.left, exact, output=quiet.output)
    run = _Run(words, folder / "run", folder / "output.txt", plan.variables, checkpoints)
    with network(nodes) if nodes > 1 else contextlib.nullcontext([None]) as hosts:
        code = run.run(hosts)
    results = judge_faults(faults, plan.marks(), run.events())
    report = FaultsReport(run.run_dir, code, results, run.left, exact, output=run.output)
    if compare and code == 0:
        report.difference, report.differs = weights_difference(no_faults.file, plan.file)
    return report


class _Run:
    """One run of `phalanx train`, on this machine or on hosts, resumed where its launcher was killed."""

    def __init__(
        self, words: Sequence[str], run_dir: Path, output: Path, variables: dict[str, str], checkpoints: bool
    ) -> None:
        self._words, self.run_dir, self._output = list(words), run_dir, output
        self._temporary = run_dir.parent / f"{run_dir.name}.tmp"
        self._token = secrets.token_hex(8)
        self._env = {**os.environ, _TOKEN: self._token, "TMPDIR": str(self._temporary), **variables}
        self._checkpoints = checkpoints
        self.left: list[str] = []

    def run(self, hosts: Sequence[HostNamespace | None]) -> int:
        """Run to the end; return the exit code, of several hosts the lowest: a host that was cut off ends by itself."""
        self._temporary.mkdir(parents=True, exist_ok=True)
        launchers: list[subprocess.Popen[bytes]] = []
        try:
            launchers += [self._start(self._command(number, hosts), host) for number, host in enumerate(hosts)]
            while len(hosts) == 1 and launchers[-1].wait() == -signal.SIGKILL:
                launchers.append(self._start(["resume", str(self.run_dir)], None))
            return min(abs(launcher.wait()) for launcher in launchers[-len(hosts) :])
        finally:
            for launcher in launchers:
                with contextlib.suppress(ProcessLookupError):
                    launcher.terminate()
                launcher.wait()
            self.left = self._leftovers()

    def _command(self, number: int, hosts: Sequence[HostNamespace | None]) -> list[str]:
        end = self._words.index("--") if "--" in self._words else len(self._words)
        flags = ["--num-nodes", str(len(hosts)), "--run-dir", str(self.run_dir)]
        if (first := hosts[0]) is not None:
            flags[-1] += str(number or "")
            flags += ["--checkpoint-dir", f"{self.run_dir}/checkpoints"] if self._checkpoints else []
            flags += ["--node-rank", str(number), "--rdzv-endpoint", f"{first.address}:{_PORT}"]
        return ["train", *self._words[:end], *flags, *self._words[end:]]

    def _start(self, words: Sequence[str], host: HostNamespace | None) -> subprocess.Popen[bytes]:
        command = own_python("from phalanx.cli import main; sys.exit(main())", *words)
        env = {**self._env, **({} if host is None else {LINK: host.link})}
        with self._output.open("ab") as output:
            return subprocess.Popen(
                command if host is None else host.command(*command),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> list[str]:
        """What the run printed."""
        return self._output.read_text(errors="replace").splitlines() if self._output.exists() else []

    def events(self) -> list[dict[str, Any]]:
        """Return the events of the run in the order of time; each host has its own file."""
        paths = sorted(self.run_dir.parent.glob(f"{self.run_dir.name}*/{EVENTS}"))
        return sorted((event for path in paths for event in read_events(path)), key=lambda event: float(event["time"]))

    def _leftovers(self) -> list[str]:
        """Return processes, temporary files and unfinished checkpoints that are left after the end."""
        deadline = time.monotonic() + _ENDING_SECONDS
        while (leftovers := list(_processes_with(f"{_TOKEN}={self._token}"))) and time.monotonic() < deadline:
            time.sleep(0.05)
        caches = ("torchinductor_", "__pycache__")
        leftovers += [str(path) for path in self._temporary.iterdir() if not path.name.startswith(caches)]
        leftovers += [str(path) for path in self.run_dir.glob("checkpoints/.writing-*")]
        if not leftovers:
            for path in sorted(self._temporary.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            self._temporary.rmdir()
        return leftovers


def _processes_with(variable: str) -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if variable.encode() in (path / "environ").read_bytes().split(b"\0"):
                yield f"process {path.name} ({(path / 'comm').read_text().strip()})"


def judge_faults(
    faults: Sequence[Fault], marks: dict[int, Mark], events: Sequence[dict[str, Any]]
) -> list[FaultResult]:
    """Return what became of each fault: the first change of the ranks after it, or the first restart."""
    changes = [event for event in events if event["event"] in ("recovered", "run_started")]
    results = []
    for number, fault in enumerate(faults):
        mark = marks.get(number)
        after = next((event for event in changes if mark is not None and event["time"] > mark.time), None)
        if mark is None:
            results.append(FaultResult(fault, None))
        elif fault.kind in _SILENT:
            results.append(FaultResult(fault, mark, how="the ranks went on"))
        elif after is None:
            results.append(FaultResult(fault, mark, how="no recovery"))
        else:
            results.append(_after_change(fault, mark, after))
    return results


def _after_change(fault: Fault, mark: Mark, change: dict[str, Any]) -> FaultResult:
    took = float(change["time"]) - mark.time
    if change["event"] == "run_started":
        how = "resumed by a new command" if fault.kind == "launcher" else "restart from a checkpoint"
        return FaultResult(fault, mark, None, took, max(0, mark.step - change["first_step"]), how)
    lost = max(change["lost_steps"], mark.step - change["step"])
    detected = max(0.0, took - float(change["seconds"]))
    return FaultResult(fault, mark, detected, took, max(0, lost), f"in place, {change['world_size']} ranks")


def weights_difference(first: Path, second: Path) -> tuple[float, str]:
    """Return the largest relative difference of the weights of two runs, and the first tensor with another bit.

    The runs are named by their plans of faults, beside which they have left their weights.
    """
    import torch

    from phalanx.tools.verify.probe import largest_difference, same_bits

    one, other = (torch.load(weights_file(plan), weights_only=True) for plan in (first, second))
    return largest_difference(one, other), same_bits(one, other) or ""
