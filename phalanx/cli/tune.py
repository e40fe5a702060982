"""`phalanx tune`: search for the best hyperparameters of a recipe, a script or a module."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from phalanx.cli.flags import read_target, resolve_flags, split_own
from phalanx.cli.json_output import json_at_end, print_json
from phalanx.cli.parsers import tune_parser
from phalanx.errors import SearchFailedError, UsageError
from phalanx.observe.format import table
from phalanx.recipes import Recipe
from phalanx.tools.tune.space import SearchSpace
from phalanx.tools.tune.trainable import RecipeTrainable, ScriptTrainable, Trainable

if TYPE_CHECKING:
    from phalanx.run.rate_finder import RateSweep
    from phalanx.tools.tune.results import Results

_ROWS, _BAR = 14, 30
"""The size of the picture on the terminal."""


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    words, script_arguments = split_own(arguments)
    namespace = tune_parser().parse_all(words)
    if namespace.lr:
        return _find_rate(namespace, words, script_arguments)
    if namespace.space is None:
        hint = "Write: phalanx tune digits --space space.toml, or for a learning rate alone: phalanx tune digits --lr"
        raise UsageError("tune needs --space", hint=hint)
    from phalanx.tools.tune.search import SearchRequest, read_part, search

    address = vars(namespace).pop("address", None)  # the cluster of the search, not of one run's ranks
    space = SearchSpace.read(namespace.space)
    subject = _subject(namespace, script_arguments)
    mutate = None if namespace.mutate is None else tuple(name.strip() for name in namespace.mutate.split(","))
    request = SearchRequest(
        metric=namespace.metric, mode=namespace.mode, trials=namespace.trials,
        scheduler=namespace.scheduler, search=namespace.search, engine=namespace.engine, address=address,
        parallel=namespace.parallel,
        trials_per_gpu=namespace.trials_per_gpu, grace=namespace.grace, eta=namespace.eta,
        interval=namespace.interval, mutate=mutate, study_dir=namespace.study_dir, resume=namespace.resume,
        part=None if namespace.part is None else read_part(namespace.part),
    )  # fmt: skip
    searches: list[Results] = []
    with json_at_end(lambda: _summary(*searches), enabled=namespace.json):
        searches.append(search(subject, space, request))
    return 0


def _find_rate(namespace: argparse.Namespace, words: Sequence[str], script_arguments: list[str]) -> int:
    """Sweep the learning rate of a recipe, and show what it suggests."""
    unused = [name for name in ("space", "trials", "parallel", "part", "study_dir") if getattr(namespace, name)]
    if unused:
        raise UsageError(f"--lr is one training, for which --{unused[0].replace('_', '-')} has no meaning")
    recipe = read_target(namespace, script_arguments, "tune", "Write: phalanx tune digits --lr")
    if not isinstance(recipe, Recipe):
        hint = "In the script, with its trainer: print(trainer.find_lr(train_data).suggestion)"
        raise UsageError("--lr takes a recipe: what a script trains is known to the script alone", hint=hint)
    from phalanx.run.trainer import PyTorchDDPTrainer
    from phalanx.zoo.recipe import recipe_task

    resolved = resolve_flags(namespace, recipe)
    task = recipe_task(recipe, resolved.config)
    parts = {"loss_fn": task.loss_fn, "optimizer": task.optimizer, "augment": task.augment}
    with redirect_stdout(sys.stderr):
        sweep = PyTorchDDPTrainer(task.model, resolved.config, **parts).find_lr(task.train)
    if namespace.plot is not None:
        _draw_rates(sweep, namespace.plot, recipe.name)
    if namespace.json:
        print_json({**dataclasses.asdict(sweep), "suggestion": sweep.suggestion})
        return 0
    print("\n".join(_rate_lines(sweep)))
    if namespace.plot is not None:
        print(f"picture: {namespace.plot}")
    if sweep.suggestion is None:
        raise SearchFailedError("the loss did not fall at any rate", hint="Look at the data and the model first.")
    command = ["phalanx", "train", *_without_sweep(words), "--learning-rate", f"{sweep.suggestion:.2g}"]
    print(f"suggested learning rate: {sweep.suggestion:.2g}\nnext:\n  {shlex.join(command)}")
    return 0


def _without_sweep(words: Sequence[str]) -> list[str]:
    """Return the words of a sweep that `phalanx train` takes, without a learning rate."""
    remaining, before = [], ""
    for word in words:
        flag = word.partition("=")[0]
        if flag not in ("--lr", "--force", "--plot", "--learning-rate") and before not in ("--plot", "--learning-rate"):
            remaining.append(word)
        before = word
    return remaining


def _rate_lines(sweep: RateSweep) -> list[str]:
    """Return the smoothed losses of some rates as a table with bars."""
    chosen = [*range(0, len(sweep.rates), max(1, len(sweep.rates) // _ROWS))]
    low, high = min(sweep.smoothed), max(sweep.smoothed[index] for index in chosen)
    rows = [("rate", "loss", "")]
    for index in chosen:
        share = (sweep.smoothed[index] - low) / ((high - low) or 1.0)
        rows.append((f"{sweep.rates[index]:.1e}", f"{sweep.smoothed[index]:.4g}", "#" * round(_BAR * share)))
    return [table(rows), f"{len(sweep.rates)} steps; the sweep ended: {sweep.ended}"]


def _draw_rates(sweep: RateSweep, path: str, name: str) -> None:
    from phalanx.tools.svg import COLORS, Axis, Plot, write_picture  # few commands draw

    charts = []
    for title, values in (("smoothed loss", sweep.smoothed), ("its slope per tenfold rate", sweep.slopes)):
        rates = Axis("learning rate", sweep.rates[0], sweep.rates[-1], log=True)
        plot = Plot(rates, Axis.of(title, values), (560, 320))
        plot.line(list(zip(sweep.rates, values, strict=True)), COLORS[0], title)
        if (best := sweep.suggestion) is not None:
            plot.mark((best, values[sweep.rates.index(best)]), COLORS[1], f"suggested: {best:.2g}")
        charts.append(plot.svg())
    write_picture(path, f"{name}: loss over learning rate", charts, (560, 320), ("loss", "suggested"))


def _summary(results: Results | None = None) -> dict[str, Any]:
    """Return the search as plain data; nothing of one that failed."""
    if results is None:
        return {}
    best = {"number": results.best.number, "value": results.best_value, "params": results.best_params}
    objective = {"metric": results.objective.metric, "mode": results.objective.mode}
    trials = [trial.to_dict() for trial in results.trials]
    return {"study_dir": str(results.folder), **objective, "best": best, "trials": trials}


def _subject(namespace: argparse.Namespace, script_arguments: list[str]) -> Trainable:
    hint = "Write: phalanx tune digits --space space.toml, or phalanx tune --script train.py ..."
    named = read_target(namespace, script_arguments, "tune", hint)
    if isinstance(named, Recipe):
        return RecipeTrainable(resolve_flags(namespace, named), named)
    return ScriptTrainable(resolve_flags(namespace, None), named)
