"""`DistributedTuner`: a search from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from phalanx.config import resolve
from phalanx.errors import UsageError
from phalanx.host.gpus import count_gpus
from phalanx.launch import ScriptTarget
from phalanx.recipes import load_recipe
from phalanx.tools.tune.results import Results
from phalanx.tools.tune.search import SearchRequest, search
from phalanx.tools.tune.space import SearchSpace
from phalanx.tools.tune.trainable import FunctionTrainable, RecipeTrainable, ScriptTrainable, Trainable
from phalanx.tools.tune.trial import DEFAULT_METRIC


class DistributedTuner:
    """Searches for the best hyperparameters of a function, a script or a recipe.

    `train_fn(config)` gets a point of the space as a dict, and returns metrics as a dict (or the metric as a number).
    Without `metric`, the objective is the only metric that it returns, else `loss`.
    Settings such as `num_workers=2` or `strategy="fsdp"` apply to each trial.
    """

    def __init__(
        self,
        train_fn: Callable[[dict[str, Any]], Any] | None = None,
        search_space: Mapping[str, Any] | SearchSpace | str | None = None,
        *,
        script: str | None = None,
        recipe: str | None = None,
        metric: str | None = None,
        mode: str | None = None,
        num_gpus: int | None = None,
        trials_per_gpu: int = 1,
        parallel: int | None = None,
        scheduler: str = "none",
        search: str = "random",
        engine: str = "auto",
        address: str | None = None,
        grace: int = 1,
        eta: int = 3,
        interval: int = 1,
        mutate: Sequence[str] | None = None,
        study_dir: str | None = None,
        resume: bool = False,
        **settings: Any,
    ) -> None:
        self.space = _as_space(search_space)
        self._subject = _subject(train_fn, script, recipe, metric, settings)
        self._request = SearchRequest(
            metric=metric, mode=mode, num_gpus=num_gpus, trials_per_gpu=trials_per_gpu, parallel=parallel,
            scheduler=scheduler, search=search, engine=engine, address=address, grace=grace, eta=eta, interval=interval,
            mutate=None if mutate is None else tuple(mutate), study_dir=study_dir, resume=resume,
        )  # fmt: skip
        self._request.check(self.space)
        self.results: Results | None = None

    def tune(self, num_samples: int | None = None) -> dict[str, Any]:
        """Run the trials and return the best one's hyperparameters; `results` has all of them."""
        self.results = search(self._subject, self.space, replace(self._request, trials=num_samples))
        return self.results.best_params


def _as_space(space: Mapping[str, Any] | SearchSpace | str | None) -> SearchSpace:
    if isinstance(space, SearchSpace):
        return space
    if isinstance(space, Mapping):
        return SearchSpace(space)
    if isinstance(space, str):
        return SearchSpace.read(space)
    raise UsageError(
        f"search_space = {space!r}: expected a dict, or the path of a TOML file",
        hint="Write search_space={'lr': phalanx.tune.loguniform(1e-4, 1e-1)}.",
    )


def _subject(
    train_fn: Callable[..., Any] | None,
    script: str | None,
    recipe: str | None,
    metric: str | None,
    settings: dict[str, Any],
) -> Trainable:
    if sum(one is not None for one in (train_fn, script, recipe)) != 1:
        raise UsageError("nothing or several things to tune", hint="Give one of train_fn, script and recipe.")
    if recipe is not None:
        loaded = load_recipe(recipe)
        return RecipeTrainable(resolve(settings, **loaded.settings_for(count_gpus())), loaded)
    resolved = resolve(settings)
    if script is not None:
        return ScriptTrainable(resolved, ScriptTarget(script))
    assert train_fn is not None, "one of three was given"
    return FunctionTrainable(resolved, train_fn, metric or DEFAULT_METRIC)
