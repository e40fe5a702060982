"""Print the lines and files of the package per tier and room, and what users can type: `python tools/lines.py`."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "phalanx"
TRAINING_VERBS = ("train", "resume", "runs", "evaluate", "predict", "export", "ckpt", "config", "init", "top", "stacks")
"""Verbs that train and look after a run, with what all verbs share; the others belong to tools."""
FEATURE_ROOMS = ("diagnosis", "recovery", "speed", "trackers")
_SHARED = ("__init__", "__main__", "flags", "parsers", "json_output", "ckpt_actions", "ckpt_target", "completion")


def tier(path: Path) -> str:
    """Return "heart", "features", "zoo", "tools" or "engines"."""
    room, *rest = path.relative_to(PACKAGE).with_suffix("").parts
    if room in ("zoo", "tools", "engines"):
        return room
    if room in FEATURE_ROOMS:
        return "features"
    return "tools" if room == "cli" and rest[0] not in (*TRAINING_VERBS, *_SHARED) else "heart"


def room_of(path: Path) -> str:
    """Return the room that a module belongs to: a package, or one below zoo/, tools/ and engines/."""
    parts = path.relative_to(PACKAGE).parts
    if parts[0] in ("zoo", "tools", "engines") and len(parts) > 2:
        return f"{parts[0]}/{parts[1]}"
    return parts[0] if len(parts) > 1 else "(top level)"


def count() -> dict[tuple[str, str], tuple[int, int]]:
    """Return (lines, files) per (tier, room)."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        key = tier(path), room_of(path)
        lines, files = found.get(key, (0, 0))
        found[key] = lines + len(path.read_text().splitlines()), files + 1
    return found


def totals() -> dict[str, tuple[int, int]]:
    """Return (lines, files) per tier, and of the package."""
    sums: dict[str, tuple[int, int]] = {}
    for (name, _), (lines, files) in count().items():
        for key in (name, "package"):
            before = sums.get(key, (0, 0))
            sums[key] = before[0] + lines, before[1] + files
    return sums


def table(digits: int = 0) -> str:
    """Return the counts as a Markdown table, the heaviest rooms of each tier first; `digits`: how lines are rounded."""
    rows = ["| tier | room | lines | files |", "|---|---|---|---|"]
    for (name, room), (lines, files) in sorted(count().items(), key=lambda each: (each[0][0], -each[1][0])):
        rows.append(f"| {name} | {room} | {round(lines, digits):,} | {files} |")
    for name, (lines, files) in sorted(totals().items()):
        rows.append(f"| **{name}** | all | {round(lines, digits):,} | {files} |")
    return "\n".join(rows)


def typed() -> dict[str, int]:
    """Return how many words users can type, by kind; a flag of several verbs counts once."""
    sys.path.insert(0, str(PACKAGE.parent))
    from phalanx.cli import VERBS
    from phalanx.cli.completion import actions_of, parser_of
    from phalanx.config import BACKENDS, FIELDS
    from phalanx.config.aliases import ALIASES
    from phalanx.config.settings import ENGINE_GROUPS
    from phalanx.config.strategies import TABLE

    of_engines = sum(len(group.__dataclass_fields__) for group in ENGINE_GROUPS)
    actions = {verb: actions_of(verb) for verb in VERBS}
    parsers = [parser_of(verb) for verb in VERBS if not actions[verb]]
    parsers += [make() for verb in VERBS for make in actions[verb].values()]
    flags = {word for parser in filter(None, parsers) for action in parser._actions for word in action.option_strings}
    settings = {"--" + name.replace("_", "-") for name in (*FIELDS, *ALIASES)}
    of_verbs = {word for word in flags if word.startswith("--") and word.replace("--no-", "--", 1) not in settings}
    return {
        "settings of every run": len(FIELDS) - of_engines,
        "settings of one engine": of_engines,
        "other spellings": len(ALIASES),
        "backends": len(BACKENDS),
        "strategies": len(TABLE),
        "verbs": len(VERBS),
        "actions of verbs": sum(map(len, actions.values())),
        "flags that are no settings": len(of_verbs),
    }


if __name__ == "__main__":
    print(table())
    print("\nwords that users can type: " + ", ".join(f"{number} {kind}" for kind, number in typed().items()))
