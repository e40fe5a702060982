"""Launchers of several machines: their messages, one that takes over, requests, and whose errors are lost ranks."""

from __future__ import annotations

import dataclasses
import json
import selectors
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from phalanx.diagnosis.inquiry import Diagnosis
from phalanx.errors import CommunicationError
from phalanx.host.lost_peers import lost_peers
from phalanx.host.signed_store import VARIABLE, sign_store
from phalanx.launch.context import LauncherContext
from phalanx.launch.environment import NodeInfo
from phalanx.launch.group import RankState
from phalanx.launch.mailbox import Mailbox
from phalanx.launch.spec import CallTarget, Elastic, LaunchSpec
from phalanx.recovery.launcher.elastic import ElasticControl, ScaleRequests, TakingOver
from phalanx.recovery.launcher.roles import MemberRole
from phalanx.recovery.ranks.member import Position
from phalanx.world.env import read_rank_env

# --- messages -------------------------------------------------------------------------------------------------------


@pytest.fixture
def mailbox():
    """A mailbox whose thread does not run: `_exchange` is called by the test."""
    return Mailbox(dist.HashStore(), "00002")


def test_a_message_that_was_counted_and_not_written_holds_nothing_up(mailbox):
    store = mailbox._store
    store.add("mail/00002", 1)  # its sender is killed here
    store.add("mail/00002", 1)
    store.set("mail/00002/2", json.dumps({"number": 2}))
    mailbox._exchange()
    assert mailbox.receive() == [{"number": 2}]
    store.set("mail/00002/1", json.dumps({"number": 1}))  # or was only slow
    mailbox._exchange()
    mailbox._exchange()
    assert mailbox.receive() == [{"number": 1}]


def test_a_message_from_outside_the_job_is_refused_and_the_next_one_is_read(mailbox, capsys):
    inner = mailbox._store
    mailbox._store = sign_store(inner, {VARIABLE: "secret"})
    inner.add("mail/00002", 2)
    inner.set("mail/00002/1", json.dumps({"abort": "all"}))
    mailbox._store.set("mail/00002/2", json.dumps({"number": 2}))
    mailbox._exchange()
    assert mailbox.receive() == [{"number": 2}]
    assert "that no rank of this job has signed" in capsys.readouterr().err


# --- taking over ----------------------------------------------------------------------------------------------------


@pytest.fixture
def context(tmp_path):
    """What a launcher with one rank has; `sent` and `failed` note what it does."""
    near, far = socket.socketpair()
    state = RankState(1, "r1", "r1", 1)
    group: Any = SimpleNamespace(
        ranks={"r1": state}, states=[state], alive=[state], controls={"r1": near}, signal=lambda *_: None
    )
    group.retire = lambda state: None
    elastic = Elastic((3, 2, 1), silence_seconds=0.0)
    spec = LaunchSpec(target=CallTarget("m:f", ""), ranks_per_node=1, log_dir=tmp_path, elastic=elastic, max_restarts=3)
    machines = [["00001", "a", 1], ["00002", "b", 1], ["00003", "c", 1]]
    node = NodeInfo(1, 3, 1, 3, "127.0.0.1", 1, own="00002", leader="00001", machines=machines)
    selector = selectors.DefaultSelector()
    sent: list[tuple[str, dict]] = []
    failed: list[dict] = []
    made = LauncherContext(
        spec,
        node,
        group,
        console=SimpleNamespace(handle=lambda event: None, notice=lambda text: None),
        rendezvous=SimpleNamespace(post=lambda to, message: sent.append((to, message))),
        selector=selector,
        later=lambda seconds, action: None,
        fail=lambda report, **how: failed.append(how),
        is_stopping=lambda: False,
    )
    evidence = SimpleNamespace(is_stuck=lambda *_: False, place=lambda state: "")
    yield SimpleNamespace(context=made, evidence=evidence, sent=sent, failed=failed)
    selector.close()
    near.close()
    far.close()


