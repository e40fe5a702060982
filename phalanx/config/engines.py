"""Engines that are not torch's own: which settings follow which, and what must be installed for them."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.config.groups import TENSORFLOW_STRATEGIES
from phalanx.config.hosts import parse_hosts
from phalanx.config.keras import keras_mistakes, keras_unused

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from phalanx.config.distributed import DistributedConfig


class Package(NamedTuple):
    """What an engine imports, and the words that bring it."""

    module: str
    title: str
    install: str


PACKAGES = {
    "horovod": Package(
        "horovod",
        "Horovod",
        "Build it: make horovod, or python -m phalanx.launch.horovod_build. (The extra phalanx[horovod] alone does not "
        "compile: docs/horovod.md)",
    ),
    "ray": Package("ray", "Ray", "Run: pip install 'phalanx[ray]'"),
    "tensorflow": Package("tensorflow", "TensorFlow", "Run: pip install 'phalanx[tensorflow]'"),
}
"""By backend."""

_FOLLOWED_BY = {
    "address": ("ray",),
    "cpus_per_worker": ("ray",),
    "resources_per_worker": ("ray",),
    "placement": ("ray",),
    "min_workers": ("ray", "horovod"),
    "hosts": ("horovod",),
    "host_discovery_script": ("horovod",),
    "adasum": ("horovod",),
    "horovod_timeline": ("horovod",),
}
"""Which backends follow a setting."""

_STRATEGIES_OF = {"horovod": ("horovod",), "tensorflow": TENSORFLOW_STRATEGIES}
_BACKEND_OF = {"horovod": "horovod", "mirrored": "tensorflow", "multiworker": "tensorflow"}


def settings_of_start(launcher: str) -> tuple[str, ...]:
    """Return the settings that only whoever starts the ranks follows: a rank need not hear of them."""
    return tuple(name for name, followers in _FOLLOWED_BY.items() if launcher in followers)


def missing_package(config: DistributedConfig) -> Package | None:
    """Return the package that the backend needs and this environment lacks."""
    package = PACKAGES.get(config.backend)
    return package if package is not None and importlib.util.find_spec(package.module) is None else None


def engine_mistakes(
    config: DistributedConfig, defaults: Mapping[str, Any], known: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the settings of engines, apart from what is known already."""
    if {"backend", "strategy"} & set(known):
        return
    for name, followers in _FOLLOWED_BY.items():
        if name not in known and getattr(config, name) != defaults[name] and config.backend not in followers:
            names = " or ".join(repr(follower) for follower in followers)
            yield (
                name,
                f"{name} = {getattr(config, name)!r} with backend = {config.backend!r}, which does not follow it: "
                f"write backend = {names}, or leave {name} out.",
            )
    yield from _strategy_mistakes(config)
    if config.backend == "horovod":
        yield from _horovod_mistakes(config, known)
    if config.backend == "tensorflow":
        yield from keras_mistakes(config, defaults, {*known, *_FOLLOWED_BY})
    most = config.total_ranks
    if {"min_workers", "num_workers"} & set(known) or config.min_workers is None:
        return
    if most is None:
        yield "min_workers", f"min_workers = {config.min_workers} without num_workers: say how many ranks at most, too."
    elif config.min_workers > most:
        yield "min_workers", f"min_workers = {config.min_workers} is more than num_workers = {most}."


def unused_settings(config: DistributedConfig, defaults: Mapping[str, Any]) -> dict[str, str]:
    """Return why the backend passes over settings that it trains without, by setting.

    A config that several backends share may hold them: the run says so at its start. Given as an argument or a flag to
    this one backend they are refused.
    """
    if config.backend == "tensorflow":
        return dict(keras_unused(config, defaults))
    return dict(_horovod_unused(config, defaults)) if config.backend == "horovod" else {}


