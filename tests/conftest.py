"""Shared fixtures: functions on warm ranks, and guards that fail a test which leaves something behind."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import hypothesis
import programs
import psutil
import pytest
from ranks import ScriptRun, kept_pids, run_on_ranks, run_script
from s3_server import serve_s3

from phalanx.launch.forkserver import client
from phalanx.launch.forkserver.preload import PRELOAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest_plugins = ("broken_workers",)

_ROOT = Path(__file__).resolve().parents[1]
_SHARED_MEMORY = Path("/dev/shm")
_SET_BY_OTHERS = {
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTHONBREAKPOINT",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "PYTEST_CURRENT_TEST",
    "RAY_CLIENT_MODE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_PTXAS_PATH",
    "_MLFLOW_TELEMETRY_SESSION_ID",
}
"""pytest names the test, torch its caches and tools when its compiler is imported; DeepSpeed how it looks for GPUs;
scikit-learn, which Optuna and datasets import, how its threads start; Ray its debugger."""
_THREADS_OF_OTHERS = ("tqdm_monitor", "Dummy-", "Mlflow", "fsspecIO", "asyncio_")
"""A compiler's progress bar, threads of its C++ that called into Python, MLflow's pool, fsspec's event loop."""
_CACHES = ("torchinductor_", "__pycache__")
"""torch makes its cache directory once, when its compiler is imported; TensorFlow imports code that it writes there."""
_PATIENCE_SECONDS = 10.0


_SLOW_FIRST = ("engines", "faults", "launch", "run", "journeys", "docs", "cli", "tools", "parity")
"""Folders whose tests take long, in the order in which they begin; the short ones fill the gaps at the end."""
_LONGEST = ("test_tensorflow", "test_recovery", "test_deepspeed", "test_matrix", "test_submit_ssh", "test_seeds")
"""Files of more than a minute, the longest first: one that begins last delays the end."""
_ONE_AT_A_TIME = {
    **{engine: engine for engine in ("ray", "horovod", "tensorflow")},
    **dict.fromkeys(("test_matrix", "test_ring_parity"), "eight ranks"),
    **dict.fromkeys(("test_docs_site", "test_docs_width"), "the site"),
}
"""Parts of files' names, and what these files use as a whole: those of one value do not run beside each other.

Ray's machines have fixed addresses, Horovod and TensorFlow start as many threads as there are cores, eight ranks are
four for each of two cores, and the site is built once.
"""


def pytest_configure() -> None:
    """Give hypothesis time, and SIGINT its handler where the shell ignores it: tests of Ctrl-C inherit it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # How long hypothesis takes to draw its examples says how busy the machine is, not whether the code is right.
    hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
    hypothesis.settings.load_profile("busy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slow files."""
    items.sort(key=lambda item: (_position(_LONGEST, item.path.stem), _position(_SLOW_FIRST, _room(item.path))))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep what belongs together in one process: a file, whose fixtures are then made once, and the files of an engine.

    `--dist loadgroup` would do it by marks, but xdist 3.8 writes them into a name that pytest 9.2 no longer reads.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = Path(nodeid.split("::", 1)[0]).stem
            return next((whole for part, whole in _ONE_AT_A_TIME.items() if part in name), name)

    return ByFile(config, log)


def _room(path: Path) -> str:
    """Return the folder of `tests` that a file is in, at any depth."""
    return path.relative_to(_ROOT / "tests").parts[0]


def _position(names: tuple[str, ...], name: str) -> int:
    """Return where a name stands in a list; after its end, if it does not."""
    return names.index(name) if name in names else len(names)


class Ranks(Protocol):
    def __call__(self, function: Callable[..., Any], *args: Any, world_size: int = 4) -> list[Any]: ...


@pytest.fixture
def ranks(tmp_path_factory: pytest.TempPathFactory, fork_server: None) -> Ranks:
    """Run a function on warm ranks: `results = ranks(function, *args, world_size=4)`.

    A gloo group is up inside the function; results come back by rank; a rank's exception is raised in the test.
    """

    def run(function: Callable[..., Any], *args: Any, world_size: int = 4) -> list[Any]:
        return run_on_ranks(tmp_path_factory.mktemp("ranks"), function, args, world_size)

    return run


@pytest.fixture
def launch_script(tmp_path: Path, fork_server: None) -> Callable[..., ScriptRun]:
    """Launch a script given as text: `launch_script(source, console=None, **LaunchSpec fields)`."""
    return functools.partial(run_script, tmp_path)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[None]:
    """Have the fork server for the whole session, and end it with the session.

    It has imported what ranks of the package import.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PRELOAD, ",".join(programs.IMPORTED))
        client.prestart()
        yield
    client.shutdown()


@pytest.fixture(scope="module", autouse=True)
def _imported_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork ranks from a process that has imported what the file names: that takes longer than most of its tests."""
    if (names := getattr(request.module, "IMPORTED_BY_RANKS", None)) is None:
        yield
        return
    request.getfixturevalue("fork_server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PRELOAD, ",".join([*programs.IMPORTED, *names]))
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_compute_thread() -> None:
    """Leave the cores to the processes that run tests: threads of one would wait for those of another."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_temp_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the session a temporary directory of its own: what appears there is surely the tests' doing."""
    with pytest.MonkeyPatch.context() as patch:
        directory = str(tmp_path_factory.mktemp("tmp", numbered=False))
        patch.setenv("TMPDIR", directory)
        patch.setattr(tempfile, "tempdir", directory)
        yield


@pytest.fixture(scope="session", autouse=True)
def _warm_programs(_own_temp_dir: None) -> Iterator[None]:
    """Fork programs and fork servers from one process, which begins with the first of them."""
    programs.prepare()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "subprocess", programs)
        yield
    client.shutdown()
    programs.end()


