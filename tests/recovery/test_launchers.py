"""Launchers of several machines: their messages, one that takes over, requests, and whose errors are lost ranks."""

from __future__ import annotations

import json
import selectors
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from phalanx.diagnosis import Diagnosis
from phalanx.errors import EXIT_USAGE, CommunicationError
from phalanx.host.job_secret import VARIABLE
from phalanx.host.lost_peers import lost_peers
from phalanx.host.signed_store import sign_store
from phalanx.host.wire import decode, encode
from phalanx.launch.agent_messages import Lead, LeaderLost, Mailed, NodesLost
from phalanx.launch.context import LauncherContext
from phalanx.launch.environment import NodeInfo
from phalanx.launch.failure import FailureReport
from phalanx.launch.group import RankState
from phalanx.launch.mailbox import Mailbox
from phalanx.launch.spec import CallTarget, Elastic, LaunchSpec
from phalanx.recovery.launcher.control import ElasticControl
from phalanx.recovery.launcher.node import Node
from phalanx.recovery.launcher.protocol import (
    AllHereEnded,
    AllOver,
    Deliver,
    GiveUp,
    NodesChanged,
    Rank,
    RankCrashed,
    RankFinished,
    RankSpoke,
    Send,
    Tick,
    Unsurvived,
)
from phalanx.recovery.launcher.requests import ScaleRequests
from phalanx.recovery.launcher.view import GroupView
from phalanx.recovery.messages import (
    Abort,
    End,
    FromRank,
    Hello,
    LeaveAtStep,
    LeftOut,
    LostRank,
    NodeView,
    Orders,
    Position,
    RankFacts,
    RankJoined,
    RankReady,
    ResizeAnswer,
    ResizeAsked,
    RunOver,
    StartRanks,
    ViewChange,
)
from phalanx.recovery.ranks.member import export
from phalanx.world.env import read_rank_env

# --- messages -------------------------------------------------------------------------------------------------------


@pytest.fixture
def mailbox():
    """The leader's mailbox, whose thread does not run: the test calls what it does."""
    store = dist.HashStore()
    return Mailbox(lambda: store, "00002", "00002", period=lambda: 1.0)


def test_a_message_that_was_counted_and_not_written_holds_nothing_up(mailbox):
    store = mailbox._store
    store.add("mail/00002", 1)  # its sender is killed here
    store.add("mail/00002", 1)
    store.set("mail/00002/2", json.dumps([["00002", {"number": 2}]]))
    mailbox._exchange_as_leader()
    assert mailbox.receive() == [{"number": 2}]
    store.set("mail/00002/1", json.dumps([["00002", {"number": 1}]]))  # or was only slow
    mailbox._exchange_as_leader()
    mailbox._exchange_as_leader()
    assert mailbox.receive() == [{"number": 1}]


def test_a_message_to_several_machines_is_written_once(mailbox):
    mailbox.serve(["00001", "00002", "00003", "00004"])
    mailbox.post(["00003", "00004"], {"number": 1})
    mailbox._exchange_as_leader()
    written = [json.loads(mailbox._store.get(f"mail/{node}/1")) for node in ("00003", "00004")]
    assert written == [["all/1"], ["all/1"]]
    assert json.loads(mailbox._store.get("all/1")) == {"sender": "00002", "message": {"number": 1}}
    assert not mailbox._store.check(["mail/00001/1"])
    assert mailbox.receive() == []
    mailbox._written_at[0] = (time.monotonic() - 4000.0, "all/1")  # no node reads it any more
    mailbox._exchange_as_leader()
    assert not mailbox._store.check(["all/1"])