def unused_note(config: DistributedConfig, defaults: Mapping[str, Any]) -> str:
    """Return the line that a run begins with when its backend passes over settings; empty where it does not."""
    unused = unused_settings(config, defaults)
    given = ", ".join(f"{name} = {getattr(config, name)!r}" for name in unused)
    keras = {text.rpartition("Keras: ")[2] for text in unused.values() if "Keras: " in text}
    instead = f" Write in model_fn, by your model's Keras: {'; '.join(sorted(keras))}" if keras else ""
    return f"not used by backend = {config.backend!r}: {given}.{instead}" if unused else ""


def _horovod_unused(config: DistributedConfig, defaults: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if config.num_nodes > 1 and config.hosts is None and config.host_discovery_script is None:
        yield (
            "num_nodes",
            f"num_nodes = {config.num_nodes} with backend = 'horovod': horovodrun starts the ranks of all machines "
            "from one of them. Name the machines instead: hosts = 'node1:8,node2:8'.",
        )
    if config.bucket_cap_mb != defaults["bucket_cap_mb"]:
        yield (
            "bucket_cap_mb",
            f"bucket_cap_mb = {config.bucket_cap_mb} with backend = 'horovod', which has a buffer of its own: set "
            "HOROVOD_FUSION_THRESHOLD (bytes) in the environment instead.",
        )


def _horovod_mistakes(config: DistributedConfig, known: Collection[str]) -> Iterator[tuple[str, str]]:
    if config.hosts is not None and config.host_discovery_script is not None:
        yield "hosts", "hosts and host_discovery_script both say which machines there are: leave one of them out."
    if config.min_workers is not None and config.hosts is None and config.host_discovery_script is None:
        yield (
            "min_workers",
            f"min_workers = {config.min_workers}: a run that goes on without some machines must know of several: write "
            "host_discovery_script = './hosts.sh', or hosts = 'node1:8,node2:8'.",
        )
    if config.adasum and "adasum" not in known:
        yield from _adasum_mistakes(config, known)
    if config.hosts is None or "hosts" in known:
        return
    try:
        hosts = parse_hosts(config.hosts)
    except ValueError as error:
        yield "hosts", f"hosts = {config.hosts!r}: {error}"
        return
    slots, ranks = sum(host.slots for host in hosts), config.total_ranks
    if ranks is not None and ranks > slots and "num_workers" not in known:
        yield "hosts", f"hosts = {config.hosts!r} has {slots} slots, but {ranks} ranks were asked for."
    if config.min_workers is not None and len(hosts) < 2:
        yield (
            "min_workers",
            f"min_workers = {config.min_workers} with one machine: Horovod gives up a machine that lost a rank, so "
            "there must be two. On one machine, give it under two names: hosts = 'localhost:1,127.0.0.1:1'.",
        )


def _adasum_mistakes(config: DistributedConfig, known: Collection[str]) -> Iterator[tuple[str, str]]:
    if config.min_workers is not None or config.host_discovery_script is not None:
        yield "adasum", "adasum = True: Adasum is done by MPI, which cannot lose or add ranks: leave adasum out."
        return
    is_wrong = {"num_workers", "num_gpus", "gpus_per_node", "num_nodes", "hosts"} & set(known)
    ranks = None if is_wrong else config.total_ranks
    if ranks is not None and ranks.bit_count() != 1:
        yield (
            "adasum",
            f"adasum = True with {ranks} ranks: Adasum combines pairs, then pairs of pairs, and so on: give it 2, 4, "
            "8, 16, ... ranks, or leave adasum out.",
        )


def _strategy_mistakes(config: DistributedConfig) -> Iterator[tuple[str, str]]:
    if config.strategy == "auto":
        return
    allowed = _STRATEGIES_OF.get(config.backend)
    if allowed is not None and config.strategy not in allowed:
        names = ", ".join(repr(name) for name in allowed)
        yield (
            "strategy",
            f"strategy = {config.strategy!r} does not go with backend = {config.backend!r}, which has {names}: leave "
            "strategy out, or write backend = 'pytorch-ddp'.",
        )
    needed = _BACKEND_OF.get(config.strategy)
    if needed is not None and config.backend != needed:
        yield (
            "strategy",
            f"strategy = {config.strategy!r} with backend = {config.backend!r}: write backend = {needed!r}.",
        )
