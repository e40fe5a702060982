"""Start ranks, show their progress on the terminal, and raise what failed.

A job from a script or a notebook goes to the ranks as a pickle. Classes and functions of `__main__` are pickled by
value, so scripts need no main guard, and a notebook works too.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from phalanx import errors
from phalanx.config import DistributedConfig
from phalanx.engine import engine_of
from phalanx.features import feature
from phalanx.host.files import replace_file, scratch_folder
from phalanx.launch import CallTarget, LaunchResult, LaunchSpec, launch, prestart
from phalanx.launch.error_file import any_record, read_record, record_path, recorded_ranks
from phalanx.launch.failure import FailureReport
from phalanx.launch.output import PlainConsole, RankConsole
from phalanx.observe.console import Console
from phalanx.observe.events import KINDS, Phase, from_dict
from phalanx.observe.sinks import Sink
from phalanx.run.record import log_folder
from phalanx.run.result import RESULT_NAME, JobResult, read_result
from phalanx.run.spec import RUN_JOB, launch_spec
from phalanx.world.mesh import JobLayout


def run_on_ranks(
    spec: LaunchSpec, config: DistributedConfig | None = None, *, console: RankConsole | None = None, waiting: str = ""
) -> None:
    """Run the target on the ranks and return when all have ended; raise what went wrong.

    Without a console, one is opened as the config says; without a config, the output of ranks is shown as it is.
    `waiting`: what the console shows until the ranks report.
    """
    if config is None and console is None:
        console = PlainConsole()
    config = config or DistributedConfig()
    if spec.starter is None:
        prestart(spec.env)  # torch is imported while the console opens
    with open_console(config, spec.log_dir) if console is None else nullcontext(console) as opened:
        if text := engine_of(config).notice(config):
            opened.notice(text)
        if waiting:
            opened.handle(Phase(waiting, "begin").to_dict())
        result = launch(spec, opened)
    if result.failure is not None:
        _record_for(result.failure, spec.log_dir)
    raise_failure(result, spec.log_dir, may_restart=spec.max_restarts > 0)


def _record_for(failure: FailureReport, log_dir: Path) -> None:
    """Write the record of a rank that could not do so itself: it was killed, or has not answered."""
    if failure.rank is None or record_path(log_dir, failure.rank).exists():
        return
    others = [read_record(log_dir, rank) for rank in recorded_ranks(log_dir)]
    when = min((float(record["time"]) for record in others if record), default=time.time())
    record = {
        "rank": failure.rank,
        "host": failure.host,
        "time": when - 1e-3,  # it is the cause of what the others report
        "step": failure.step,
        "type": "RankFailed",
        "message": failure.cause,
        "hint": failure.hint,
        "exit_code": failure.exit_code,
        "traceback": list(failure.details),
    }
    with suppress(OSError):  # a full or lost disk was reported already
        replace_file(record_path(log_dir, failure.rank), json.dumps(record))


@contextmanager
def open_console(config: DistributedConfig, log_dir: Path) -> Iterator[RankConsole]:
    """Open the console of one launch, as the config says; restore the terminal afterwards."""
    console = Console(
        show_labels=config.console_ranks == "all",
        progress=config.progress,
        verbosity=config.verbosity,
        log_dir=log_dir.absolute(),
    )
    address = config.metrics_address
    metrics = None if address is None else feature("metrics")(log_dir.absolute().parent.name, log_dir, address)
    try:
        if metrics is None:
            yield console
        else:
            console.notice(f"metrics: {metrics.url}")
            yield _MeteredConsole(console, metrics)
    finally:
        console.close()
        if metrics is not None:
            metrics.close()


class _MeteredConsole:
    """A console whose events also go to the metrics endpoint."""

    def __init__(self, console: Console, metrics: Sink) -> None:
        self._console, self._metrics = console, metrics
        self.streams = console.streams
        self.rank_output, self.notice = console.rank_output, console.notice

    def handle(self, event: dict[str, Any]) -> None:
        """Pass an event on; those between rank and launcher, such as "joined", are of no kind."""
        self._console.handle(event)
        if event.get("event") in KINDS:
            self._metrics.handle(from_dict(event))


def write_payload(job: object, path: Path) -> None:
    """Pickle what the ranks run; classes and functions of `__main__` are pickled by value."""
    import cloudpickle  # only a process that starts ranks needs it

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            """Pickle modules of other types by name, too: torch.backends is one, and code of `__main__` may name it."""
            if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
                return import_module, (obj.__name__,)
            return super().reducer_override(obj)

    try:
        with path.open("wb") as file:
            Pickler(file).dump(job)
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        rule = "open files, locks, sockets, running DataLoader iterators and CUDA handles are not"
        if "parametrized" in str(error):  # torch's text, with a link to what does not help here
            error = RuntimeError("torch does not pickle parametrized modules")
            rule = "modules with weight_norm, spectral_norm or another parametrization are not"
        raise errors.UsageError(
            f"the job cannot be sent to the ranks: {error}",
            hint=f"Everything given to the trainer must be picklable: {rule}. Or run the script itself on the ranks, "
            "which then build the model themselves: phalanx train --script train.py --num-workers 2",
        ) from error


_SURVIVE = "To survive the loss of a rank: --max-restarts 2 (in Python: max_restarts=2)"


def raise_failure(result: LaunchResult, log_dir: Path, *, may_restart: bool) -> None:
    """Raise the error of a launch that failed; a PhalanxError of a rank is raised again here."""
    if result.exit_code == 0:
        return
    if result.exit_code == errors.EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    failure = result.failure
    rank = None if failure is None else failure.rank
    record = any_record(log_dir) if failure is None else None if rank is None else read_record(log_dir, rank)
    kind = getattr(errors, record["type"], None) if record is not None else None
    if record is not None and isinstance(kind, type) and issubclass(kind, errors.PhalanxError):
        if failure is not None and issubclass(kind, errors.CommunicationError):  # the report has compared the ranks
            raise errors.rebuild(kind, str(failure), "")
        raise errors.rebuild(kind, record["message"], record["hint"])
    if failure is not None:
        hint = _SURVIVE if failure.was_killed and not may_restart else ""
        raise errors.RankFailedError(str(failure), hint=hint, exit_code=result.exit_code)
    if result.exit_code == errors.EXIT_PREEMPTED:
        raise errors.PreemptedError(f"the program ended with exit code {result.exit_code}", hint=f"Logs: {log_dir}")
    text = f"the ranks ended with exit code {result.exit_code}"
    for number in (signal.SIGTERM, signal.SIGHUP):
        if result.exit_code == 128 + number:
            text = f"stopped by {number.name}; no checkpoint was saved"
    raise errors.RankFailedError(text, exit_code=result.exit_code)


_INTERRUPT_GRACE = 60.0
"""Seconds for the step that goes on when Ctrl-C is pressed, a checkpoint, and the way back of the weights."""


class RemoteJob(Protocol):
    """What can be sent to ranks: settings, the run's folder, and what a rank does."""

    config: DistributedConfig
    run_dir: Path | None

    def run(self) -> Any:
        """Run it on a rank; the result is that of the first rank on this node."""


