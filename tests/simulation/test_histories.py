"""Histories of launchers under faults: many seeds, those that failed once, and defects that it has to find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from tests.simulation import mutants
from tests.simulation.cluster import Cluster, Violation
from tests.simulation.history import failure_of, run_seeds, shrink
from tests.simulation.plan import Fault, Plan, draw
from tests.simulation.progress import Progress

FAILED = {
    "a rank is lost that was ready, and the run does not go on": 2360,
    "a leader that is cut off loses one node after the other": 57,
    "a leader that stood still takes back ranks of a node it has lost": 66,
    "a node that stood still leads when the others have finished": 419,
    "a cut-off node leads when the run that went on without it has ended": 1664,
    "a rank gets ready when the others have finished": 86,
    "a node comes late while all start again": 139,
    "two nodes have one name after a leader was lost": 1987,
    "a node reports to a new leader and ends": 530,
    "a node that the lost leader had left out reports to the next": 2977,
    "mail of a node that ended while another took over": 4546,
    "the others go on, and the cut-off ones start again": 792,
    "a cut-off leader takes in a node, and has half of all with it": 1138,
    "some know of a new node, and not that it counts": 3137,
    "a first node that is started again begins before it hears of the run": 4994,
    "ranks are cut off while they leave for a request": 1946,
    "a restart with fewer ranks than the least": 4233,
    "what only some have heard of a leader that was lost": 1486,
    "a node comes late and gets a change before the whole view": 80,
    "the first node is cut off from the leader and begins again": 960,
    "a new rank takes the place of the one that holds the last step": 146433,
    "a node that stood still leads with reports from before the end": 109782,
    "a node that learns late that the others have ended leads alone": 106125,
    "a first node begins again while the others gather": 107371,
    "late nodes do not say what they know, and a leader alone waits for them": 17046,
    "the leader ends before a node that stood still hears that it was left out": 25592,
    "a node that waits for its place hears of a failure, and that the run goes on elsewhere": 47169,
}
"""Seeds whose histories have violated an invariant once."""


def test_seeds():
    """Two hundred histories of up to 16 nodes."""
    progress = Progress(range(200), 16)
    run_seeds(progress)
    assert progress.done == 200
    assert not progress.failed, f"python -m tests.simulation --seed {next(iter(progress.failed))} --shrink"


def test_a_run_of_seeds_that_is_cut_goes_on_where_it_was(tmp_path, monkeypatch):
    """Not if the code has changed since: its results would be of another program."""
    path = tmp_path / "progress.json"
    cut = Progress(range(10, 16), 4, path)
    cut.rest = cut.rest[:2]
    run_seeds(cut, 4)
    cut.note(12, Violation("deadlock", "none"), 0.5)
    cut.save()
    rest = Progress(range(10, 16), 4, path)
    assert (rest.rest, rest.failed) == (range(13, 16), {12: "deadlock: none"})
    assert rest.cpu_seconds >= 0.5
    assert Progress(range(10, 16), 16, path).rest == range(10, 16), "other histories"
    monkeypatch.setattr("tests.simulation.progress.code", lambda: "changed")
    assert Progress(range(10, 16), 4, path).done == 0


@pytest.mark.parametrize("seed", FAILED.values(), ids=FAILED.keys())
def test_a_history_that_failed_once(seed):
    result = failure_of(draw(seed))
    assert result.violation is None, "\n".join(result.history[-40:])


def test_a_seed_is_one_history():
    assert failure_of(draw(54)).history == failure_of(draw(54)).history


DEFECTS: tuple[tuple[Callable[[pytest.MonkeyPatch], None], int, str], ...] = (
    (mutants.takeover_keeps_lost_nodes, 4, "views differ"),
    (mutants.takeover_forgets_late_nodes, 26, "views differ"),
    (mutants.cut_off_node_leads_after_the_end, 54, "steps taken twice"),
    (mutants.first_node_begins_a_second_run, 92, "split brain"),
    (mutants.usage_error_of_another_node_is_tried_again, 159, "usage error tried again"),
    (mutants.leader_shrinks_node_by_node, 57, "steps taken twice"),
    (mutants.half_of_the_nodes_is_enough, 25, "steps taken twice"),
    (mutants.newcomers_count_at_once, 1138, "steps taken twice"),
    (mutants.paused_node_is_not_told_that_it_was_lost, 182, "split brain"),
    (mutants.late_rank_joins_a_finished_group, 80, "deadlock"),
    (mutants.first_ranks_go_on_whatever_they_hold, 146433, "state dropped"),
    (mutants.node_that_stood_still_leads, 109782, "split brain"),
)
"""Defects that were mended, a seed that finds each, and the invariant that it violates."""


@pytest.mark.parametrize(("patch", "seed", "name"), DEFECTS, ids=[patch.__name__ for patch, _, _ in DEFECTS])
def test_the_simulator_finds_a_defect(monkeypatch, patch, seed, name):
    patch(monkeypatch)
    violation = failure_of(draw(seed)).violation
    assert violation is not None
    assert violation.name == name


def seconds_until_decided(plan: Plan) -> float:
    """Return how long after the first fault the leader has lost the last of the nodes."""
    cluster = Cluster(plan)
    cluster.run()
    lost = [float(line.split()[0]) for line in cluster.history if "has lost 0" in line]
    return max(lost) - plan.faults[0].at


def test_a_rack_without_power_is_lost_at_once(monkeypatch):
    """Nodes that do not answer are asked at the same time, and none of them holds up the leader."""
    faults = tuple(Fault(12.0 + number / 100, "power_loss", machine=number) for number in range(8, 14))
    quiet = dataclasses.replace(draw(3), nodes=16, ranks_per_node=1, least=1, steps=60, silence=5.0, max_restarts=3)
    plan = dataclasses.replace(quiet, faults=faults, step_seconds=0.5, delay=(50e-6, 1e-3), skew=0.0)
    assert seconds_until_decided(plan) < 7.0
    mutants.machines_are_asked_one_after_the_other(monkeypatch)
    assert seconds_until_decided(plan) > 8.0


def test_a_history_shrinks_to_the_faults_that_matter(monkeypatch):
    mutants.leader_shrinks_node_by_node(monkeypatch)
    plan = draw(57)
    smaller = shrink(plan)
    assert len(smaller.faults) < len(plan.faults)
    assert [fault.kind for fault in smaller.faults] == ["arrive", "partition"]
