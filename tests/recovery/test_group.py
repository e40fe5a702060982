"""The launcher's decisions about lost and added ranks, for messages and losses in any order."""

from __future__ import annotations

import pytest

from phalanx.errors import EXIT_USAGE
from phalanx.launch.spec import Elastic
from phalanx.recovery.launcher.group import ElasticGroup
from phalanx.recovery.launcher.policy import fails_too_often
from phalanx.recovery.launcher.protocol import ArrivalsDue, FillDue, GiveUp, Later, Rank, Send, Tell
from phalanx.recovery.launcher.view import GroupView
from phalanx.recovery.messages import (
    Abort,
    End,
    LeaveAtStep,
    NodeView,
    Position,
    RankAborted,
    RankInterrupted,
    RankJoined,
    RankReady,
    Release,
    StartRanks,
)


class Case:
    """A group of `ranks` ranks on one node, whose timers are due at once; it has room for `room` more processes."""

    def __init__(self, ranks: int, *, max_restarts: int = 5, sizes=(), spares: int = 0, room: int = 100) -> None:
        self.ranks = [new_rank(number) for number in range(ranks)]
        self.view = GroupView("", {"": NodeView("here", ranks + room, ranks=ranks)})
        elastic = Elastic(sizes or (ranks,), spares)
        self.group = ElasticGroup(elastic, "", self.view, self.ranks, max_restarts=max_restarts, now=0.0)
        self.orders: list[tuple[str, type]] = []
        self.position: Position | None = None
        """The last that a rank got."""
        self.reports: list[dict] = []
        self.given_up: list[str] = []
        self.started = 0

    def act(self) -> None:
        """Carry out what the group has decided."""
        while self.group.actions:
            actions, self.group.actions = self.group.actions, []
            for action in actions:
                if isinstance(action, tuple):
                    self.orders.append((action[0].key, type(action[1])))
                    self.position = action[1] if isinstance(action[1], Position) else self.position
                elif isinstance(action, Tell):
                    self.reports.append(action.event)
                elif isinstance(action, GiveUp):
                    self.given_up.append(action.cause)
                elif isinstance(action, Later):
                    {FillDue(): self.group.refill, ArrivalsDue(): self.group.take_in}[action.event]()
                elif isinstance(action, Send) and isinstance(action.message, StartRanks):
                    self.started += action.message.count

    def say(self, rank, message) -> None:
        self.group.on_message(rank, message)
        self.act()

    def join(self, *ranks) -> None:
        for rank in ranks:
            self.say(rank, RankJoined(self.group.generation))

    def ready(self, *ranks, step: int = 5, reported: bool = False) -> None:
        for rank in ranks:
            self.say(rank, RankReady("new", step, reported))

    def aborted(self, rank) -> None:
        self.say(rank, RankAborted())

    def lose(self, rank, code: int = -9) -> bool:
        rank.code = code
        survived = self.group.lose([rank], "was killed")
        self.act()
        return survived

    def end(self, rank) -> None:
        self.group.on_end(rank)
        self.act()

    def resize(self, size: int) -> str | None:
        refused = self.group.resize(size, "a request")
        self.act()
        return refused

    def arrive(self, **slots: int) -> None:
        for name, count in slots.items():
            self.group.on_arrival(name, NodeView(name, count))
        self.act()

    def take(self, order: type) -> list[str]:
        """Return the ranks that got an order of this kind, and forget all orders."""
        found = [key for key, kind in self.orders if kind is order]
        self.orders.clear()
        return found

    def forms(self) -> bool:
        return bool(self.take(Position))


def new_rank(number: int, node: str = "") -> Rank:
    return Rank(f"r{number}", node, number, number, local_rank=number)


@pytest.fixture
def three():
    case = Case(3)
    case.join(*case.ranks)
    return case


def test_a_rank_that_notices_while_others_join_is_asked_only_once(three):
    _, one, two = three.ranks
    three.lose(three.ranks[0])
    new = new_rank(7)
    three.ready(one, two, new)
    assert three.forms()
    three.ready(one)  # its connection to the new rank broke before the launcher knows why
    assert three.lose(new)
    newest = new_rank(8)
    three.ready(two, newest)
    assert three.forms()


def test_collectives_are_ended_when_all_ranks_have_aborted(three):
    """What an ended collective of nccl sends is not complete: no rank that receives it may still use it."""
    zero, one, two = three.ranks
    three.lose(zero)
    assert three.take(Abort) == ["r1", "r2"]
    three.aborted(one)
    assert three.take(Release) == []
    three.aborted(two)
    assert three.take(Release) == ["r1", "r2"]
    new = new_rank(7)
    three.ready(one, two, new)
    assert three.forms()
    three.lose(new)  # again, where one of the two has left by itself
    three.aborted(one)
    assert three.take(Release) == []
    three.ready(two)
    three.aborted(two)
    assert three.take(Release) == ["r1", "r2"]


