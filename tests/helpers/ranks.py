"""Run a test's function on warm ranks, or a script under the launcher, and bring back what happened."""

from __future__ import annotations

import pickle
import socket
import textwrap
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import programs

from phalanx.errors import RankFailedError
from phalanx.launch import CallTarget, LaunchResult, LaunchSpec, ScriptTarget, launch
from phalanx.launch.forkserver import client
from phalanx.observe.guard import Streams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def run_on_ranks(directory: Path, function: Callable[..., Any], args: tuple[Any, ...], world_size: int) -> list[Any]:
    """Call `function(*args)` on `world_size` ranks with a gloo group, and return what each returned, by rank."""
    (directory / "payload").write_bytes(_pickle_by_value(function, args))
    spec = LaunchSpec(
        target=CallTarget("ranks:call_payload", str(directory)), ranks_per_node=world_size, log_dir=directory / "logs"
    )
    result = launch(spec, RecordingConsole())
    if result.failure is not None:
        _raise_in_test(directory, result)
    return [pickle.loads((directory / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _pickle_by_value(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle a test's function with what it refers to, so that ranks need not import the test module (and pytest)."""
    import sys

    module = sys.modules[function.__module__]
    registered = module.__name__ not in cloudpickle.list_registry_pickle_by_value()
    if registered and module.__name__ != "__main__":
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((function, args))
    finally:
        if registered and module.__name__ != "__main__":
            cloudpickle.unregister_pickle_by_value(module)


def _raise_in_test(directory: Path, result: LaunchResult) -> None:
    assert result.failure is not None
    path = directory / f"error-{result.failure.rank}"
    if not path.exists():
        raise RankFailedError(str(result.failure), exit_code=result.exit_code)
    error, frames = pickle.loads(path.read_bytes())
    error.add_note(f"on rank {result.failure.rank}:\n{frames}")
    raise error


def call_payload(payload: str) -> None:
    """In a rank: join a gloo group, call the function, leave its result. The group is never destroyed (see `rank`)."""
    import torch.distributed as dist

    directory = Path(payload)
    function, args = pickle.loads((directory / "payload").read_bytes())
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        result = function(*args)
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        _write_whole(directory / f"error-{rank}", cloudpickle.dumps((error.with_traceback(None), text)))
        raise
    _write_whole(directory / f"result-{rank}", cloudpickle.dumps(result))
    if dist.is_initialized():
        _await_all(dist.distributed_c10d._get_default_store(), dist.get_world_size())


def _await_all(store: Any, size: int) -> None:
    """Wait until all ranks are here: none may leave while another still receives from it.

    After a collective, a rank that is done first could. The store is the launcher's.
    """
    arrived = store.add("functions returned", 1)
    while arrived < size:
        time.sleep(0.002)
        arrived = store.add("functions returned", 0)


def _write_whole(path: Path, data: bytes) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(data)
    fresh.replace(path)


@dataclass
class RecordingConsole:
    """Keeps everything it receives; `on_line` and `on_event` let a test react in the middle of a launch."""

    lines: list[tuple[int, str]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    on_line: Callable[[str], object] = lambda line: None
    on_event: Callable[[dict[str, Any]], object] = lambda event: None
    streams: Streams = field(default_factory=Streams)

    def rank_output(self, rank: int, label: str, text: str, *, err: bool = False) -> None:
        line = text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text
        self.lines.append((rank, line))
        self.on_line(line)

    def handle(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self.on_event(event)

    def notice(self, text: str) -> None:
        self.notices.append(text)

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)


@dataclass
class ScriptRun:
    """What came of a script under the launcher."""

    result: LaunchResult
    console: RecordingConsole
    log_dir: Path

    def log(self, rank: int) -> str:
        path = self.log_dir / f"rank-{rank}.log"
        return path.read_text() if path.exists() else ""  # a rank that printed nothing leaves no log

    @property
    def report(self) -> str:
        return str(self.result.failure)


def run_script(directory: Path, source: str, console: RecordingConsole | None = None, **spec: Any) -> ScriptRun:
    """Write `source` to train.py and launch it, on 2 ranks unless told otherwise."""
    args = spec.pop("args", ())
    directory.mkdir(exist_ok=True)
    script = directory / "train.py"
    script.write_text(textwrap.dedent(source))
    console = console or RecordingConsole()
    settings = {"ranks_per_node": 2, "log_dir": directory / "logs", **spec}
    result = launch(LaunchSpec(target=ScriptTarget(script, args), **settings), console)
    return ScriptRun(result, console, settings["log_dir"])


def free_endpoint() -> str:
    """Return an address of this machine that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def run_nodes(
    directory: Path,
    source: str,
    *,
    node_ranks: Sequence[int | None] = (0, 1),
    sizes: Sequence[int] = (2, 1),
    endpoint: str = "",
    identities: Sequence[dict[str, str]] = ({}, {}, {}),
    **spec: Any,
) -> list[ScriptRun]:
    """Launch a script on several nodes: one launcher for each, all in this process."""
    endpoint = endpoint or free_endpoint()

    def run(index: int) -> ScriptRun:
        return run_script(
            directory / f"node{index}",
            source,
            node_rank=node_ranks[index],
            rdzv_endpoint=endpoint,
            ranks_per_node=sizes[index],
            console_ranks="all",
            identity=identities[index],
            **{"num_nodes": len(node_ranks), **spec},
        )

    with ThreadPoolExecutor(len(node_ranks)) as pool:
        return list(pool.map(run, range(len(node_ranks))))


def warm_pid() -> int | None:
    """Return the id of this process's fork server, or None when there is none."""
    return None if client._current is None else client._current.pid


def kept_pids() -> set[int | None]:
    """Return the ids of the processes that outlive a test: the fork server, and what programs are forked from."""
    return {warm_pid(), programs.pid()}
