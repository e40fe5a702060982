"""Models, GPUs, links and instance types by name: `data/*.toml`, the user's files of the same form, and measurements.

An entry of `~/.config/phalanx/gpus.toml` (links, instances, models) changes or adds to the entry of the same name here.
"""

from __future__ import annotations

import json
import os
import re
import socket
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from phalanx.errors import UsageError, a_type, nearest, unknown_name
from phalanx.host.files import replace_file
from phalanx.recipes.imports import extend_path, is_import_path
from phalanx.tools.plan.cluster import Cluster, Gpu, Instance, Link
from phalanx.tools.plan.hf_config import read_config
from phalanx.tools.plan.model import ModelShape, TracedShape

_DATA = Path(__file__).parent / "data"
MEASURED_LINK = "nvlink4"
"""The link whose curve over sizes stands for links without a curve."""
_WORDS = {"models": "model", "gpus": "GPU", "links": "link", "instances": "instance type"}
_Made = TypeVar("_Made", Gpu, Link, Instance, ModelShape, TracedShape)


class TrainNames(NamedTuple):
    """What `phalanx train` calls a model (a recipe or a reference model; None: neither), and its sequence length."""

    recipe: str | None
    preset: str | None
    seq_len: int | None


def config_folder() -> Path:
    """Return the folder of the user's own files."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "phalanx"


def measured_file() -> Path:
    """Return where `--calibrate` and `--calibrate-from` keep what they measured."""
    return config_folder() / "measured.json"


def measured(part: str) -> dict[str, Any]:
    """Return a part of what was measured: gpus, links or factors."""
    return dict(_read_measured(measured_file()).get(part, {}))


def _read_measured(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {error}", hint="Remove it, and measure again.") from None
    if isinstance(content, dict):
        return content
    raise UsageError(f"{path} holds {a_type(content)}, not measurements", hint="Remove it, and measure again.")


def keep_measured(parts: Mapping[str, Mapping[str, Any]], path: Path | None = None) -> Path:
    """Add entries to what was measured before; an entry of the same name is replaced."""
    path = path or measured_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    content = _read_measured(path)
    for part, entries in parts.items():
        content[part] = {**content.get(part, {}), **entries}
    replace_file(path, json.dumps(content, indent=1) + "\n")
    return path


def model(name: str | Path, example: str | tuple[int, ...] | None = None) -> ModelShape | TracedShape:
    """Return a model by preset, Hugging Face config.json (or its folder), or import path of a module class.

    `example`: the shape of one sample, for a class: `3x224x224`, `tokens:1024`.
    """
    text = str(name)
    if ".py:" in text:
        raise _no_model(text)
    if is_import_path(text):
        from phalanx.tools.plan.trace import trace_import  # imports torch

        extend_path([str(Path.cwd())])
        return trace_import(text, example)
    if text.endswith(".json") or Path(text).is_dir() or "/" in text:
        if not Path(text).exists():
            raise _no_model(text)
        return read_config(Path(text))
    preset, where, entry = _find("models", text)
    fields_of_shape = {key: value for key, value in entry.items() if key not in TrainNames._fields}
    if "parameters" in fields_of_shape:
        return _make(TracedShape, preset, where, fields_of_shape)
    shape = _make(ModelShape, preset, where, fields_of_shape)
    # `train` has a reference model for decoders of any size, and for a mixture that is a preset.
    ours = shape.causal and shape.outputs is None and (not shape.experts or "recipe" in entry)
    return replace(shape, reference=fields_of_shape.get("reference", ours))


def _no_model(text: str) -> UsageError:
    """Return the error for a path without a file, a name of the Hub, or a file with a class in it."""
    folder, _, rest = text.rpartition("/")
    file, colon, name = rest.partition(".py:")
    if colon:
        return UsageError(
            f"model '{text}': a class is named by its module, not by its file",
            hint=f"Write, in the folder {folder or '.'}: phalanx plan {file}:{name} ...",
        )
    close = nearest(rest.lower(), names("models")) or "llama-7b"
    return UsageError(
        f"model '{text}': there is no such file or folder, and models of the Hugging Face Hub are not fetched",
        hint=f"Give a folder with its config.json, or a preset such as {close}.",
    )


def resolve(model_given: object, cluster_given: object) -> tuple[ModelShape | TracedShape, Cluster]:
    """Return the model and the cluster that names stand for; shapes and clusters are returned as they are."""
    shape = model(model_given) if isinstance(model_given, (str, Path)) else model_given
    machines = cluster(cluster_given) if isinstance(cluster_given, str) else cluster_given
    if not isinstance(shape, (ModelShape, TracedShape)):
        raise UsageError(
            f"a model of type {type(shape).__name__}: expected a name, a path, a ModelShape or a TracedShape",
            hint="For a module: phalanx.tools.plan.trace.trace_module(module, '3x224x224') returns its shape.",
        )
    if not isinstance(machines, Cluster):
        raise UsageError(
            f"a cluster of type {type(machines).__name__}: expected a text or a Cluster",
            hint="Write '8xh100' or Cluster(gpu='h100', gpus=8).",
        )
    return shape, machines


def of_recipe(recipe: str, preset: str | None) -> str | None:
    """Return the name of the model that a recipe trains under a preset; None where it is not one of ours."""
    for name, (_, entry) in _entries("models").items():
        if (entry.get("recipe"), entry.get("preset")) == (recipe, preset):
            return name
    return None


def train_names(name: str) -> TrainNames:
    """Return the recipe, preset and sequence length of a model preset; all None for a model that is not a preset."""
    entries = _entries("models")
    entry = entries.get(_plain("models", name), ("", {}))[1]
    return TrainNames(*(entry.get(field) for field in TrainNames._fields))


def gpu(name: str) -> Gpu:
    """Return a GPU by name; `measured` is what `--calibrate` found on this machine."""
    return _make(Gpu, *_find("gpus", _measured_name("gpus", name)))


def gpu_of_device(device: str, memory_gib: float) -> Gpu | None:
    """Return the GPU that the driver calls so (`NVIDIA A100-SXM4-80GB`); None for one without an entry."""
    words = device.lower().replace("-", " ").split()
    for name in (name for name in names("gpus") if "measured" not in name and name.split("-")[0] in words):
        entry = gpu(name)
        if abs(entry.memory_gib / memory_gib - 1) < 0.08 and ("pcie" in words) == ("pcie" in name):
            return entry
    return None


def link(name: str) -> Link:
    """Return a link by name."""
    preset, where, entry = _find("links", _measured_name("links", name))
    entry_link = _make(Link, preset, where, {**entry, "curve": ()})
    curve = tuple((float(size), float(share)) for size, share in entry.get("curve", ()))
    if not curve:  # a slower link reaches the same share of its bandwidth with messages that are smaller by as much
        shape = link(MEASURED_LINK)
        curve = tuple((size * entry_link.gbps / shape.gbps, share) for size, share in shape.curve)
    return replace(entry_link, curve=curve)


def instance(name: str, prices: str | Path | None = None) -> Instance:
    """Return an instance type by name; `prices`: a file that changes or adds entries."""
    return _make(Instance, *_find("instances", name, prices))


def cluster(text: str) -> Cluster:
    """Return the cluster that a text names: `64xh100` (GPUs), `p5.48xlarge` or `8xp5.48xlarge` (nodes)."""
    counted = re.fullmatch(r"(\d+)\s*x\s*(.+)", text.strip(), re.IGNORECASE)
    count, name = (int(counted[1]), counted[2]) if counted else (1, text.strip())
    if count < 1:
        raise UsageError(f"a cluster of {text}: expected 1 GPU or more.")
    if _plain("gpus", name) in _entries("gpus") or name == "measured":
        return Cluster(gpu=name, gpus=count, name=text)
    if _plain("instances", name) in _entries("instances"):
        return replace(of_instances(name, count), name=text)
    allowed = {*names("gpus"), *names("instances")}
    raise UsageError(unknown_name("GPU or instance type", name, allowed), hint="Write 64xh100, or 8xp5.48xlarge.")


def of_instances(name: str, nodes: int, prices: str | Path | None = None) -> Cluster:
    """Return a cluster of nodes of one instance type."""
    machine = instance(name, prices)
    return Cluster(
        gpu=machine.gpu,
        gpus=nodes * machine.gpus,
        gpus_per_node=machine.gpus,
        inter_node=machine.inter_node,
        inter_node_gbps=machine.network_gbps,
        topology=machine.topology,
        host_memory_gib=machine.host_memory_gib,
        price_per_gpu_hour=None if machine.price is None else machine.price / machine.gpus,
        instance=machine.name,
        name=machine.name,
    )


def usual_instance(name: str, prices: str | Path | None = None) -> Instance | None:
    """Return the first instance type with a GPU, whose price stands for that GPU where no other is given."""
    plain = _plain("gpus", name)
    with_it = (key for key, (_, entry) in _entries("instances", prices).items() if entry.get("gpu") == plain)
    machine = next(with_it, None)
    return None if machine is None else instance(machine, prices)


def parts_of(cluster_given: Cluster) -> tuple[Gpu, Link, Link]:
    """Return the GPU, the link within a node, and the link between nodes with its share per GPU."""
    device = gpu(cluster_given.gpu) if isinstance(cluster_given.gpu, str) else cluster_given.gpu
    inside = cluster_given.intra_node or device.intra_node
    between = cluster_given.inter_node or device.inter_node
    inside = link(inside) if isinstance(inside, str) else inside
    between = link(between) if isinstance(between, str) else between
    sharing = min(cluster_given.gpus_per_node, cluster_given.gpus)
    if cluster_given.inter_node_gbps is not None:
        between = replace(between, gbps=between.reach * cluster_given.inter_node_gbps / 8 / sharing)
    elif between.per_machine:
        between = replace(between, gbps=between.gbps / sharing)
    if cluster_given.oversubscription > 1:
        between = replace(between, gbps=between.gbps / cluster_given.oversubscription)
    learned = measured("factors").get(device.name)
    return _learned(device, inside, between, learned) if learned else (device, inside, between)


def _learned(device: Gpu, inside: Link, between: Link, factors: Mapping[str, Any]) -> tuple[Gpu, Link, Link]:
    """Return GPU and links with what `--calibrate-from` kept: kernels and links slower, and more memory, by so much."""
    kernels, links = factors["kernels"], factors["links"]
    device = replace(
        device,
        matmul=device.matmul / kernels,
        bandwidth=device.bandwidth / kernels,
        attention=device.attention / kernels,
        launch_us=device.launch_us * kernels,
        reserve_gib=max(0.0, device.reserve_gib + factors["memory_gib"]),
    )
    inside, between = (replace(link, gbps=link.gbps / links, disturbs=links) for link in (inside, between))
    return device, inside, between


def names(kind: str) -> list[str]:
    """Return all names of a kind: models, gpus, links or instances."""
    return sorted({*_entries(kind), *_aliases(kind)})


def _measured_name(kind: str, name: str) -> str:
    if name != "measured":
        return name
    measured_names = measured(kind)
    if measured_names:
        here = [key for key in measured_names if key.endswith(f"measured:{socket.gethostname()}")]
        return here[-1] if here else list(measured_names)[-1]
    raise UsageError(f"no {_WORDS[kind]} has been measured here", hint="Run: phalanx bench machine")


def _plain(kind: str, name: str) -> str:
    if "measured:" in name:  # a host's name may have capitals
        return name
    lower = name.strip().lower().replace("_", "-")
    if kind == "gpus":
        lower = lower.removesuffix("gb").replace("rtx-", "rtx")  # A100-80GB, RTX-4090
    return _aliases(kind).get(lower, lower)


def _aliases(kind: str) -> dict[str, str]:
    """Return other names of entries, and the names that they stand for."""
    return {other: name for name, (_, entry) in _entries(kind).items() for other in entry.get("aliases", ())}


def _find(kind: str, name: str, more: str | Path | None = None) -> tuple[str, str, dict[str, Any]]:
    """Return the name, the file and the values of an entry."""
    entries, plain = _entries(kind, more), _plain(kind, name)
    if plain not in entries:
        raise UsageError(unknown_name(_WORDS[kind], name, {*entries, *_aliases(kind)}), hint=_hint(kind))
    return plain, *entries[plain]


def _hint(kind: str) -> str:
    if kind == "models":
        return "Or give a Hugging Face config.json, or a class: my_package.nets:Net with --input 3x224x224."
    return f"Own entries go into {config_folder() / kind}.toml."


def _entries(kind: str, more: str | Path | None = None) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the entries of a kind by name, each with the file that changed it last."""
    merged: dict[str, tuple[str, dict[str, Any]]] = {}
    users_file = config_folder() / f"{kind}.toml"
    files = [
        _DATA / f"{kind}.toml",
        *([users_file] if users_file.is_file() else []),
        *([Path(more)] if more is not None else []),
    ]
    for path in files:
        for name, entry in _read(path, path.stat().st_mtime_ns if path.exists() else 0).items():
            merged[name.lower()] = (str(path), {**merged.get(name.lower(), ("", {}))[1], **entry})
    if kind in ("gpus", "links"):
        merged |= {name: (str(measured_file()), dict(entry)) for name, entry in measured(kind).items()}
    return merged


