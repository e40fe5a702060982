"""Rules of Horovod: its nodes, Adasum, and settings that horovodrun replaces."""

from __future__ import annotations

from phalanx.config.option import options_of
from phalanx.config.pairs import Pair, on, other_than
from phalanx.config.rules import RANKS, Mistakes, rule
from phalanx.config.settings import Settings, parse_hosts
from phalanx.engines.horovod.declaration import HorovodSettings

STARTED_BY = "horovodrun"


def names_hosts(settings: Settings) -> bool:
    """Whether a list or a script says which nodes there are."""
    return settings.hosts is not None or options_of(HorovodSettings, settings).host_discovery_script is not None


@rule("backend", "strategy", "host_discovery_script")
def horovod_hosts(settings: Settings) -> Mistakes:
    """Check that the nodes are named once, and that an elastic run knows several."""
    if settings.hosts is not None and options_of(HorovodSettings, settings).host_discovery_script is not None:
        yield "hosts", "hosts and host_discovery_script both say which nodes there are: leave one of them out."
    if settings.min_workers is not None and not names_hosts(settings):
        yield settings.mistake(
            "min_workers",
            ": an elastic run needs several nodes: write host_discovery_script = './hosts.sh', or "
            "hosts = 'node1:8,node2:8'.",
        )


@rule("backend", "strategy", "node_rank", *RANKS)
def several_hosts(settings: Settings) -> Mistakes:
    """Check that an elastic run names two nodes."""
    if settings.hosts is None or settings.min_workers is None:
        return
    try:
        hosts = parse_hosts(settings.hosts)
    except ValueError:  # another rule reports it
        return
    if len(hosts) < 2:
        yield settings.mistake(
            "min_workers",
            " with one node: Horovod gives up a node that lost a rank, so there must be two. On one node, "
            "give it under two names: hosts = 'localhost:1,127.0.0.1:1'.",
        )


@rule("backend", "strategy", "adasum", *RANKS)
def adasum(settings: Settings) -> Mistakes:
    """Check what Adasum requires of the ranks."""
    options = options_of(HorovodSettings, settings)
    if not options.adasum:
        return
    ranks = settings.total_ranks
    if settings.min_workers is not None or options.host_discovery_script is not None:
        yield "adasum", "adasum = True: Adasum needs MPI, which cannot lose or add ranks: leave adasum out."
    elif ranks is not None and ranks.bit_count() != 1:
        yield (
            "adasum",
            f"adasum = True with {ranks} ranks: Adasum combines pairs, then pairs of pairs, and so on: give it 2, 4, "
            "8, 16, ... ranks, or leave adasum out.",
        )


PAIRS = (
    Pair(
        "ema_decay", {"min_workers": on}, " with min_workers: elastic Horovod does not keep the average. Leave one out"
    ),
    Pair(
        "compression", {"compression": other_than("none", "fp16")}, " with backend = 'horovod', which has 'fp16' only"
    ),
    Pair(
        "bucket_cap_mb",
        {"backend": "horovod"},
        " with backend = 'horovod', which has its own buffer",
        "set HOROVOD_FUSION_THRESHOLD (bytes) in the environment instead",
    ),
)
RULES = (horovod_hosts, several_hosts, adasum, *(pair.rule() for pair in PAIRS))
FOR_SCRIPTS = frozenset({"min_workers"})
"""Horovod goes on with fewer ranks by itself, those of scripts too."""


def unused(settings: Settings) -> Mistakes:
    """Yield (setting, what to write instead) for settings that horovodrun does not follow."""
    if settings.num_nodes > 1 and not names_hosts(settings):
        yield settings.mistake(
            "num_nodes",
            " with backend = 'horovod': horovodrun starts the ranks of all nodes from one of them. Name the "
            "nodes instead: hosts = 'node1:8,node2:8'.",
        )