def test_a_rank_that_notices_first_waits_until_the_others_have_aborted(three):
    """It has not left yet: its collectives over nccl would send to ranks that still use the result."""
    zero, one, two = three.ranks
    three.say(one, RankInterrupted("RuntimeError: connection closed by peer"))
    assert three.take(Abort) == ["r0", "r1", "r2"]
    three.aborted(one)
    assert three.lose(zero)  # which the launcher notices a moment later
    assert three.take(Abort) == ["r1", "r2"]
    three.aborted(one)
    three.say(two, RankInterrupted("RuntimeError: connection closed by peer"))
    assert three.take(Release) == []
    three.aborted(two)
    assert three.take(Release) == ["r1", "r2"]


def test_a_late_report_of_joining_does_not_end_the_leaving(three):
    _, one, two = three.ranks
    three.lose(three.ranks[0])
    three.ready(one, two, new := new_rank(7))
    assert three.forms()
    three.join(one)
    three.lose(new)
    three.ready(one)
    three.join(two)  # sent before it got the abort
    three.ready(two, new_rank(8))
    assert three.forms()


def test_a_new_rank_that_ends_before_it_is_ready_is_started_again(three):
    _, one, two = three.ranks
    three.lose(three.ranks[0])
    three.ready(one, two)
    assert three.started == 1
    assert three.lose(new_rank(7))
    assert three.started == 2
    three.ready(new_rank(8))
    assert three.forms()


def test_new_ranks_that_always_end_are_not_started_for_ever(three):
    three.lose(three.ranks[0])
    three.ready(*three.ranks[1:])
    went_on = [three.lose(new_rank(7 + number)) for number in range(4)]
    assert went_on == [True, True, True, False]
    assert not three.lose(new_rank(20), code=EXIT_USAGE), "it would be the same again"


def test_a_rank_that_is_lost_after_it_was_ready_is_not_chosen(three):
    _, one, two = three.ranks
    three.lose(three.ranks[0])
    three.ready(one)
    three.lose(two)
    three.ready(two)  # what it had sent before is read after its end
    three.ready(new_rank(7))
    assert not three.forms()
    three.ready(new_rank(8))
    assert three.forms()


def test_where_a_rank_has_finished_the_others_do_not_wait_for_it(three):
    zero, one, two = three.ranks
    three.lose(zero)
    three.ready(one)
    three.end(two)
    assert "rank 2 has finished" in three.given_up[0]


def test_ranks_that_finish_before_a_requested_change_end_the_run():
    case = Case(2, sizes=(2, 1))
    case.join(*case.ranks)
    case.resize(1)
    for state in case.ranks:
        case.end(state)
    assert case.given_up == []


def test_a_rank_that_ended_before_a_requested_change_is_not_waited_for():
    case = Case(2, sizes=(2, 1))
    case.join(*case.ranks)
    case.resize(1)
    case.ranks[0].code = 75
    case.end(case.ranks[0])
    assert case.given_up == [], "the other may end, too"
    case.ready(case.ranks[1])
    assert case.given_up == ["a request, and rank 0 has finished already"]


def test_ranks_lost_together_are_one_failure():
    case = Case(3, max_restarts=1)
    case.join(*case.ranks)
    assert case.lose(case.ranks[0])
    assert case.lose(case.ranks[1])
    assert case.group.failures == 1
    case.ready(case.ranks[2], new_rank(7), new_rank(8))
    case.join(*case.group.members)
    assert not case.lose(case.ranks[2])


def test_losses_beyond_max_restarts_end_the_run():
    case = Case(3, max_restarts=2)
    case.join(*case.ranks)
    for number in (7, 8):
        assert case.lose(case.group.members[1])
        case.ready(*case.group.members, new_rank(number), step=number)
        case.join(*case.group.members)
    assert not case.lose(case.group.members[1])
    assert "max_restarts = 2 is used up" in case.reports[-1]["text"]


