"""`phalanx stacks RUN`: print where every rank of a run is, with equal stacks grouped."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from phalanx.cli.flags import FlagParser
from phalanx.diagnosis import latest_dump, process_of, read_calls
from phalanx.errors import UsageError
from phalanx.host.processes import is_stopped
from phalanx.launch.rank_files import ASK
from phalanx.observe.format import ranks_text
from phalanx.run.stored import RUNS, StoredRun, find_run

_HELP = """Print the stacks of the ranks of a run on this machine, with equal stacks grouped.

The ranks write their stacks themselves and go on training. --native uses py-spy, which also shows C++ frames and
works while a rank holds the interpreter lock. For a run that has ended, shows the stacks that its ranks left."""
_ANSWER_SECONDS = 4.0
_STACK_SECONDS = 0.3
_STACK = re.compile(r"rank-(\d+)\.stack")


def parser() -> FlagParser:
    """Return the parser of the verb."""
    parser = FlagParser(prog="phalanx stacks", usage="phalanx stacks RUN [--threads | --native]", description=_HELP)
    parser.add_argument("run", metavar="RUN", help="a name, the beginning of one, a tag, a folder, or last")
    parser.add_argument("--threads", action="store_true", help="show all threads, not only the main one")
    parser.add_argument("--native", action="store_true", help="use py-spy, with C++ frames (all threads)")
    parser.add_argument("--runs-dir", default=str(RUNS), metavar="DIR", help="the folder that holds the runs [runs]")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = parser().parse_all(arguments)
    stored = find_run(namespace.run, Path(namespace.runs_dir))
    logs = stored.path / "logs"
    named = [(path, match) for path in logs.glob("rank-*.stack") if (match := _STACK.fullmatch(path.name))]
    stack_files = {int(match[1]): path for path, match in named}
    pids = {rank: pid for rank in sorted(stack_files) if (pid := process_of(stored.path, rank)) is not None}
    if not pids:
        return _show_ended(stored, stack_files, namespace.threads)
    if namespace.native:
        texts = {rank: _native_stack(rank, pid) for rank, pid in pids.items()}
    else:
        texts = _ask({rank: (pids[rank], stack_files[rank]) for rank in pids}, namespace.threads)
    _print_groups(texts)
    _note_others(stored, pids)
    return 0


def _show_ended(stored: StoredRun, stack_files: dict[int, Path], threads: bool) -> int:
    """Show what the ranks of a run have left that has ended, or say why there is nothing."""
    if stored.status == "running":
        owner = _owner(stored.path)
        if owner is not None:
            raise UsageError(
                f"the ranks of {stored.name} belong to the user {owner}, and their stacks cannot be asked for",
                hint=f"Run: sudo -u {owner} phalanx stacks {stored.name}",
            )
        host = stored.record.host if stored.record is not None else "another node"
        raise UsageError(f"no rank of {stored.name} runs on this machine", hint=f"Run it on {host}, or in a moment.")
    texts = {rank: latest_dump(path.read_text(errors="replace"), threads) for rank, path in sorted(stack_files.items())}
    texts = {rank: text for rank, text in texts.items() if text}
    if not texts:
        raise UsageError(
            f"{stored.name} does not run (status: {stored.status}), and its ranks left no stacks",
            hint=f"Its logs are in {stored.path / 'logs'}.",
        )
    print(f"{stored.name} does not run (status: {stored.status}); these stacks were written before it ended:")
    _print_groups(texts)
    return 0


def _owner(path: Path) -> str | None:
    """Return the name of another user to whom a run belongs, None where it is this user's."""
    uid = path.stat().st_uid
    if uid == os.geteuid():
        return None

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _ask(ranks: dict[int, tuple[int, Path]], threads: bool) -> dict[int, str]:
    """Return each rank's stack, which it writes to its file and then, to tell that it is complete, its record."""
    began = time.time()
    for pid, _ in ranks.values():
        _send(pid, ASK)
    silent = dict(ranks)
    while silent and time.time() < began + _ANSWER_SECONDS:
        time.sleep(0.05)
        silent = {
            rank: process for rank, process in silent.items() if read_calls(process[1].parent, rank, began) is None
        }
        if all(is_stopped(pid) for pid, _ in silent.values()):
            break
    before = {rank: len(_read(path)) for rank, (_, path) in silent.items()}
    for pid, _ in silent.values():  # it holds the interpreter lock: only its main thread can write, from C
        _send(pid, signal.SIGQUIT)
    time.sleep(_STACK_SECONDS if silent else 0)
    texts = {}
    for rank, (pid, path) in ranks.items():
        text = latest_dump(_read(path)[before.get(rank, 0) :].decode(errors="replace"), threads)
        silence = "stopped (SIGSTOP or a debugger)" if is_stopped(pid) else "no answer; try --native"
        texts[rank] = text or f"  {silence}"
    return texts


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # the run has ended meanwhile
        return b""


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(pid, number)


def _native_stack(rank: int, pid: int) -> str:
    """Return the stack that py-spy reads out of a process."""
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))
    if spy is None:
        raise UsageError("--native needs py-spy, which is not installed", hint="Run: pip install 'phalanx[monitor]'")
    command = [spy, "dump", "--pid", str(pid)]
    done = subprocess.run([*command, "--native"], capture_output=True, text=True, check=False)
    if "not supported" in done.stderr.lower() or "native" in done.stderr.lower():  # not on this architecture
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        # The process and the numbers of threads differ between ranks that are at the same place.
        lines = done.stdout.splitlines()[3:]
        return "\n".join(re.sub(r"^Thread \S+ ", "Thread ", line) for line in lines).rstrip()
    error = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    if "ermission" in done.stderr or "EPERM" in done.stderr or "not permitted" in done.stderr:
        raise UsageError(
            f"py-spy may not read the process {pid} of rank {rank}: {' '.join(error)}",
            hint="Run it as root, or: sudo sysctl kernel.yama.ptrace_scope=0; in a container add --cap-add SYS_PTRACE "
            "(CAP_SYS_PTRACE). Without --native no such right is needed.",
        )
    raise UsageError(f"py-spy cannot read the process {pid} of rank {rank}: {' '.join(error)}")


def _print_groups(texts: dict[int, str]) -> None:
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_by_text.setdefault(text, []).append(rank)
    for text, ranks in sorted(ranks_by_text.items(), key=lambda item: (-len(item[1]), item[1])):
        print(f"{ranks_text(ranks)}:\n{text}\n")


def _note_others(stored: StoredRun, pids: dict[int, int]) -> None:
    """Say that ranks on other nodes are not shown."""
    total = int(stored.begun.get("world_size", 0))
    if len(pids) < total:
        print(f"{len(pids)} of {total} ranks are on this machine; run the same command on the others for theirs")
