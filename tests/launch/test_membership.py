"""Which nodes are lost, and which leads next: events in, actions out."""

from __future__ import annotations

from phalanx.launch.membership import (
    Accuse,
    Ask,
    Lost,
    Membership,
    Move,
    Stop,
    Watch,
    beat_seconds,
    may_continue,
)

SILENCE = 10.0


def member(own: int, count: int = 3, leader: int = 1) -> Membership:
    """Return the membership of one of some nodes, whose names are their numbers."""
    names = [f"{number:05d}" for number in range(1, count + 1)]
    made = Membership(f"{own:05d}", SILENCE, 0.0)
    made.begin(f"{leader:05d}", {name: {"host": name, "standby": ["", name]} for name in names}, 0.0)
    return made


def actions(made: Membership, now: float, kind: type) -> list:
    return [action for action in made.check(now) if isinstance(action, kind)]


def test_only_one_part_of_the_nodes_may_continue():
    four = ["1", "2", "3", "4"]
    assert may_continue(four, ["1", "2"], [], leader="1")
    assert not may_continue(four, ["3", "4"], [], leader="1")
    assert may_continue(four, ["3", "4"], ["1"], leader="1")


def test_heartbeats_of_all_nodes_together_are_bounded():
    assert [nodes / beat_seconds(nodes) for nodes in (64, 1_000, 16_384)] == [128, 2_000, 2_000]


def test_neighbours_are_watched_and_their_end_is_reported_to_the_leader():
    second = member(2, 6)
    assert actions(second, 0.1, Watch) == [Watch(("00003", "00004", "00005"))]
    second.on_neighbour("00004", None)
    assert actions(second, 0.2, Accuse) == [Accuse({"00004": "ended"})]
    assert actions(second, 0.3, Accuse) == []


def test_the_leader_asks_a_node_that_others_find_lost_before_it_decides():
    leader = member(1, 6)
    leader.on_beats({f"{number:05d}": 1 for number in range(2, 7)}, 0.0)
    leader.on_accusation({"00004": "ended", "00005": "silent"}, 0.5)
    assert actions(leader, 0.6, Ask) == [Ask(("00004", "00005"))]
    leader.on_answers({"00004": False, "00005": True}, 0.7)
    assert actions(leader, 0.8, Lost) == [Lost(("00004",), ("00004",))]
    assert "00005" in leader.nodes


def test_a_rack_that_is_lost_is_found_in_three_rounds():
    """Its first node alone has a neighbour that is left; a node beside a lost one is asked as well."""
    leader, rack = member(1, 200), {f"{number:05d}" for number in range(50, 114)}
    leader.on_beats(dict.fromkeys(leader.nodes, 1), 0.0)
    leader.on_accusation({f"{number:05d}": "ended" for number in (50, 51, 52)}, 0.1)
    (asked,) = actions(leader, 0.2, Ask)
    now = 0.2
    for found in (3, 3 + 15, 64):
        leader.on_answers({node: node not in rack for node in asked.nodes}, now + 0.1)
        now += 0.2
        decided = leader.check(now)
        assert len(rack - leader.nodes.keys()) == found
        asked = [action for action in decided if isinstance(action, Ask)][-1]
    assert len(leader.nodes) == 200 - 64


def test_a_node_that_misses_its_heartbeat_and_does_not_answer_is_lost_a_period_earlier():
    """Of 16,384 nodes each sends a heartbeat every 8 s: one that is asked in vain is not waited for twice as long."""
    leader = member(1, 16_384)
    leader.on_beats(dict.fromkeys(leader.nodes, 1), 0.0)
    leader.on_beats({node: 2 for node in leader.nodes if node != "00077"}, 9.0)
    for neighbour in ("00002", "00003", "00004"):
        leader.on_neighbour(neighbour, 17.0)
    assert actions(leader, 17.5, Ask) == [Ask(("00077",))]
    leader.on_answers({"00077": None}, 18.5)
    assert actions(leader, 18.6, Lost) == [Lost(("00077",), ())]


def test_a_leader_without_the_others_stops_before_they_go_on():
    leader, second = member(1), member(2)
    assert actions(leader, SILENCE + 2, Stop)
    second.check(5.0)
    assert actions(second, SILENCE + 2, Move) == []
    assert [move.leader for move in actions(second, 1.1 * SILENCE + 4, Move)] == ["00002"]


def test_a_node_that_heard_nothing_for_long_does_not_lead_when_the_leader_has_ended():
    """The others have left it out by then, and the run may have finished."""
    second = member(2)
    second.on_store_ended()
    second.check(12.0)
    second.on_answers({"00001": False}, 12.1)
    assert actions(second, 12.2, Stop)


def test_losses_one_after_the_other_do_not_make_a_majority_of_a_minority():
    """Of five nodes the leader has lost two: the list without them counts when enough others know it."""
    leader = member(1, 5)
    for node, now in (("00005", 1.0), ("00004", 2.0)):
        leader.on_accusation({node: "silent"}, now)
        leader.on_answers({node: None}, now + 0.1)
        assert actions(leader, now + 0.2, Lost) == [Lost((node,), ())]
    leader.on_accusation({"00003": "silent"}, 3.0)
    leader.on_answers({"00003": None}, 3.1)
    assert actions(leader, 3.2, Stop)