@pytest.mark.parametrize("reached", ["leaving", "some are ready", "forming", "some have joined"])
def test_a_second_loss_in_any_state_of_a_change_is_survived(three, reached):
    zero, one, two = three.ranks
    assert three.lose(zero)
    if reached == "some are ready":
        three.ready(one)
    elif reached != "leaving":
        three.ready(one, two, new_rank(7))
    if reached == "some have joined":
        three.join(one)
    formed = reached in ("forming", "some have joined")
    generation = three.group.generation
    three.orders.clear()
    assert three.lose(two)
    assert three.group.failures == (2 if formed else 1), "losses before the next generation are one failure"
    left = [member.key for member in three.group.members if member.key not in three.group.steps]
    assert three.take(Abort) == left
    three.ready(*three.group.members, *(new_rank(number) for number in ((8,) if formed else (7, 8))))
    assert three.group.generation == generation + 1
    three.join(*three.group.members)
    assert three.group.is_settled
    assert [member.rank for member in three.group.members] == [0, 1, 2]


@pytest.mark.parametrize("joined", [False, True])
def test_losses_without_a_step_between_them_are_reported_together(three, joined):
    zero, one, two = three.ranks
    three.group.now = 10.0
    assert three.lose(one)
    three.ready(zero, two, new_rank(7))
    if joined:
        three.join(*three.group.members)
    three.group.now = 11.0
    assert three.lose(two)
    three.ready(zero, three.group.members[1], new_rank(8))
    assert (three.position.lost, three.position.began) == ((1, 2), 10.0)
    assert three.position.reason == "rank 1 was killed; rank 2 was killed"
    three.join(*three.group.members)
    three.group.now = 20.0
    assert three.lose(zero)
    three.ready(*three.group.members, step=8, reported=True)
    three.ready(new_rank(9), step=-1)
    assert (three.position.lost, three.position.began) == ((0,), 20.0)


def test_a_spare_rank_takes_the_place_of_a_lost_one_and_another_spare_is_started():
    case = Case(3, spares=1)
    case.join(*case.ranks)
    assert case.started == 1
    case.ready(spare := new_rank(3), step=-1)
    assert case.lose(case.ranks[1])
    assert case.started == 1, "the spare one is there already"
    case.ready(case.ranks[0], case.ranks[2])
    assert spare in case.group.members
    case.join(*case.group.members)
    assert case.started == 2


def test_a_failure_that_needs_a_restart_is_counted_by_the_restart():
    case = Case(1, max_restarts=1)
    case.join(*case.ranks)
    assert not case.lose(case.ranks[0])
    assert case.group.failures == 0


def test_interruptions_without_a_loss_end_where_no_step_is_made(three):
    three.ready(*three.ranks)
    for _ in range(5):
        three.join(*three.ranks)
        three.ready(*three.ranks)
    assert "was interrupted" in three.given_up[0]


def test_a_request_for_more_ranks_than_there_is_room_for_is_refused():
    case = Case(2, sizes=(4, 3, 2), room=1)
    case.join(*case.ranks)
    refused = case.resize(4)
    assert refused is not None
    assert "room" in refused
    assert case.group.is_settled


def test_a_rank_in_a_long_step_is_not_killed_for_a_request():
    case = Case(2, sizes=(2, 1))
    case.join(*case.ranks)
    case.resize(1)
    case.group.now = 1e9
    assert case.group.late() == []
    case.ready(case.ranks[0])
    case.lose(new_rank(9))
    case.lose(case.ranks[1])
    case.ready(new_rank(8))


def test_ranks_that_leave_after_a_request_have_time_from_the_loss_on():
    case = Case(3, sizes=(3, 2))
    case.join(*case.ranks)
    case.resize(2)
    case.ready(case.ranks[0])
    case.group.now = 1000.0
    case.lose(case.ranks[2])
    assert case.group.late() == []
    case.group.now = 2000.0
    assert case.group.late() == [case.ranks[1]], "the other has left"


def scaled(case: Case, size: int) -> None:
    """Join, and go on with fewer ranks."""
    case.join(*case.ranks)
    case.resize(size)
    case.ready(*case.group.members)
    case.join(*case.group.members)


def test_ranks_that_were_scaled_away_end_and_do_not_count_as_ranks_that_are_left():
    case = Case(4, sizes=(4, 3, 2, 1), max_restarts=0)
    scaled(case, 2)
    assert case.take(End) == ["r2", "r3"]
    assert case.group.spares == []
    assert case.lose(case.ranks[1])
    assert [(report["action"], report["size"]) for report in case.reports] == [("shrink", 1)]
    case.ready(case.ranks[0])
    case.join(case.ranks[0])
    assert not case.lose(case.ranks[0])


