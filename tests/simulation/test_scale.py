"""What events cost the node that leads, at two sizes; `python -m tests.simulation.scale` runs thousands of nodes."""

from __future__ import annotations

import math

import pytest

from phalanx.launch import membership
from phalanx.recovery.launcher import node, view
from tests.simulation import scale
from tests.simulation.picture import growth

SMALL, LARGE = 64, 256
LOSSES = ("a lost rank", "a lost node", "the leader")
EVENTS = ("start", *LOSSES, "the end")


@pytest.fixture
def lists_of_this_test(monkeypatch):
    """Let the nodes share lists, and other tests not."""
    for module, name in ((membership, "changed"), (view, "changed"), (membership, "in_order"), (node, "came_or_went")):
        monkeypatch.setattr(module, name, getattr(module, name))
    scale.share_lists()


@pytest.mark.usefixtures("lists_of_this_test")
def test_events_cost_no_more_than_n_log_n_and_quiet_seconds_nothing():
    rows = [row for nodes in (SMALL, LARGE) for row in scale.run(nodes, EVENTS)]
    most = math.log(LARGE * math.log(LARGE) / (SMALL * math.log(SMALL))) / math.log(LARGE / SMALL)
    for key in ("messages", "megabytes"):
        grown = growth(rows, key)
        assert grown.keys() == set(EVENTS)
        assert max(grown.values()) <= most, (key, grown)
    assert [row["decided"] < 2.0 for row in rows if row["what"] in LOSSES] == [True] * 2 * len(LOSSES)
    quiet = [row for row in rows if row["what"] == "20 quiet seconds"]
    assert [(row["messages"], row["heartbeats per second"] <= 2_000) for row in quiet] == [(0, True)] * 2
