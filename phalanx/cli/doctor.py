"""`phalanx doctor`: what is wrong or slow on this machine, or on several, with a fix for each finding."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from phalanx.cli.flags import FlagParser
from phalanx.cli.json_output import add_json_flag, add_output_flag, print_json
from phalanx.config.names import unknown_value
from phalanx.errors import UsageError
from phalanx.host.files import scratch_folder
from phalanx.host.gpus import count_gpus
from phalanx.launch.nccl import CLUSTERS, Variable, nccl_variables
from phalanx.launch.output import PlainConsole
from phalanx.tools.bench.comm.plan import BenchPlan
from phalanx.tools.bench.comm.report import gpu_links, make_row
from phalanx.tools.doctor.gpus import check_gpus, check_log, log_environment, read_log
from phalanx.tools.doctor.host import check_host
from phalanx.tools.doctor.hosts import ask_hosts, ask_job, compare_hosts, job_hosts, ssh_words
from phalanx.tools.doctor.network import by_srun, check_links, check_network, over_ssh
from phalanx.tools.doctor.reader import LEVELS, CheckResult, HostReader, worst

_HELP = (
    "Check GPUs, driver, network, memory, limits and versions of this machine, or of several, and print a fix for each "
    "finding. The exit code is 1 if an error was found that would stop or spoil training, else 0."
)
_SLOW_SHARE = 0.1
_MARKS = {"ok": "ok", "note": "note", "warning": "WARNING", "error": "ERROR"}


def parser() -> FlagParser:
    """Return the parser of the verb."""
    parser = FlagParser(
        prog="phalanx doctor", usage="phalanx doctor [--hosts A,B] [--measure] [--json]", description=_HELP
    )
    parser.add_argument("--hosts", metavar="A,B", help="check these hosts by ssh, and what differs between them")
    parser.add_argument("--ssh", default="ssh", metavar="COMMAND", help="the ssh command with options [ssh]")
    parser.add_argument(
        "--python", default=sys.executable, metavar="PATH", help="the interpreter on the hosts [this one]"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="also measure collectives on this machine (15 s), or the links between the hosts",
    )
    parser.add_argument("--problems", action="store_true", help="show problems only")
    text = "write what the checks read, for another person ('-': print it)"
    add_output_flag(parser, "--record", endings=(".json",), help=text)
    parser.add_argument("--replay", metavar="FILE", help="check a machine that was recorded")
    kinds = "|".join(CLUSTERS)
    parser.add_argument(
        "--nccl-env",
        metavar=kinds,
        help="print the NCCL variables for a kind of cluster, with reasons, and check nothing; use them with "
        'eval "$(phalanx doctor --nccl-env ethernet)", or let the launcher set them: train --nccl-env ethernet',
    )
    parser.add_argument("--interface", metavar="NAME", help="--nccl-env: network card [that of the default route]")
    add_json_flag(parser, "the findings")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = parser().parse_all(arguments)
    if namespace.nccl_env is not None:
        return _print_variables(namespace.nccl_env, namespace.interface, as_json=namespace.json)
    if namespace.record is not None:
        return _record(namespace.record)
    results_of = _examine(namespace)
    results = [result for group in results_of.values() for result in group]
    if namespace.json:
        print_json({host: [dataclasses.asdict(result) for result in group] for host, group in results_of.items()})
    else:
        print("\n".join(_lines(results_of, problems=namespace.problems)))
    return int(worst(results) == "error")


def _examine(namespace: argparse.Namespace) -> dict[str, list[CheckResult]]:
    hosts = _hosts(namespace.hosts)
    in_job = job_hosts() if not hosts and namespace.replay is None else []
    if namespace.measure and namespace.replay is not None:
        raise UsageError("--measure needs the machine itself, and --replay reads a recording")
    if namespace.replay is not None:
        machine = HostReader.load(Path(namespace.replay))
        return {machine.fact("hostname"): list(examine(machine))}
    if not hosts and not in_job:
        measured = _measure() if namespace.measure else []
        machine = HostReader()
        return {machine.fact("hostname"): [*examine(machine), *measured]}
    ssh = ssh_words(namespace.ssh)
    answers = ask_hosts(hosts, ssh, namespace.python) if hosts else ask_job(in_job)
    machines = {host: answer for host, answer in answers.items() if isinstance(answer, HostReader)}
    results = _examine_several(answers, machines)
    if namespace.measure:
        run = over_ssh(machines, ssh, namespace.python) if hosts else by_srun(list(machines))
        results["all hosts"] += check_links(machines, run)
    return results


def _hosts(text: str | None) -> list[str]:
    hosts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if text is not None and not hosts:
        raise UsageError(f"--hosts {text!r} names no host", hint="Write: --hosts node1,node2")
    if len(set(hosts)) < len(hosts):
        raise UsageError(f"--hosts {text}: a host is named twice")
    return hosts


def _examine_several(
    answers: Mapping[str, HostReader | str], machines: Mapping[str, HostReader]
) -> dict[str, list[CheckResult]]:
    results = {host: list(examine(machine)) for host, machine in machines.items()}
    for host, answer in answers.items():
        if isinstance(answer, str):
            fix = f"ssh {host} true; phalanx must be installed there for the interpreter of --python"
            results[host] = [CheckResult("error", "host", f"it could not be checked: {answer}", fix)]
    return {**results, "all hosts": list(compare_hosts(machines))}


def examine(machine: HostReader) -> Iterator[CheckResult]:
    """Run all checks of one machine."""
    yield from check_gpus(machine)
    yield from check_network(machine)
    yield from check_host(machine)


def _measure() -> Iterator[CheckResult]:
    """Measure an all-reduce of the ranks that fit on this machine, and compare it with what its links allow."""
    from phalanx.tools.bench.comm.run import run_bench

    gpus = count_gpus()
    shared = gpus == 1  # nccl's choices are shown by two ranks on it; their speed means nothing
    algos = ("nccl",) if gpus > 1 else ("gloo", "shm", "nccl") if shared else ("gloo", "shm")
    plan = BenchPlan(op="all_reduce", algos=algos, sizes=(16 << 20,), p2p=True, ranks_per_gpu=1 + shared)
    with open(os.devnull, "w") as nowhere, scratch_folder("doctor") as folder:
        console = PlainConsole(out=nowhere, err=nowhere)
        measured = run_bench(plan, max(2, gpus), console, env=log_environment(folder)) or {}
        if gpus:
            yield from check_log(read_log(folder), shared=shared)
    links = [link.expected_gbs for link in gpu_links() if link.expected_gbs] if gpus > 1 else []
    expected, reference = (max(links), "link of a GPU") if links else (measured["copy_gbs"], "copy by one core")
    for row in map(make_row, measured["rows"]):
        if row.wrong:
            text = f"all_reduce by {row.algo} has {row.wrong} wrong elements of {row.count}"
            yield CheckResult("error", "bandwidth", text, f"phalanx bench comm --algo {row.algo}; nvidia-smi -q -d ECC")
        if row.algo == "nccl" and shared:
            continue
        share = row.busbw_gbs / expected if expected else 0.0
        text = f"all_reduce of 16 MiB by {row.algo}: {row.busbw_gbs:.2f} GB/s"
        text += f", {share:.0%} of a {reference} ({expected:.1f} GB/s)"
        slow = share < _SLOW_SHARE and row.algo != "gloo"  # which goes through the kernel's sockets
        fix = "phalanx bench comm --link-report; other jobs on this machine; NCCL_DEBUG=INFO" if slow else ""
        yield CheckResult("warning" if slow else "ok", "bandwidth", text, fix)


def _print_variables(kind: str, interface: str | None, *, as_json: bool) -> int:
    if kind not in CLUSTERS:
        hint = f"Write: phalanx doctor --nccl-env {' | '.join(CLUSTERS)}"
        raise UsageError(unknown_value("nccl_env", "kind of cluster", kind, CLUSTERS), hint=hint)
    variables = nccl_variables(kind, interface)
    if as_json:
        print_json([{**variable._asdict(), "set": os.environ.get(variable.name)} for variable in variables])
    else:
        print(_as_shell(variables))
    return 0


def _as_shell(variables: Sequence[Variable]) -> str:
    quoted = [f"'{v.value}'" if set(v.value) & set(" ^,") else v.value for v in variables]
    exports = [f"{'# ' * v.advice}export {v.name}={value}" for v, value in zip(variables, quoted, strict=True)]
    lines = []
    for variable, export in zip(variables, exports, strict=True):
        now = os.environ.get(variable.name)
        differs = f" (now: {now})" if now not in (None, variable.value) else ""
        lines.append(f"{export:<{max(map(len, exports))}}  # {variable.reason}{differs}")
    return "\n".join(lines)


def _record(path: str) -> int:
    machine = HostReader()
    for _ in examine(machine):
        pass
    machine.fact("address")
    machine.fact("time")  # last: the clock is compared with that of the host that asked
    text = json.dumps(machine.answers, sort_keys=True)
    if path == "-":
        print(text)
    else:
        Path(path).write_text(text + "\n")
        print(f"written: {path}; read it with: phalanx doctor --replay {path}")
    return 0


def _lines(results_of: Mapping[str, Sequence[CheckResult]], *, problems: bool) -> Iterator[str]:
    for host, results in results_of.items():
        listed = [result for result in results if not problems or result.level != "ok"]
        if not listed and len(results_of) > 1:
            continue
        yield f"{host}:"
        width = max((len(result.topic) for result in listed), default=0)
        for result in sorted(listed, key=lambda item: -LEVELS.index(item.level)):
            yield f"  {_MARKS[result.level]:<7}  {result.topic:<{width}}  {result.text}"
            if result.fix:
                yield f"  {'':<7}  {'':<{width}}  -> {result.fix}"
    levels = [result.level for results in results_of.values() for result in results]
    counts = [f"{levels.count(level)} {level}{'s' * (levels.count(level) != 1)}" for level in reversed(LEVELS[1:])]
    yield ", ".join(counts)