def form(**fields) -> dict[str, Any]:
    given = {"rank": 1, "local_rank": 0, "world_size": 3, "local_world_size": 1, "node_rank": 1, "generation": 4}
    return {"to": "r1", "message": {"form": {**given, "began": 0.0, "reason": "", "failures": 2, **fields}}}


def test_failures_that_the_lost_launcher_counted_are_not_forgotten(context):
    following = MemberRole(context.context, context.evidence, "00001")
    following.take_mail(form())
    following.follow("00002")
    assert context.sent[-1][1]["failures"] == 2
    takeover = TakingOver(context.context, context.evidence, following, {"00001": "a"}, ["00003"])
    others = {"sender": "00003", "hello": [], "generation": 4, "failures": 3}
    takeover.take_hello(others)
    assert takeover.lead(0, ("127.0.0.1", 1)).failures == 4, "and the loss of that machine"


def test_a_machine_that_reports_after_another_took_over_is_left_out(context):
    """Its launcher ends; the others, which it must not stop, go on."""
    following = MemberRole(context.context, context.evidence, "00001")
    following.take_mail(form())
    takeover = TakingOver(context.context, context.evidence, following, {"00001": "a"}, ["00003"])
    deadline = time.monotonic() + 10
    takeover.deadline = 0.0
    assert takeover.is_complete
    assert time.monotonic() < deadline
    control = ElasticControl(context.context, Diagnosis(context.context, 1), failures=0)
    control.role = takeover.lead(0, ("127.0.0.1", 1))
    context.sent.clear()
    control.take_mail({"sender": "00003", "hello": [], "generation": 4, "failures": 0})
    ((to, message),) = context.sent
    assert (to, list(message)) == ("00003", ["left_out"])
    following.take_mail({"sender": "00002", **message})
    assert context.failed == [{"final": True}]


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


def test_a_machine_that_does_not_decide_passes_requests_on(context, monkeypatch):
    logs = context.context.spec.log_dir
    control = ElasticControl(context.context, Diagnosis(context.context, 1), failures=0)
    (logs / "ranks.request").write_text('{"ranks": 2}')
    control.check(time.monotonic())
    assert context.sent == [], "the launcher that decides may see this folder, too"
    monkeypatch.setattr("phalanx.recovery.launcher.elastic._PASS_SECONDS", 0.0)
    control.check(time.monotonic())
    control.check(time.monotonic())
    assert context.sent == [("00001", {"resize": 2})]
    assert not (logs / "ranks.request").exists()
    control.take_mail({"sender": "00001", "resized": "no machine has room for 2 ranks."})
    assert json.loads((logs / "ranks.answer").read_text()) == {"refused": "no machine has room for 2 ranks."}


def test_a_request_that_was_passed_on_is_carried_out_and_answered(context):
    context.context.node = dataclasses.replace(context.context.node, leader="00002")
    control = ElasticControl(context.context, Diagnosis(context.context, 1), failures=0)
    asked: list[int] = []
    group = SimpleNamespace(is_settled=False, unchanged_since=time.monotonic())
    members = SimpleNamespace(group=group, resize=lambda size, why: asked.append(size), find_late=list)
    control.role.members = members
    control.take_mail({"sender": "00003", "resize": 2})
    control.check(time.monotonic())
    assert asked == [], "while the group changes"
    group.is_settled = True
    control.check(time.monotonic())
    assert (asked, context.sent) == ([2], [("00003", {"resized": None})])


def test_requests_are_no_failures_of_the_run(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    names = ("ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_RANK", "PHALANX_GENERATION", "PHALANX_FAILURES")
    for name in names:
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv("PHALANX_FAILURES")
    assert read_rank_env().failures == 1, "without Phalanx's launcher: the restarts"
    monkeypatch.setenv("PHALANX_FAILURES", "0")
    Position(0, 0, 2, 2, 0, generation=7, began=0.0, reason="a request for 2 ranks", failures=1).export()
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
