"""Every error class of the package, and exit codes. A message says what was given, what is allowed, and what to write.

The command line prints a `PhalanxError` without a traceback and ends with its `exit_code`; in Python it is an ordinary
exception. The classes are defined here because the parent rebuilds the error of a rank by its name in this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

EXIT_USAGE = 2
"""A wrong flag, key, value or path: nothing was started."""

EXIT_PREEMPTED = 75
"""Stopped by SIGTERM or SIGUSR1 after a checkpoint at a step boundary: run again to continue (EX_TEMPFAIL)."""

EXIT_INTERRUPTED = 130
"""Stopped by Ctrl-C (128 + SIGINT, as shells have it)."""


class PhalanxError(Exception):
    """An error that the user can correct. `hint` says how, as text to paste."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        notes = {"__notes__": self.__notes__} if hasattr(self, "__notes__") else None
        return (rebuild, (type(self), str(self.message), self.hint), notes)


def rebuild(kind: type[PhalanxError], message: str, hint: str) -> PhalanxError:
    """Unpickle an error without calling its constructor: errors cross process boundaries."""
    error = kind.__new__(kind)
    PhalanxError.__init__(error, message, hint=hint)
    return error


class UsageError(PhalanxError):
    """A command line, name or path that cannot be acted on."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    """One or more bad configuration values, all reported together."""

    def __init__(self, problems: Sequence[str], *, source: str = "") -> None:
        self.problems = tuple(problems)
        where = f" in {source}" if source else ""
        head = "1 mistake" if len(self.problems) == 1 else f"{len(self.problems)} mistakes"
        lines = [f"{head}{where}:", *(f"  - {problem}" for problem in self.problems)]
        super().__init__("\n".join(lines))


class DataError(PhalanxError):
    """A data set that cannot be trained on: empty, too small, unreadable."""


class OrderError(DataError):
    """A sampler whose order cannot be drawn again: the error would be the same after a restart."""

    exit_code = EXIT_USAGE


class CheckpointError(PhalanxError):
    """A checkpoint that cannot be written or read."""


class ModelError(PhalanxError):
    """A model that cannot be trained as given: no loss, parameters without gradient, mismatching shapes."""


class CommunicationError(PhalanxError):
    """Ranks that do not communicate: one died, one is late, or they disagree on what is sent."""


class SharedMemoryUnavailable(CommunicationError):
    """These ranks cannot share memory; the message says why."""


class ServerError(PhalanxError):
    """A parameter server refused something, or cannot be reached."""


class NonFiniteLossError(PhalanxError):
    """The loss became NaN or infinite."""


class OutOfMemoryError(PhalanxError, RuntimeError):
    """Memory ran out; the message says what it was spent on, and what to change."""


class CorruptionError(PhalanxError):
    """Replicas whose weights must be equal are not."""


class ReplicaError(PhalanxError):
    """Ranks that should be equal after a change of the group differ: the error would be the same again."""

    exit_code = EXIT_USAGE


class StragglerError(PhalanxError):
    """A rank is much slower than the others, and is to be replaced."""


class RankFailedError(PhalanxError):
    """A rank crashed; the message begins with the guilty rank's cause."""

    def __init__(self, message: str, *, hint: str = "", exit_code: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code
        self.partial_result: object = None
        """The trained state, if a rank that held all of it could still send it."""


class ForkServerDiedError(PhalanxError):
    """The process that forks the ranks has ended, and every rank with it."""


class SearchFailedError(PhalanxError):
    """No trial of a search succeeded."""


class PreemptedError(PhalanxError):
    """Training stopped at a step boundary because the scheduler asked; the checkpoint is complete."""

    exit_code = EXIT_PREEMPTED


def unused_parameters(names: Sequence[str], when: str = "in the first step") -> ModelError:
    """Return the error that names parameters without a gradient."""
    listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return ModelError(
        f"{len(names)} parameter{'s' * (len(names) > 1)} got no gradient {when}: {listed}",
        hint="Use them in forward, freeze them with requires_grad_(False), or set find_unused_parameters=True.",
    )


def frozen_later(strategy: str, names: Sequence[str]) -> UsageError:
    """Return the error for parameters that were frozen or unfrozen when a strategy could not follow any more."""
    listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return UsageError(
        f"{listed}: frozen or unfrozen during training, but strategy = {strategy!r} trains what wanted gradients when "
        "the optimizer was prepared",
        hint="Freeze before prepare(), or give the layer a parameter group whose lr you change; or use strategy='ddp'.",
    )


def first_line(error: BaseException | str) -> str:
    """Return the first line of an error's text, or of a text; of an error without one (`assert x`), its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__ if isinstance(error, BaseException) else ""


def error_line(kind: str, text: str) -> str:
    """Return the type of an error and the first line of its text, if it has one, as a traceback ends."""
    return ": ".join(filter(None, (kind, first_line(text))))


def nearest(name: str, allowed: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the allowed name closest to `name`, or None when nothing is close."""
    import difflib  # most commands never need it

    matches = difflib.get_close_matches(name, list(allowed), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def a_type(value: object) -> str:
    """Return the name of a value's type with its article: "an int", "a list"."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def unknown_name(kind: str, name: str, allowed: Iterable[str], *, of: str = "", close: str | None = None) -> str:
    """Return the message about an unknown name, `of` what it is one: the nearest first, then all that are allowed.

    `close`: the allowed name that was meant, if that is known.
    """
    names = sorted(allowed)
    close = close or nearest(name, names)
    guess = f" Did you mean '{close}'?" if close else ""
    owner = f" of {of}" if of else ""
    return f"unknown {kind} '{name}'{owner}.{guess} Allowed: {', '.join(names)}."
