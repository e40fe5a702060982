"""`check` finds all mistakes in settings. Ranks get checked settings: they load neither this nor the rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from phalanx.config import rules
from phalanx.config.aliases import NAMES, rename
from phalanx.config.backend_rules import BACKEND_RULES
from phalanx.config.backends import DEFAULT_STRATEGY
from phalanx.config.fields import TORCH_SHARDING
from phalanx.config.names import like
from phalanx.config.option import plain, problem
from phalanx.config.pairs import PAIR_RULES
from phalanx.config.rank_counts import count_ranks, ranges
from phalanx.config.settings import FIELDS, Settings, add_engine
from phalanx.config.strategies import facts_of
from phalanx.errors import nearest

_RULES = (rules.sharding, *rules.COMMON_RULES, *BACKEND_RULES, *PAIR_RULES)
"""In this order, after those of the engines: a rule does not run where an earlier one found a field wrong that it
needs."""
_OF_TRAINERS = ("loss_fn", "scheduler", "training_step", "metrics", "callbacks", "augment", "hooks")


def check(
    settings_given: Mapping[str, Any], wrong_before: Iterable[str] = ()
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the values of all settings, and (name, message) for every mistake in what was given.

    `wrong_before`: names with a mistake that was found in one source.
    """
    add_engine(settings_given.get("backend"))
    values, mistakes = translate(settings_given)
    mistakes += [(name, unknown_field(name)) for name in values if name not in FIELDS]
    for name, (least, most) in ranges(values).items():  # translated, had they not contradicted min_workers
        other = f"min_workers = {values['min_workers']}"
        mistakes.append(("min_workers", f"{name} = {least}:{most} begins with {least}, but {other}: leave one out."))
        values[name] = most
    complete = {name: plain(values.get(name, field.default)) for name, field in FIELDS.items()}
    engines = rules.engine_rules(complete)
    for engine in engines:
        if hasattr(engine, "reconcile"):
            changes, contradictions = engine.reconcile(complete)
            complete |= changes
            mistakes += contradictions
    wrong = [(name, text) for name, field in FIELDS.items() if (text := problem(field, complete[name]))]
    settings = Settings(**complete)
    of_engines = (rule for engine in engines for rule in engine.RULES)
    for rule in (*of_engines, *_RULES):
        mistaken = {*wrong_before, *(name for name, _ in mistakes + wrong)}
        if not rule.needs & mistaken:
            wrong += [(name, text) for name, text in rule.check(settings) if name not in mistaken]
    return complete, mistakes + wrong


def translate(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the settings with aliases, pairs of workers (least, most), torch's names of sharding and lists translated.

    With them: (alias, message) for each alias with a wrong value.
    """
    values, mistakes = rename(settings)
    values, of_counts = count_ranks(values, ranges(values))
    return _translate_values(values), mistakes + of_counts


def _translate_values(values: dict[str, Any]) -> dict[str, Any]:
    for name, (least, most) in ranges(values).items():
        if values.get("min_workers") in (None, least):  # another value stays, and is refused
            values |= {"min_workers": least, name: most}
    if isinstance(words := values.get("profile"), (tuple, list)) and all(isinstance(word, str) for word in words):
        values["profile"] = " ".join(words)
    sharding = values.get("sharding")
    name = str(getattr(sharding, "name", sharding)).lstrip("_")  # torch's _HYBRID_SHARD_ZERO2
    strategy = values.get("strategy", "auto")
    if name == "NO_SHARD" and (strategy == "auto" or facts_of(str(strategy)).axes):
        return {**values, "strategy": DEFAULT_STRATEGY, "sharding": "auto"}
    return {**values, "sharding": TORCH_SHARDING[name]} if name in TORCH_SHARDING else values


def unknown_field(name: str) -> str:
    """Return the message about an unknown setting, with the name that was meant."""
    close = like(name.replace("-", "_"), NAMES)
    guess = f" Did you mean '{close}'?" if close else " `phalanx config show` lists all of them."
    if argument := nearest(name, _OF_TRAINERS, 0.8):
        guess = f" '{argument}' is an argument of the trainer itself: Trainer(model, {argument}=...)."
    return f"unknown setting '{name}'.{guess}"
