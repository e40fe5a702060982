"""Write the tables of the documentation that come from the code: `python tools/docs_tables.py`.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->` of its page. The pages are committed with
their tables, so that a browser of git shows them; `tests/docs/test_docs_tables.py` compares them with the code.
"""

from __future__ import annotations

import dataclasses
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

from phalanx.config import GROUPS
from phalanx.config.aliases import Aliases
from phalanx.config.option import kinds
from phalanx.config.settings import title_of
from phalanx.observe.events import KINDS, Event
from phalanx.recipes import load_recipe, recipe_names

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "settings": "docs/configuration.md",
    "ways": "docs/configuration.md",
    "events": "docs/monitoring.md",
    "recipes": "docs/quickstart.md",
    "extras": "docs/install.md",
    "lines": "docs/design/index.md",
}
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_WORDS = {"None": "unset", "bool": "true/false", "int": "whole number", "float": "number", "str": "text"}


def written(text: str) -> str:
    """Return a page with its tables as the code gives them now."""
    return _TABLE.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", text)


def settings_table() -> str:
    """Return every setting, group by group: name, what it takes, default, and its one help text."""
    parts = []
    titles = {Aliases: "Also accepted"}
    for group in (*GROUPS, *titles):
        title = titles.get(group, title_of(group))
        parts.append(f"## {title}\n\n{group.__doc__}\n\n| setting | takes | default | |\n|---|---|---|---|")
        parts += [_setting_row(field) for field in group.__dataclass_fields__.values()]
        parts.append("")
    return "\n".join(parts)


def _setting_row(field: dataclasses.Field[Any]) -> str:
    default = "" if field.default is None else f"`{_shown(field.default)}`"
    return f"| `{field.name}` | {_takes(field)} | {default} | {_cell(field.metadata['help'])} |"


def _takes(field: dataclasses.Field[Any]) -> str:
    if field.metadata["choices"] is not None:
        return ", ".join(f"`{_shown(choice)}`" for choice in field.metadata["choices"] if choice is not None)
    words = " or ".join(_WORDS[kind] for kind in kinds(field) if kind in _WORDS and kind != "None")
    minimum, above = field.metadata["minimum"], field.metadata["above"]
    if minimum is not None:
        return f"{words}, {minimum} or more"
    return words if above is None else f"{words} above {above}"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def events_table() -> str:
    """Return every event of `events.jsonl` with its own fields."""
    common = {field.name for field in dataclasses.fields(Event)}
    rows = ["| `event` | when | fields |", "|---|---|---|"]
    for kind, event in KINDS.items():
        own = ", ".join(f"`{field.name}`" for field in dataclasses.fields(event) if field.name not in common)
        rows.append(f"| `{kind}` | {_cell((event.__doc__ or '').splitlines()[0])} | {own} |")
    return "\n".join(rows)


def recipes_table() -> str:
    """Return the built-in recipes."""
    rows = ["| recipe | |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {_cell(load_recipe(name).summary)} |" for name in recipe_names())])


_EXTRAS = {
    "deepspeed": "the [DeepSpeed](strategies.md#deepspeed) engine",
    "horovod": "the [Horovod](horovod.md) engine; compiles, so use the command below instead",
    "tensorboard": "curves for [TensorBoard](monitoring.md#tensorboard); `make` installs it",
    "mlflow": "logging to [MLflow](monitoring.md#mlflow)",
    "kubernetes": "[submitting to Kubernetes](clusters/kubernetes.md), Kubeflow and docker-compose",
    "monitor": "the [dashboard](runs.md#dashboard) and other tools that watch runs",
    "s3": "[checkpoints at s3:// URLs](checkpoints.md#checkpoints-at-urls)",
    "wandb": "logging to [Weights & Biases](monitoring.md#weights-biases)",
    "ray": "the [Ray](ray.md) engine, and searches on a Ray cluster",
    "ray-serve": "the example that serves a checkpoint with Ray Serve",
    "serve": "`phalanx serve`: a language model over HTTP",
    "tensorflow": "[Keras models](tensorflow.md), on GPUs",
    "tensorflow-cpu": "[Keras models](tensorflow.md) without CUDA; then `pip install --no-deps tf-keras`",
    "tune": "[hyperparameter search](tuning.md) on this machine",
    "pandas": "`history.to_dataframe()` and tables of trials",
    "data": "[data files](recipes.md#files): csv, jsonl, parquet, tar shards, images",
    "onnx": "[export](runs.md#evaluate-predict-on-new-data-export) to ONNX",
    "bench": "the libraries of the [benchmarks](benchmarks.md) and of [Coming from another library](coming-from.md)",
    "docs": "building this site",
    "engines": "`ray`, `serve`, `mlflow`, `wandb` and `tune` together",
    "test": "running the tests",
    "lint": "ruff, mypy, codespell, pre-commit",
    "dev": "`test`, `docs` and `lint` together",
}


def extras_table() -> str:
    """Return every extra of the package, what it is for and what it installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = ["| extra | for | installs |", "|---|---|---|"]
    for name, packages in project["optional-dependencies"].items():
        names = ", ".join(dict.fromkeys(re.split(r"[<>=;]", package)[0].strip() for package in packages))
        rows.append(f"| `{name}` | {_EXTRAS[name]} | {names} |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def lines_table() -> str:
    """Return the lines of the package per room, in hundreds: the page need not follow every commit."""
    return str(runpy.run_path(str(ROOT / "tools" / "lines.py"))["table"](digits=-2))


def ways_table() -> str:
    """Return the settings that do not count in every way to train."""
    return str(runpy.run_path(str(ROOT / "tools" / "settings_ways.py"))["table"]())


TABLES = {
    "settings": settings_table,
    "ways": ways_table,
    "events": events_table,
    "recipes": recipes_table,
    "extras": extras_table,
    "lines": lines_table,
}
"""What writes each table."""

if __name__ == "__main__":
    for page in {ROOT / path for path in PAGES.values()}:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
