"""Which setting counts in which way to train, by what `option` declares of each; elsewhere it is refused.

A trainer and a recipe use every setting that their backend follows (`backend_rules`, and the rules of engines). A loop
of the user's, with `Formation`, uses those that ranks do: its ranks run already, and what a trainer's loop does is the
user's code. For a script, `phalanx train` itself uses those of the command; the others count if a trainer or a
`Formation` in the script reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from phalanx.config import user_settings
from phalanx.config.settings import ENV_PREFIX, FIELDS, Settings
from phalanx.errors import UsageError

LOOP = frozenset({"ranks"})
"""Who uses settings in a loop of the user's."""
SCRIPT = frozenset({"command"})
"""Who uses them for a script with neither a trainer nor a `Formation`."""
IN_SCRIPT = {"Formation": frozenset({"command", "ranks"}), "trainer": frozenset({"command", "ranks", "trainer"})}
"""Who uses them for a script, by what of Phalanx is in it."""
_NOT_REPLACED = (
    "leave it out: lost ranks are replaced one by one for a recipe and for Trainer.fit; with --max-restarts, all "
    "ranks of a script start again"
)


def used_by(name: str) -> frozenset[str]:
    """Return who uses a setting; see `option`."""
    return frozenset(FIELDS[name].metadata["used_by"])


def counts(name: str, users: Collection[str]) -> bool:
    """Whether a setting has an effect where only these use settings."""
    return not used_by(name).isdisjoint(users)


def in_loop(name: str) -> str:
    """Return what to write in a loop of the user's for a setting that does not count there."""
    if text := str(FIELDS[name].metadata["in_loop"]):
        return text
    if "command" in used_by(name):
        flag = name.replace("_", "-")
        return f"give it to the command that starts the ranks: phalanx train --script loop.py --{flag} ..."
    return _NOT_REPLACED


def refuse_in_loop(given: Iterable[str]) -> None:
    """Raise for settings that are given to a `Formation` and would have no effect there."""
    unused = [name for name in given if not counts(name, LOOP)]
    if not unused:
        return
    of_command = [name for name in unused if not counts(name, {"trainer"})]
    of_loop = [name for name in unused if name not in of_command]
    parts = [
        (of_loop, "the trainer's loop, and this loop is yours"),
        (of_command, "what starts the ranks, and a Formation joins ranks that run"),
    ]
    problems = [f"{_are_settings(names)} of {where}" for names, where in parts if names]
    raise UsageError("; ".join(problems), hint=_hints(unused))


def loop_note(config: Settings) -> str:
    """Return a warning about such settings in a config, which a trainer may share; empty if there are none.

    Settings of the command may have started these ranks, and a value may be read from the config.
    """
    unused = [name for name in config.changed(*FIELDS) if used_by(name) == {"trainer"}]
    values = "; ".join(f"{name} = {getattr(config, name)!r}: {in_loop(name)}" for name in unused)
    return f"not used by your own loop: {values}" if unused else ""


_BEFORE_RANKS = (
    *("max_restarts", "spares", "heartbeat_timeout", "stall_timeout", "memory_frequency", "min_workers"),
    *("nccl_env", "start_timeout", "stop_grace"),
)
"""Settings of the command that a trainer in a script cannot have either; the number of ranks it may name again."""


def late_note(config: Settings, environ: Mapping[str, str]) -> str:
    """Return a warning about a trainer's settings of the launch on ranks that run; empty if there are none.

    Those that the command has set are in its variables, also if it had them from a config.
    """
    names = [name for name in config.changed(*_BEFORE_RANKS) if ENV_PREFIX + name.upper() not in environ]
    unused = unused_by_script(names, IN_SCRIPT["Formation"], config.backend)
    of_command = [name for name in names if counts(name, SCRIPT)]
    values = [
        *(f"{name}: {in_loop(name)}" for name in of_command),
        *(f"{name}: {text}" for name, text in unused.items()),
    ]
    return f"not used by ranks that were started before the trainer: {'; '.join(values)}" if values else ""


def unused_by_script(names: Iterable[str], users: Collection[str], backend: str) -> dict[str, str]:
    """Return which of these settings have no effect for a script, each with what to write.

    `users`: who uses settings there. An engine may start ranks by further ones, `FOR_SCRIPTS` in its rules.
    """
    rules_of_engine = user_settings.engine_rules({"backend": backend})
    of_engine = {name for rules in rules_of_engine for name in getattr(rules, "FOR_SCRIPTS", ())}
    unused = [name for name in names if not counts(name, users) and name not in of_engine]
    return {name: _for_script(name, users) for name in unused}


def _for_script(name: str, users: Collection[str]) -> str:
    if "recovery" in used_by(name):
        return _NOT_REPLACED
    if "ranks" in users:
        return in_loop(name)
    return "leave it out, or let a Trainer or a Formation of Phalanx train in the script, which reads it"


def _are_settings(names: Collection[str]) -> str:
    return f"{', '.join(names)} {'is a setting' if len(names) == 1 else 'are settings'}"


def _hints(names: Iterable[str]) -> str:
    return "\n  ".join(f"{name}: {in_loop(name)}" for name in names)
