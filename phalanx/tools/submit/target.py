"""What a target is: it renders a job as files, and talks to its scheduler. The table of targets by name."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from phalanx.config.option import option, parse_text, problem
from phalanx.config.sources import read_document
from phalanx.errors import ConfigError, UsageError, unknown_name
from phalanx.tools.submit.job import ClusterJob, JobRecord

_PODS = "--num-nodes 2 --gpus-per-node 8 --image registry/phalanx:1 --pvc CLAIM:/workspace"
TARGETS = {
    "slurm": (
        "phalanx.tools.submit.slurm:Slurm",
        "a Slurm cluster, by sbatch",
        "text --num-nodes 2 --gpus-per-node 8 --partition gpu --time-limit 12h",
    ),
    "kubernetes": (
        "phalanx.tools.submit.kubernetes:Kubernetes",
        "Kubernetes: an Indexed Job and a headless Service",
        f"text {_PODS}",
    ),
    "jobset": ("phalanx.tools.submit.kubernetes:JobSet", "Kubernetes with the JobSet controller", f"text {_PODS}"),
    "kubeflow": (
        "phalanx.tools.submit.kubeflow:Kubeflow",
        "Kubeflow: a TrainJob (v2), PyTorchJob or MPIJob (v1)",
        f"text {_PODS}",
    ),
    "ray": (
        "phalanx.tools.submit.ray:RayJobs",
        "a Ray cluster, by its job API or as a RayJob of KubeRay",
        "text --num-workers 16 --address http://HEAD:8265",
    ),
    "compose": (
        "phalanx.tools.submit.compose:Compose",
        "docker-compose on this machine, with monitoring",
        "digits --num-nodes 2 --num-workers 4 --image phalanx:cpu",
    ),
    "ssh": (
        "phalanx.tools.submit.ssh:Ssh",
        "hosts that ssh reaches, without a scheduler",
        "digits --hosts node1:8,node2:8",
    ),
}
"""Name to `module:Class`, summary and the words of an example."""
CANCEL = {
    "slurm": "scancel {id}",
    "kubernetes": "kubectl delete job {name}",
    "jobset": "kubectl delete jobset {name}",
    "kubeflow": "kubectl delete trainjob,pytorchjob,mpijob {name}",
    "ray": "ray job stop {id}",
    "compose": "docker compose --project-name {name} down",
    "ssh": "kill {id}",
}
"""Name to the command that ends a job without `phalanx jobs cancel`."""


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options that every target has; a target adds its own. Each is a flag, a TOML key and a variable."""

    name: str | None = option(None, "name of the job (default: that of the recipe or script, with a random end)")
    time_limit: str | None = option(None, "longest duration: 30m, 12h, 2d; the run saves and ends before it")
    image: str | None = option(None, "container image with phalanx in it")
    venv: str | None = option(None, "virtual environment on the nodes that has phalanx (default: this one)")
    uv: bool = option(False, "create the environment on each node with uv, from the uv.lock of this folder")
    uv_sync: str | None = option(None, "more options for `uv sync --frozen`, as they are: '--extra cu128 --no-dev'")
    ship: str | None = option(
        None,
        "code: this folder, which the nodes see too (folder), or a copy of it (archive); default: folder, and on "
        "Kubernetes archive for a recipe, script or module of this folder",
        choices=(None, "folder", "archive"),
    )
    gpu: str | None = option(None, "GPUs of the nodes (h100, a100-40): a run that does not fit on them is refused")
    directory: str | None = option(
        None, "folder on the nodes in which the ranks run (default: this folder; in containers /workspace)"
    )
    env: str | None = option(None, "variables of the ranks: NAME=value,NAME=value")


Options = TypeVar("Options", bound=CommonOptions)


@dataclass(frozen=True)
class Status:
    """What a scheduler says of a job."""

    state: str
    """One of job.STATES."""
    detail: str = ""
    """The scheduler's own words: PENDING (Resources)."""
    nodes: tuple[str, ...] = ()