def test_a_message_from_outside_the_job_is_refused_and_the_next_one_is_read(mailbox, capsys):
    inner = mailbox._store
    mailbox._store = sign_store(inner, {VARIABLE: "secret"})
    inner.add("mail/00002", 2)
    inner.set("mail/00002/1", json.dumps([["00002", {"abort": "all"}]]))
    mailbox._store.set("mail/00002/2", json.dumps([["00002", {"number": 2}]]))
    mailbox._exchange_as_leader()
    assert mailbox.receive() == [{"number": 2}]
    assert "that no rank of this job has signed" in capsys.readouterr().err


# --- nodes: events in, actions out ----------------------------------------------------------------------------------


class Launcher:
    """A node of three, each with one rank; `happen` returns the messages that it sends."""

    def __init__(self, own: str, leader: str = "00001", *, machines: int = 3) -> None:
        names = [f"{number + 1:05d}" for number in range(machines)]
        view = GroupView(leader, {name: NodeView(f"host-{name}", 1, None, ranks=1) for name in names})
        rank = names.index(own)
        elastic = Elastic(tuple(range(machines, 0, -1)), silence_seconds=0.0)
        self.node = Node(own, view, elastic, [Rank(f"r{rank}", own, rank, rank)], max_restarts=3, now=0.0)
        self.now = 0.0
        self.actions: list = []

    def happen(self, *events) -> list[tuple[str, Any]]:
        self.actions = []
        for event in events:
            self.actions += self.node.handle(event, self.now)
        return [(action.to, action.message) for action in self.actions if isinstance(action, Send)]

    def kinds(self, kind: type) -> list:
        return [action for action in self.actions if isinstance(action, kind)]


def position(rank: int = 1, **fields) -> Position:
    given = {"rank": rank, "local_rank": 0, "world_size": 3, "local_world_size": 1, "node_rank": 1, "generation": 4}
    return Position(**{**given, "term": 0, "began": 0.0, "reason": "", "failures": 2, **fields})


def test_messages_arrive_as_they_were_sent():
    facts = RankFacts("r1", 1, 1, 0, None, True, RankReady("lost", 5))
    for message in (
        Hello((facts,), 3, 2, (ViewChange(2, 3, 4, 1, {"00001": None}),)),
        Orders((("r1", position(lost=(0, 2))), ("r2", End()))),
        ViewChange(1, 2, 3, 4, {"00001": NodeView("a", 2, ("10.0.0.1", 5), 1), "00002": None}),
        LostRank("r1", 2, "raised", {"cause": "x", "details": ("a", "b")}),
    ):
        assert decode(json.loads(json.dumps(encode(message)))) == message


def test_failures_that_the_lost_launcher_counted_are_not_forgotten():
    """A follower knows them from the view; one that missed the last change, from the reports of the others."""
    launcher = Launcher("00002")
    launcher.happen(Mailed("00001", ViewChange(1, 0, 4, 2, {})))
    launcher.happen(LeaderLost("00002", ("10.0.0.2", 1), 1))
    facts = RankFacts("r2", 2, 2, 0, None, True, None)
    launcher.happen(Mailed("00003", Hello((facts,), 1, 2, (ViewChange(2, 0, 4, 3, {}),))), Tick())
    assert launcher.node.leads
    assert launcher.node.failures == 4, "and the loss of that machine"


def hello(*facts: RankFacts, **fields: Any) -> Hello:
    return Hello(facts, **{"term": 1, "version": 0, **fields})


def test_a_machine_that_reports_after_another_took_over_is_left_out():
    """Its launcher ends; the others, which it must not stop, go on."""
    launcher = Launcher("00002", machines=4)
    launcher.happen(LeaderLost("00002", ("10.0.0.2", 1), 1, ended=("00001",)))
    launcher.happen(Mailed("00003", hello()))
    launcher.now = 10.0
    launcher.happen(Tick())
    assert launcher.kinds(Lead) == [Lead(1)]
    ((to, message),) = launcher.happen(Mailed("00004", hello()))
    assert (to, type(message)) == ("00004", LeftOut)
    late = Launcher("00004", "00002", machines=4)
    late.happen(Mailed("00002", message))
    assert [give_up.alone for give_up in late.kinds(GiveUp)] == [True]


