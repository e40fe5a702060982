"""Start ranks, show their progress on the terminal, and raise what failed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from phalanx import errors
from phalanx.config import DistributedConfig
from phalanx.engine import engine_of
from phalanx.launch import LaunchResult, LaunchSpec, launch, prestart
from phalanx.launch.error_file import any_record, read_record
from phalanx.launch.output import PlainConsole, RankConsole
from phalanx.observe.console import Console
from phalanx.observe.events import Phase


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
    with open_console(config, spec.log_dir) if console is None else nullcontext(console) as shown:
        if text := engine_of(config).notice(config):
            shown.notice(text)
        if waiting:
            shown.handle(Phase(waiting, "begin").to_dict())
        result = launch(spec, shown)
    raise_failure(result, spec.log_dir)


@contextmanager
def open_console(config: DistributedConfig, log_dir: Path) -> Iterator[RankConsole]:
    """Open the console of one launch, as the config says; restore the terminal afterwards."""
    labelled = config.console_ranks == "all"
    console = Console(
        show_labels=labelled, progress=config.progress, verbosity=config.verbosity, log_dir=log_dir.absolute()
    )
    try:
        yield console
    finally:
        console.close()


def write_payload(job: object, path: Path) -> None:
    """Pickle what the ranks run; classes and functions of `__main__` are pickled by value."""
    import cloudpickle  # only a process that starts ranks needs it

    try:
        with path.open("wb") as file:
            cloudpickle.dump(job, file)
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise errors.UsageError(
            f"the job cannot be sent to the ranks: {error}",
            hint="Everything given to the trainer must be picklable: open files, locks, sockets, running DataLoader "
            "iterators and CUDA handles are not. Or run the script itself on the ranks: phalanx train --script ...",
        ) from error


def raise_failure(result: LaunchResult, log_dir: Path) -> None:
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
        raise errors.RankFailedError(str(failure), exit_code=result.exit_code)
    if result.exit_code == errors.EXIT_PREEMPTED:
        raise errors.PreemptedError(f"the program ended with exit code {result.exit_code}", hint=f"Logs: {log_dir}")
    text = f"the ranks ended with exit code {result.exit_code}"
    for number in (signal.SIGTERM, signal.SIGHUP):
        if result.exit_code == 128 + number:
            text = f"stopped by {number.name}; no checkpoint was saved"
    raise errors.RankFailedError(text, exit_code=result.exit_code)