def send_job(job: RemoteJob, layout: JobLayout, data: Mapping[str, Any] | None = None) -> Any:
    """Start the ranks, let them run the job, and return the result of the first rank on this node.

    `data`: data sets that the launcher distributes to the ranks, by name.
    """
    with scratch_folder("job") as folder, log_folder(job.run_dir) as logs:
        write_payload(job, folder / "job.pkl")
        target = CallTarget(RUN_JOB, str(folder / "job.pkl"))
        spec = launch_spec(job.config, layout, target, logs, env=_tracking_environment(), data=data)
        spec = dataclasses.replace(spec, interrupt_grace=_INTERRUPT_GRACE)
        try:
            run_on_ranks(spec, job.config, waiting=layout.starting)
        except (KeyboardInterrupt, errors.PreemptedError) as stop:
            result = read_result(folder) if (folder / RESULT_NAME).exists() else None
            if not isinstance(result, JobResult) or result.history is None:
                raise stop.with_traceback(None)  # noqa: B904 - it happened in a rank, not in these frames
            result.stopped = result.stopped or errors.PreemptedError(str(stop) or "stopped by Ctrl-C at the end")
            return result
        except errors.PhalanxError as error:
            if isinstance(error, errors.RankFailedError) and (folder / RESULT_NAME).exists():
                error.partial_result = read_result(folder)
            raise error.with_traceback(None)  # noqa: B904
        may_have_none = spec.starter is None and spec.elastic is not None and spec.num_nodes > 1
        return read_result(folder, may_have_none=may_have_none)


def _tracking_environment() -> Mapping[str, str]:
    """Let the ranks join the MLflow run that is active here."""
    mlflow: Any = sys.modules.get("mlflow")
    active = mlflow.active_run() if mlflow is not None else None
    if active is None:
        return {}
    return {"MLFLOW_RUN_ID": active.info.run_id, "MLFLOW_TRACKING_URI": mlflow.get_tracking_uri()}