@pytest.mark.parametrize("ended", [(), ("00001",)], ids=["out of reach", "ended"])
def test_a_machine_that_no_other_one_reports_to_does_not_lead_alone(ended):
    """The other one may see the leader still, or follow another one."""
    launcher = Launcher("00002")
    launcher.happen(LeaderLost("00002", ("10.0.0.2", 1), 1, ended))
    launcher.now = 10.0
    launcher.happen(Tick())
    assert not launcher.node.leads
    assert [give_up.alone for give_up in launcher.kinds(GiveUp)] == [True]


def test_a_machine_that_ended_while_another_took_over_is_not_waited_for():
    launcher = Launcher("00002")
    launcher.happen(LeaderLost("00002", ("10.0.0.2", 1), 1, ("00001",)))
    launcher.happen(Tick())
    assert not launcher.node.leads
    launcher.happen(NodesLost(("00003",), ended=("00003",)), Tick())
    assert launcher.node.leads


def test_reports_that_come_before_a_launcher_knows_that_it_takes_over_are_kept():
    launcher = Launcher("00002")
    launcher.happen(Mailed("00003", hello(RankFacts("r2", 2, 2, 0, None, True, None))))
    launcher.happen(LeaderLost("00002", ("10.0.0.2", 1), 1), Tick())
    assert [rank.key for rank in launcher.node.group.members] == ["r1", "r2"]


def test_a_new_leader_does_not_count_a_machine_that_was_lost_before():
    """It would wait for it at the end, and start ranks on it."""
    launcher = Launcher("00002")
    launcher.happen(Mailed("00001", ViewChange(1, 0, 1, 1, {"00003": None})))
    assert launcher.kinds(NodesChanged) == [NodesChanged({"00003": None}, 1)]
    launcher.happen(LeaderLost("00002", ("10.0.0.2", 1), 1, ended=("00001",)), Tick())
    assert list(launcher.node.view.nodes) == ["00002"]
    launcher.happen(RankFinished("r1"), AllHereEnded())
    assert launcher.kinds(AllOver)


def test_a_new_leader_knows_a_machine_that_came_late():
    launcher = Launcher("00002")
    came = NodeView("late", 1, ("10.0.0.4", 1))
    launcher.happen(Mailed("00001", ViewChange(1, 0, 1, 1, {"00004": came, "00003": None})))
    assert launcher.kinds(NodesChanged) == [NodesChanged({"00004": came, "00003": None}, 1)]
    launcher.happen(LeaderLost("00002", ("10.0.0.2", 1), 1))
    facts = RankFacts("r3", 3, 2, 0, None, True, None)
    sent = launcher.happen(Mailed("00004", hello(facts, version=1)))  # the last one that may report
    assert ("00004", Orders) in [(to, type(message)) for to, message in sent], "its ranks get orders"


def test_changes_that_only_others_have_seen_are_known_to_a_new_leader_and_then_to_all():
    """The leader before was lost while it told them that a machine had come, and another one had gone."""
    launcher = Launcher("00002", machines=4)
    came = NodeView("late", 1, ("10.0.0.5", 1))
    changes = (ViewChange(1, 0, 1, 1, {"00003": None}), ViewChange(2, 0, 1, 1, {"00005": came}))
    launcher.happen(LeaderLost("00002", ("10.0.0.2", 1), 1, ("00001",)))
    launcher.happen(Mailed("00004", hello(version=2, changes=changes)), Mailed("00005", hello(version=2)), Tick())
    launcher.now = 20.0
    sent = launcher.happen(Tick())
    assert list(launcher.node.view.nodes) == ["00002", "00004", "00005"]
    behind = Launcher("00002", machines=4)
    behind.node.view.apply(changes[0])
    behind.node.view.apply(changes[1])
    behind.happen(LeaderLost("00002", ("10.0.0.2", 1), 1, ("00001",)))
    sent = behind.happen(Mailed("00004", hello()), Mailed("00005", hello(version=2)), Tick())
    assert [message for to, message in sent if to == "00004"][:2] == list(changes)


