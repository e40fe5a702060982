"""`phalanx tune`: search for the best hyperparameters of a recipe, a script or a module."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from phalanx.cli.flags import read_target, resolve_flags, split_own
from phalanx.cli.json_output import json_at_end
from phalanx.cli.parsers import tune_parser
from phalanx.errors import UsageError
from phalanx.recipes import Recipe
from phalanx.tools.tune.trainable import Trainable

if TYPE_CHECKING:
    from phalanx.tools.tune.results import Results


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    words, own = split_own(arguments)
    namespace = tune_parser().parse_all(words)
    if namespace.space is None:
        raise UsageError("tune needs --space", hint="Write: phalanx tune digits --space space.toml")
    from phalanx.tools.tune.search import SearchRequest, read_part, search
    from phalanx.tools.tune.space import SearchSpace

    address = vars(namespace).pop("address", None)  # the cluster of the search, not of one run's ranks
    space = SearchSpace.read(namespace.space)
    subject = _subject(namespace, own)
    mutate = None if namespace.mutate is None else tuple(name.strip() for name in namespace.mutate.split(","))
    asked = SearchRequest(
        metric=namespace.metric, mode=namespace.mode, trials=namespace.trials,
        scheduler=namespace.scheduler, search=namespace.search, engine=namespace.engine, address=address,
        parallel=namespace.parallel,
        trials_per_gpu=namespace.trials_per_gpu, grace=namespace.grace, eta=namespace.eta,
        interval=namespace.interval, mutate=mutate, study_dir=namespace.study_dir, resume=namespace.resume,
        part=None if namespace.part is None else read_part(namespace.part),
    )  # fmt: skip
    found: list[Results] = []
    with json_at_end(lambda: _summary(*found), wanted=namespace.json):
        found.append(search(subject, space, asked))
    return 0


def _summary(results: Results | None = None) -> dict[str, Any]:
    """Return the search as plain data; nothing of one that failed."""
    if results is None:
        return {}
    best = {"number": results.best.number, "value": results.best_value, "params": results.best_params}
    objective = {"metric": results.objective.metric, "mode": results.objective.mode}
    trials = [trial.to_dict() for trial in results.trials]
    return {"study_dir": str(results.folder), **objective, "best": best, "trials": trials}


def _subject(namespace: argparse.Namespace, own: list[str]) -> Trainable:
    from phalanx.tools.tune.trainable import RecipeTrainable, ScriptTrainable

    hint = "Write: phalanx tune digits --space space.toml, or phalanx tune --script train.py ..."
    named = read_target(namespace, own, "tune", hint)
    if isinstance(named, Recipe):
        return RecipeTrainable(resolve_flags(namespace, named), named)
    return ScriptTrainable(resolve_flags(namespace, None), named)