def test_a_rank_that_was_scaled_away_and_waits_does_not_hold_the_state():
    case = Case(3, sizes=(3, 2, 1), spares=1)
    scaled(case, 1)
    assert [state.key for state in case.group.spares] == ["r1"]
    assert not case.lose(case.ranks[0]), "newer than its state are the checkpoints"
    case = Case(3, sizes=(3, 2, 1), spares=1)
    scaled(case, 1)
    case.resize(2)
    case.ready(case.ranks[0])
    assert case.forms()
    assert not case.lose(case.ranks[0]), "it was lost before it gave its state to the other"


def test_ranks_for_which_a_size_has_no_place_wait_for_more():
    case = Case(4, sizes=(4, 2, 1), max_restarts=0)
    case.join(*case.ranks)
    case.lose(case.ranks[3])
    case.ready(*case.ranks[:3])
    assert [len(case.group.members), len(case.group.spares)] == [2, 1]
    assert case.take(End) == []


def test_where_the_data_shards_itself_the_number_of_ranks_stays():
    case = Case(2, sizes=(4, 2, 1), max_restarts=0)
    for state in case.ranks:
        case.say(state, RankJoined(0, "The data shards itself."))
    refused = "1 ranks are not possible here. Possible: 2. The data shards itself."
    assert case.resize(1) == refused
    case.arrive(b=2)
    assert case.group.is_settled
    assert not case.lose(case.ranks[1]), "a restart has as many ranks, fewer could not go on"


def test_machines_that_arrive_together_are_all_taken_in():
    case = Case(1, sizes=(3, 2, 1))
    case.join(*case.ranks)
    version = case.view.version
    case.arrive(b=1, c=1)
    assert case.view.version == version + 1, "one change for both"
    first, second = (new_rank(n, node) for n, node in ((1, "b"), (2, "c")))
    case.ready(first)
    assert not case.orders
    case.ready(second)
    assert case.take(LeaveAtStep) == ["r0"]
    case.ready(*case.ranks)
    assert case.forms()


def test_machines_that_arrive_one_after_the_other_are_all_taken_in():
    case = Case(1, sizes=(3, 2, 1))
    case.join(*case.ranks)
    case.arrive(b=1)
    case.arrive(c=1)
    first, second = (new_rank(n, node) for n, node in ((1, "b"), (2, "c")))
    case.ready(first)
    case.ready(*case.ranks)
    assert case.forms()
    case.ready(second)
    case.join(*case.group.members)
    assert case.take(LeaveAtStep) == ["r0", "r1"]


def test_of_machines_that_arrive_together_one_that_is_lost_does_not_keep_out_the_others():
    case = Case(1, sizes=(3, 2, 1), room=0)
    case.join(*case.ranks)
    case.arrive(b=1, c=1)
    case.group.on_nodes_lost(["b"])
    case.act()
    case.ready(new_rank(2, "c"))
    assert case.take(LeaveAtStep) == ["r0"]


def test_a_machine_that_is_lost_before_its_ranks_are_ready_is_not_waited_for():
    case = Case(2, sizes=(4, 3, 2), room=0)
    case.join(*case.ranks)
    case.arrive(b=2)
    assert not case.group.is_settled
    case.group.on_nodes_lost(["b"])
    case.act()
    assert case.group.is_settled


def test_spare_ranks_for_which_there_is_no_room_are_reported_once():
    case = Case(2, spares=2, room=1)
    case.join(*case.ranks)
    case.group.fill()
    case.act()
    assert [report["text"] for report in case.reports] == ["1 of 2 spare ranks are missing: no node has room for more"]


def test_a_machine_is_left_out_only_where_it_fails_far_more_often_than_the_others():
    assert fails_too_often(4, [0, 0])
    assert not fails_too_often(3, [0, 0])
    assert not fails_too_often(11, [1])
    assert fails_too_often(12, [1])
    assert fails_too_often(8, [1, 0])
    assert not fails_too_often(100, []), "the only machine"


def test_a_rank_that_waits_for_the_release_is_not_late(three):
    """Only the rank that has not answered the abort holds the others up: they hold the state of the run."""
    zero, one, two = three.ranks
    three.lose(zero)
    three.aborted(one)
    three.group.now = 61.0
    assert three.group.late() == [two]
    assert three.lose(two)
    assert three.group.late() == [], "the other has time from this loss on"
    three.aborted(one)
    three.group.now = 200.0
    assert three.group.late() == [one], "all have aborted, and it has not left"


def test_an_answer_that_arrives_after_the_ranks_have_left_releases_nothing(three):
    """It would let a rank that notices the next loss first end its collectives before the others have aborted."""
    three.ready(*three.ranks)  # each by itself, before the abort has reached it
    assert three.forms()
    for state in three.ranks:
        three.aborted(state)
    assert three.take(Release) == []
