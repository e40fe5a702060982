"""What MkDocs calls while it builds the site.

Tables are read from the package, so that they cannot go stale: a page holds a marker, such as `<!-- table: settings -->`.
Every picture becomes a link to itself at full size. The repository link is the origin of the clone, or the project's. The texts and
pictures of `course/` are pages below `learn/`.
"""

from __future__ import annotations

import dataclasses
import re
import runpy
import subprocess
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from phalanx.config import GROUPS
from phalanx.config.option import kinds
from phalanx.config.renamed import Aliases
from phalanx.config.run_fields import AdvancedOptions
from phalanx.observe.events import KINDS, Event
from phalanx.recipes import load_recipe, recipe_names

_REPOSITORY = "https://github.com/phalanx-train/phalanx"
"""The repository of the project, for a copy without an origin."""
_PICTURE = re.compile(r'<img\b[^>]*\bsrc="([^"]+)"[^>]*>')
_REMOTE = re.compile(r"(?:(?:https?|ssh|git)://(?:[^@/]+@)?|git@)([\w.-]+)(?::\d+/|[:/])(.+?)(?:\.git)?/?$")
_MARKER = re.compile(r"<!-- table: (\w+) -->(\n\*.*)?")
"""With the line after it, which says in a clone where the table is."""
_COURSE, _LEARN = Path(__file__).resolve().parents[1] / "course", "learn/"
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
_DOCS = re.compile(r"(?<=\.\./)docs/")
_WORDS = {"None": "unset", "bool": "true/false", "int": "whole number", "float": "number", "str": "text"}


def on_files(files: Files, config: Any) -> Files:
    """Add the texts and pictures of the course."""
    for path in sorted(_COURSE.rglob("*")):
        if path.suffix in (".md", ".svg"):
            place = f"{_LEARN}{path.relative_to(_COURSE).as_posix()}"
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace every marker of a page by its table; let the links of the course lead to the pages of this site."""
    if page.file.src_uri.startswith(_LEARN):
        return _LINK.sub(_of_site, markdown)
    for above in ("../", ""):  # of a page in a folder of docs/, and of one in docs/ itself
        markdown = markdown.replace(f"]({above}../course/", f"]({above}{_LEARN}")
    return _MARKER.sub(lambda match: _TABLES[match[1]](), markdown)


def _of_site(link: re.Match[str]) -> str:
    """Return a link of the course for this site, which has its texts and pictures, but no code."""
    text, target = link.groups()
    if target.startswith(("http", "#")):
        return link[0]
    if not target.partition("#")[0].endswith((".md", ".svg")):
        return text
    return f"[{text}]({_DOCS.sub('', target)})"


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Make every picture a link to itself, so that a click enlarges it; let long lines of the course's code wrap."""
    if page.file.src_uri.startswith(_LEARN):
        html = html.replace("<pre>", '<pre class="wraps">')
    return _PICTURE.sub(r'<a class="picture" href="\1" title="Enlarge">\g<0></a>', html)


def on_config(config: Any) -> Any:
    """Link the repository that the site is built from, where mkdocs.yml names none; else the project's."""
    if not config.repo_url:
        git = ["git", "-C", str(Path(__file__).parent), "remote", "get-url", "origin"]
        remote = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        config.repo_url = web_address(remote) or _REPOSITORY
        config.repo_name = "Source"
    return config


def web_address(remote: str) -> str | None:
    """Return the page of a remote repository, without user and password; None for a folder."""
    match = _REMOTE.match(remote)
    return f"https://{match[1]}/{match[2]}" if match else None


def settings_table() -> str:
    """Return every setting, group by group: name, what it takes, default, and its one help text."""
    parts = []
    titles = {AdvancedOptions: "Advanced", Aliases: "Also accepted"}
    for group in (*GROUPS, *titles):
        title = titles.get(group, group.__name__)
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
    words = " or ".join(_WORDS[kind] for kind in kinds(field) if kind != "None")
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
    "mlflow": "logging to [MLflow](monitoring.md#mlflow)",
    "kubernetes": "[submitting to Kubernetes](clusters/kubernetes.md), Kubeflow and docker-compose",
    "monitor": "the [dashboard](runs.md#dashboard) and other tools that watch runs",
    "s3": "[checkpoints at s3:// URLs](checkpoint-tools.md#checkpoints-at-urls)",
    "wandb": "logging to [Weights & Biases](monitoring.md#weights-biases)",
    "ray": "the [Ray](ray.md) engine, and searches on a Ray cluster",
    "ray-serve": "the example that serves a checkpoint with Ray Serve",
    "serve": "`phalanx serve`: a language model over HTTP",
    "tensorflow": "[Keras models](tensorflow.md), on GPUs",
    "tensorflow-cpu": "[Keras models](tensorflow.md) without CUDA; then `pip install --no-deps tf-keras`",
    "tune": "[hyperparameter search](tuning.md) on this machine",
    "pandas": "`history.to_dataframe()` and tables of trials",
    "data": "[data files](recipes.md#files): csv, jsonl, parquet, tar shards, images",
    "onnx": "[export](runs.md#use-what-was-trained) to ONNX",
    "bench": "the libraries of the [benchmarks](benchmarks.md) and of [Coming from another library](coming-from.md)",
    "docs": "building this site",
    "engines": "`ray`, `serve`, `mlflow`, `wandb` and `tune` together",
    "test": "running the tests",
    "lint": "ruff, mypy, codespell, pre-commit",
    "dev": "`test`, `docs` and `lint` together",
}


def extras_table() -> str:
    """Return every extra of the package, what it is for and what it installs."""
    project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["project"]
    rows = ["| extra | for | installs |", "|---|---|---|"]
    for name, packages in project["optional-dependencies"].items():
        names = ", ".join(dict.fromkeys(re.split(r"[<>=;]", package)[0].strip() for package in packages))
        rows.append(f"| `{name}` | {_EXTRAS[name]} | {names} |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def lines_table() -> str:
    """Return the lines of the package per capability."""
    return str(runpy.run_path(str(Path(__file__).resolve().parents[1] / "tools" / "lines.py"))["table"]())


_TABLES = {
    "settings": settings_table,
    "events": events_table,
    "recipes": recipes_table,
    "extras": extras_table,
    "lines": lines_table,
}