@cache
def _read(path: Path, changed: int) -> dict[str, dict[str, Any]]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not a TOML file: {error}") from None
    if wrong := [name for name, entry in document.items() if not isinstance(entry, dict)]:
        raise UsageError(f"{path}: {wrong[0]} = {document[wrong[0]]!r} stands outside a table such as [h100].")
    return document


def _make(kind: type[_Made], name: str, where: str, entry: dict[str, Any]) -> _Made:
    """Return the data class of an entry; an unknown, missing or wrong value is named with its file."""
    entry = {key: value for key, value in entry.items() if key != "aliases"}
    fields_of_kind = {field.name: field for field in fields(kind)}
    if unknown := [key for key in entry if key not in fields_of_kind]:
        raise UsageError(f"{where}: [{name}]: " + unknown_name("key", unknown[0], fields_of_kind))
    needed = [
        key for key, field in fields_of_kind.items() if field.default is MISSING and field.default_factory is MISSING
    ]
    if missing := [key for key in needed if key != "name" and key not in entry]:
        raise UsageError(f"{where}: [{name}] lacks {', '.join(missing)}")
    hints = get_type_hints(kind)
    for key, value in entry.items():
        _check_number(f"{where}: [{name}] {key}", value, hints[key])
    return kind(**{"name": name, **entry})


def _check_number(where: str, value: Any, hint: Any) -> None:
    """Raise where a number is expected and something else, or a negative number, was given."""
    if not ({int, float} & {hint, *_members(hint)}):
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{where} = {value!r}: expected a number.")
    if value < 0 and not where.endswith("extra"):
        raise UsageError(f"{where} = {value!r}: expected a number of 0 or more.")


def _members(hint: Any) -> Iterable[Any]:
    return getattr(hint, "__args__", ()) if "dict" not in str(hint) and "tuple" not in str(hint) else ()