class Target(ABC, Generic[Options]):
    """One kind of cluster. Methods raise UsageError with the scheduler's own answer, first line first."""

    name: ClassVar[str]
    options_class: ClassVar[type[CommonOptions]] = CommonOptions
    is_contained: ClassVar[bool] = False
    """Ranks run in containers: --directory is a folder there, and not one of this machine."""

    lacks_uv: str = ""
    """Why --uv is refused; empty where environments can be made on the nodes."""

    sees_folder: bool = True
    """Nodes may see this folder. Where they cannot, the files that a command names are shipped."""

    lacks_ship: str = ""
    """Why --ship archive is refused; empty where code can be sent along."""

    has_arrays: ClassVar[bool] = False
    """One submission can be many jobs, over which --tune splits a search."""

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def render(self, job: ClusterJob) -> dict[str, str]:
        """Return the files that would be submitted, by name, the main one first; the same for the same job."""

    def check(self, job: ClusterJob, files: Mapping[str, str]) -> list[str]:
        """Return what was checked of rendered files, in words; UsageError for what is wrong."""
        return []

    @abstractmethod
    def submit(self, job: ClusterJob, folder: Path) -> str:
        """Submit the files that were written to a folder; return the scheduler's id. Leave nothing half-submitted."""

    @abstractmethod
    def status(self, record: JobRecord) -> Status:
        """Ask the scheduler about a job."""

    @abstractmethod
    def logs(self, record: JobRecord, *, follow: bool, rank: int | None) -> Iterator[str]:
        """Return the job's output line by line; `follow`: until it ends; `rank`: of one rank only."""

    @abstractmethod
    def cancel(self, record: JobRecord) -> None:
        """End a job."""


def target_class(name: str) -> type[Target[Any]]:
    """Return the class of a target."""
    if name not in TARGETS:
        raise UsageError(unknown_name("target", name, TARGETS), hint="Write: phalanx submit slurm digits")
    module, _, attribute = TARGETS[name][0].partition(":")
    kind: type[Target[Any]] = getattr(import_module(module), attribute)
    return kind


def user_file() -> Path:
    """Return the file with a user's defaults: [slurm] partition = "gpu"."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "phalanx" / "submit.toml"


def read_options(
    name: str, flags: Mapping[str, str | bool], config_files: list[str] | None, environ: Mapping[str, str]
) -> CommonOptions:
    """Merge the options of a target: the user's file, [submit.NAME] of --config, PHALANX_SUBMIT_*, flags."""
    kind = target_class(name).options_class
    fields = {field.name: field for field in dataclasses.fields(kind)}
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if user_file().is_file():
        layers.append((str(user_file()), _table(read_document(user_file()), name, user_file())))
    layers += [(path, _table(read_document(path).get("submit", {}), name, path)) for path in config_files or []]
    prefix = f"PHALANX_SUBMIT_{name.upper()}_"
    of_environment = {
        key.removeprefix(prefix).lower(): value for key, value in environ.items() if key.startswith(prefix)
    }
    layers.append(("environment", of_environment))
    layers.append(("flag", flags))
    values, mistakes = {}, []
    for origin, layer in layers:
        for key, value in layer.items():
            key = key.replace("-", "_")
            if key not in fields:
                mistakes.append(f"{unknown_name('option', key, fields, of=name)} ({origin})")
                continue
            read = parse_text(fields[key], value) if isinstance(value, str) else value
            wrong = problem(fields[key], read)
            values[key] = read
            mistakes += [f"{wrong} ({origin})"] if wrong else []
    if mistakes:
        raise ConfigError(mistakes)
    return kind(**values)


def _table(document: Mapping[str, Any], name: str, path: str | Path) -> Mapping[str, Any]:
    """Return the options of a target in a file: those of all targets, and those of its table."""
    if not isinstance(document, Mapping) or not isinstance(document.get(name, {}), Mapping):
        raise UsageError(f"{path}: the options of {name} are not a table", hint=f'Write: [{name}] partition = "gpu"')
    if wrong := [key for key in document if isinstance(document[key], dict) and key not in TARGETS]:
        raise UsageError(f"{path}: {unknown_name('target', wrong[0], TARGETS)}")
    shared = {key: value for key, value in document.items() if not isinstance(value, dict)}
    return {**shared, **document.get(name, {})}