@pytest.fixture(autouse=True)
def _no_leaks(_own_temp_dir: None) -> Iterator[None]:
    """Fail a test that leaves processes, threads, variables, files or another working directory behind."""
    before = _snapshot()
    yield
    deadline = time.monotonic() + _PATIENCE_SECONDS
    # A process that is just ending is not a leak.
    while (leaks := _find_leaks(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.chdir(before["cwd"])
    if leaks:
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)


def _snapshot() -> dict[str, Any]:
    return {
        "processes": {child.pid for child in psutil.Process().children(recursive=True)},
        "threads": set(threading.enumerate()),
        "variables": dict(os.environ),
        "cwd": os.getcwd(),
        "files": _watched_files(),
    }


def _watched_files() -> set[Path]:
    temp = Path(tempfile.gettempdir())
    # Caches of tools begin with a dot; so does nothing that Phalanx writes.
    own = {entry for entry in _ROOT.iterdir() if not entry.name.startswith((".", "__pycache__"))}
    # Logs of ranks that failed before the first step are kept there for the reader of the message.
    kept = (*_CACHES, "phalanx-logs-")
    temporary = {entry for entry in temp.iterdir() if not entry.name.startswith(kept)}
    shared = set(_SHARED_MEMORY.iterdir()) if _SHARED_MEMORY.is_dir() else set()
    # Semaphores do not tell whose they are, and any Python program on the machine makes them for multiprocessing; ranks
    # of mpirun in another test process make Open MPI's segments, and remove them after their last use.
    return own | temporary | {entry for entry in shared if not entry.name.startswith(("sem.", "vader_segment."))}


def _find_leaks(before: dict[str, Any]) -> list[str]:
    leaks = [f"process {process}" for process in _new_processes(before["processes"])]
    threads = [thread for thread in threading.enumerate() if thread not in before["threads"]]
    leaks += [f"thread {thread.name}" for thread in threads if not thread.name.startswith(_THREADS_OF_OTHERS)]
    leaks += _changed_variables(before["variables"])
    if os.getcwd() != before["cwd"]:
        leaks.append(f"working directory {os.getcwd()} (it was {before['cwd']})")
    new_files = _watched_files() - before["files"]
    return leaks + [f"file {path}" for path in sorted(new_files) if not _is_strangers(path)]


def _new_processes(before: set[int]) -> list[str]:
    own = kept_pids()
    found = []
    for child in psutil.Process().children(recursive=True):
        if child.pid in before or child.pid in own:
            continue
        try:
            words = child.cmdline()
            if any(word.startswith("--type=") for word in words):  # a part of a browser, whose main process counts
                continue
            found.append(f"{child.pid}: {' '.join(words) or child.name()}")
        except psutil.NoSuchProcess:
            continue
    return found


def _changed_variables(before: dict[str, str]) -> list[str]:
    now = dict(os.environ)
    names = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
    return [
        f"variable {name}={now.get(name)!r} (it was {before.get(name)!r})" for name in sorted(names - _SET_BY_OTHERS)
    ]


def _is_strangers(path: Path) -> bool:
    """Whether shared memory belongs to a process that is not of this run: another program may run beside the tests."""
    if path.parent != _SHARED_MEMORY:
        return False
    holders = [process for process in psutil.process_iter() if _holds(process, path)]
    if not holders:  # whose it was is not known any more: ours, if no others run tests here
        return any("pytest" in words and not _is_of_this_run(process) for process, words in _commands())
    return not any(_is_of_this_run(process) for process in holders)


def _holds(process: psutil.Process, path: Path) -> bool:
    """Whether a process has mapped or opened a file, or a file of torch is named after it."""
    try:
        if path.name.startswith(f"torch_{process.pid}_"):
            return True
        files = {region.path for region in process.memory_maps()} | {file.path for file in process.open_files()}
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return str(path) in files


def _commands() -> Iterator[tuple[psutil.Process, str]]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            yield process, " ".join(process.cmdline())


def _is_of_this_run(process: psutil.Process) -> bool:
    """Whether a process descends from this one, or has the temporary folder of this run, as its other workers have."""
    try:
        if psutil.Process() in [process, *process.parents()]:
            return True
        return process.environ().get("TMPDIR", "").startswith(_run_folder())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _run_folder() -> str:
    """Return the folder that holds the temporary folders of all workers of this run."""
    folder = Path(tempfile.gettempdir()).parent
    return str(folder.parent if folder.name.startswith("popen-") else folder)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of a real S3 server."""
    for name in ("moto", "s3fs"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install 'phalanx[test]'")
    with serve_s3() as address:
        yield address


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new bucket; address and credentials are in the environment."""
    from phalanx.host.remote import as_path

    settings = {"ENDPOINT_URL": s3_server, "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret"}
    for name, value in {**settings, "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    name = f"b{time.time_ns():x}"
    as_path(f"s3://{name}/x").file_system.mkdir(name)  # type: ignore[attr-defined]
    return f"s3://{name}"