def test_a_view_of_a_leader_before_the_last_is_not_applied():
    launcher = Launcher("00003")
    launcher.happen(LeaderLost("00002"))
    launcher.happen(Mailed("00001", ViewChange(9, 9, 9, 9, {"00002": None})))
    assert "00002" in launcher.node.view.nodes


def test_orders_of_a_leader_before_the_last_are_not_obeyed():
    launcher = Launcher("00003")
    launcher.happen(LeaderLost("00002"))
    for message in (Orders((("r2", End()),)), StartRanks(1, 2), LeftOut("it is slow"), RunOver()):
        assert launcher.happen(Mailed("00001", message)) == []
        assert launcher.actions == []


def test_orders_to_the_ranks_of_a_machine_are_one_message():
    launcher = Launcher("00001")
    for sender, key in (("00002", "r1"), ("00003", "r2")):
        launcher.happen(Mailed(sender, FromRank(key, int(key[1:]), 0, RankJoined(0))))
    launcher.happen(RankSpoke("r0", RankJoined(0)))
    sent = launcher.happen(RankCrashed("r0", -9, "was killed", {}))
    orders = {to: message.orders for to, message in sent if isinstance(message, Orders)}
    assert {to: [(key, type(order)) for key, order in each] for to, each in orders.items()} == {
        "00002": [("r1", Abort)],
        "00003": [("r2", Abort)],
    }


def test_a_usage_error_of_another_machine_ends_the_run_with_its_report():
    """It would be the same again: the launcher ends with its exit code, and does not start again."""
    member = Launcher("00002")
    report = {"cause": "stopped: no GPU", "exit_code": EXIT_USAGE, "hint": "Use another one.", "details": ()}
    ((to, lost),) = member.happen(RankCrashed("r1", EXIT_USAGE, "raised UsageError", report))
    assert to == "00001"
    leader = Launcher("00001")
    for sender, key in (("00002", "r1"), ("00003", "r2")):
        leader.happen(Mailed(sender, FromRank(key, int(key[1:]), 0, RankJoined(0))))
    leader.happen(RankSpoke("r0", RankJoined(0)))
    leader.happen(Mailed("00002", decode(encode(lost))))
    (end,) = leader.kinds(Unsurvived)
    assert FailureReport.from_message(dict(end.failure)).exit_code == EXIT_USAGE
    assert end.failure["hint"] == "Use another one."


# --- requests -------------------------------------------------------------------------------------------------------


def test_a_request_that_cannot_be_answered_is_reported_once_and_ends_nothing(tmp_path):
    notices: list[str] = []
    requests = ScaleRequests(tmp_path / "logs", notices.append)
    requests.attempt(requests.take)
    assert notices == [], "there is none"
    (tmp_path / "logs" / "ranks.request").mkdir(parents=True)  # cannot be read as a file
    for _ in range(3):
        requests.attempt(requests.take)
    (notice,) = notices
    assert "cannot be read or answered" in notice


@pytest.fixture
def control(tmp_path):
    """The launcher of the second of three machines; `sent` notes what it sends."""
    state = RankState(1, "r1", "r1", 1)
    group: Any = SimpleNamespace(
        ranks={"r1": state}, states=[state], alive=[state], controls={}, signal=lambda *_: None
    )
    spec = LaunchSpec(
        target=CallTarget("m:f", ""), ranks_per_node=1, log_dir=tmp_path, elastic=Elastic((3, 2, 1)), max_restarts=3
    )
    machines = [["00001", "a", 1, None], ["00002", "b", 1, None], ["00003", "c", 1, None]]
    node = NodeInfo(1, 3, 1, 3, "127.0.0.1", 1, own="00002", leader="00001", nodes=machines)
    sent: list[tuple[str, Any]] = []
    rendezvous = SimpleNamespace(has_other_nodes=True, post=lambda to, message: sent.append((to, message)))
    console = SimpleNamespace(handle=lambda event: None, notice=lambda text: None)
    parts = (rendezvous, selectors.DefaultSelector(), lambda seconds, action: None, lambda report, **how: None)
    context = LauncherContext(spec, node, group, console, *parts, lambda: False)
    diagnosis = Diagnosis(context, 1)
    made = ElasticControl(context, diagnosis, failures=0)
    yield SimpleNamespace(control=made, sent=sent, logs=tmp_path)
    diagnosis.close()
    context.selector.close()


def test_a_machine_that_does_not_decide_passes_requests_on(control, monkeypatch):
    (control.logs / "ranks.request").write_text('{"ranks": 2}')
    control.control.check(time.monotonic())
    assert control.sent == [], "the launcher that decides may see this folder, too"
    monkeypatch.setattr("phalanx.recovery.launcher.control._PASS_SECONDS", 0.0)
    control.control.check(time.monotonic())
    control.control.check(time.monotonic())
    assert control.sent == [("00001", ResizeAsked(2))]
    assert not (control.logs / "ranks.request").exists()
    refused = "no node has room for 2 ranks."
    control.control.handlers[Mailed](Mailed("00001", ResizeAnswer(refused)))
    assert json.loads((control.logs / "ranks.answer").read_text()) == {"refused": refused}


def test_a_request_that_was_passed_on_is_carried_out_and_answered():
    leader = Launcher("00001")
    assert leader.happen(Mailed("00003", ResizeAsked(2)), Tick()) == [], "while the group changes"
    for sender, key in (("00002", "r1"), ("00003", "r2")):
        leader.happen(Mailed(sender, FromRank(key, int(key[1:]), 0, RankJoined(0))))
    leader.happen(RankSpoke("r0", RankJoined(0)))
    sent = leader.happen(Tick())
    assert ("00003", ResizeAnswer(None)) in sent
    assert [order for action in leader.kinds(Deliver) for order in [type(action.order)]] == [LeaveAtStep]


def test_requests_are_no_failures_of_the_run(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    names = ("ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_RANK", "PHALANX_GENERATION", "PHALANX_TERM", "PHALANX_FAILURES")
    for name in names:
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv("PHALANX_FAILURES")
    assert read_rank_env().failures == 1, "without Phalanx's launcher: the restarts"
    monkeypatch.setenv("PHALANX_FAILURES", "0")
    export(Position(0, 0, 2, 2, 0, generation=7, term=0, began=0.0, reason="a request for 2 ranks", failures=1))
    env = read_rank_env()
    assert (env.generation, env.failures) == (7, 1)


# --- errors ---------------------------------------------------------------------------------------------------------


def caught(action) -> BaseException:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return error
    raise AssertionError("nothing was raised")


def closed_connection() -> None:
    one, other = socket.socketpair()
    other.close()
    with one:
        one.send(b"x")


def test_a_broken_connection_of_the_users_is_not_a_lost_rank(tmp_path):
    error = caught(closed_connection)
    assert "Broken pipe" in str(error)
    assert not lost_peers(error)
    with pytest.raises(ConnectionResetError) as reset:
        raise ConnectionResetError("Connection reset by peer")
    assert not lost_peers(reset.value)


def test_broken_connections_between_ranks_are_lost_ranks():
    assert lost_peers(RuntimeError("gloo: Connection closed by peer [127.0.0.1]:1"))
    assert lost_peers(CommunicationError("the exchange with rank 3 broke off"))

    from phalanx.host import messages

    one, other = socket.socketpair()
    other.close()
    with one:
        assert lost_peers(caught(lambda: messages.send(one, {"x": 1})))
