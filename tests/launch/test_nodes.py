"""Machines that gather, come late, fail and are lost: several `NodeGroup` in one process, over real stores."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore
from waiting import LIMIT_SECONDS, until

from phalanx.errors import PhalanxError, UsageError
from phalanx.host import messages
from phalanx.host.addresses import free_port
from phalanx.host.wire import Wire, encode
from phalanx.launch import gathering
from phalanx.launch.agent_messages import (
    AllEnded,
    AskCalls,
    Calls,
    CallsWanted,
    LeaderLost,
    Mailed,
    News,
    NodeArrived,
    NodeFinished,
    NodePlace,
    NodesLost,
    RemoteFailure,
    SilentNodes,
    TakeIn,
    WatchNodes,
)
from phalanx.launch.environment import NodeInfo
from phalanx.launch.gathering import Gathering, agree_on_round
from phalanx.launch.membership import ALL, LEADER, beat_seconds
from phalanx.launch.nodes import NodeGroup
from phalanx.launch.probes import Probes
from phalanx.launch.rendezvous import Rendezvous
from phalanx.launch.spec import CallTarget, LaunchSpec
from phalanx.launch.store_agent import _follow
from phalanx.recovery.messages import Hello, ResizeAsked


class Machines:
    """Some machines with one endpoint."""

    opened: list[Machines]

    def __init__(self, num_nodes: int, **request: Any) -> None:
        self._request = {
            "num_nodes": num_nodes, "endpoint": f"127.0.0.1:{free_port()}", "seconds": LIMIT_SECONDS,
            "ranks_per_node": 2, "identity": {}, **request,
        }  # fmt: skip
        self.groups: dict[int, NodeGroup] = {}
        self.opened.append(self)
        self.arrived: dict[int, list[int]] = {}

    def gather(self, *numbers: int, attempt: int = 0, **request: Any) -> list[NodeInfo]:
        """Let machines gather at the same time, and return their places."""
        with ThreadPoolExecutor(len(numbers)) as pool:
            found = [pool.submit(self._gather, number, attempt, request) for number in numbers]
            return [each.result() for each in found]

    def _gather(self, number: int, attempt: int, request: dict[str, Any]) -> NodeInfo:
        counts = self.arrived.setdefault(number, [])
        if number not in self.groups:
            facts = {"node_rank": number, "launch_id": f"run{number}", **self._request, **request}
            self.groups[number] = NodeGroup(facts)
        return self.groups[number].gather(attempt, lambda news: counts.append(news.message.nodes))

    def await_news(self, number: int, kind: type) -> Any:
        """Wait until a machine gets news of a kind, and return it."""
        return self.news_until(number, kind)[-1]

    def news_until(self, number: int, kind: type) -> list[Wire]:
        """Wait until a machine gets news of a kind, and return all that it got."""
        found: list[Wire] = []

        def came() -> bool:
            for news in self.groups[number].news():
                assert news.attempt == self.groups[number]._attempt
                found.append(news.message)
                if isinstance(news.message, kind):
                    return True
            return False

        until(came, lambda: kind)
        return found

    def kill(self, number: int) -> None:
        """End a machine's heartbeats and stores."""
        group = self.groups.pop(number)
        if group._signpost is not None:
            group._signpost.stop()
        if group._mailbox is not None:
            group._mailbox.close()
            for thread in group._mailbox.threads:
                thread.join()
        group._neighbours.watch({})
        used_by_threads = {"_request", "wakeup"}  # which end a moment later
        for name in vars(group).keys() - used_by_threads:
            delattr(group, name)


@pytest.fixture(autouse=True)
def opened(monkeypatch):
    """Close the machines of a test."""
    made: list[Machines] = []
    monkeypatch.setattr(Machines, "opened", made, raising=False)
    yield
    for machines in made:
        for number in list(machines.groups):
            machines.kill(number)


def elastic(num_nodes: int, **request: Any) -> Machines:
    return Machines(num_nodes, min_ranks=2, silence_seconds=2.0, **request)


def test_a_fixed_number_of_machines_gets_places_and_a_store():
    machines = Machines(3, secret="of all")
    places = machines.gather(2, 0, 1)
    assert [(each.node_rank, each.first_rank) for each in places] == [(2, 4), (0, 0), (1, 2)]
    (shared,) = {(each.master_port, each.run_id, each.world_size, each.num_nodes) for each in places}
    assert shared[1:] == ("run0", 6, 3)
    assert machines.arrived[0][-1] == 3
    assert all(machines.arrived.values()), "each has reported how many there are"
    with pytest.raises(UsageError, match=r"3 nodes have joined at .* without this one"):
        machines.gather(3)


def test_those_that_did_not_come_are_named_on_every_machine():
    machines = Machines(4, seconds=0.5)
    for number in (0, 2):
        machines.groups[number] = NodeGroup({"node_rank": number, "launch_id": "", **machines._request})
    with ThreadPoolExecutor() as pool:
        for each in [pool.submit(machines.gather, number) for number in (0, 2)]:
            with pytest.raises(PhalanxError, match=r"not all 4 nodes joined .* \(2 ranks\) came, node 1, node 3"):
                each.result()


def test_a_machine_that_was_started_again_counts_once(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(gathering, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    store = HashStore()
    request = {"num_nodes": 2, "seconds": 10.0}
    entry = {"node_rank": None, "host": "a", "ranks": 1}
    leader, _, again = (Gathering(store, request, entry, "here") for _ in range(3))
    assert len(leader.read_present()) == 3
    now[0] += leader.roster.silent_seconds + 1
    again._beat()
    assert list(leader.read_present()) == [leader.own, again.own], "the second has ended"
    assert store.add("present", 0) == 2
    store.add("arrivals", 1)  # one that was killed before it wrote its entry
    leader.lead(2, lambda present: None, {"run_id": "x"})
    assert again.wait(lambda present: None).node_rank == 1


def test_the_first_failure_questions_and_the_end_reach_all_machines():
    machines = Machines(2)
    machines.gather(0, 1)
    asker = machines.groups[1]._own
    machines.groups[1]._mail(ALL, AskCalls(7))
    assert machines.await_news(0, CallsWanted) == CallsWanted(7, asker, is_own=False)
    assert machines.await_news(1, CallsWanted) == CallsWanted(7, asker, is_own=True)
    calls = Calls(7, 0, [{"groups": {"kind": [0, 1]}}])
    machines.groups[0]._mail("00001", calls)
    machines.groups[0]._mail("00002", calls)
    assert machines.await_news(1, Calls) == calls
    for number in (0, 1):
        machines.groups[number]._mail(LEADER, NodeFinished())
    for number in (0, 1):
        machines.await_news(number, AllEnded)
    first = RemoteFailure({"cause": "first"})
    machines.groups[1]._mail(ALL, first)
    assert machines.await_news(0, RemoteFailure) == first
    machines.groups[0]._mail(ALL, RemoteFailure({"cause": "second"}))
    machines.groups[0]._mail(ALL, AskCalls(8))
    news = machines.news_until(1, CallsWanted)
    assert not [each for each in news if isinstance(each, RemoteFailure)], "its own was first"


def test_a_silent_machine_of_a_fixed_number_is_named_and_the_others_go_on():
    machines = Machines(2)
    machines.gather(0, 1)
    machines.kill(1)
    (named,) = machines.await_news(0, SilentNodes).nodes
    assert named.startswith("1 (")
    assert named.endswith(", ranks 2, 3)")


def test_a_fixed_number_of_machines_ends_with_the_one_that_hosts_the_store():
    machines = Machines(2)
    machines.gather(0, 1)
    machines.kill(0)
    with pytest.raises(PhalanxError, match="lost the node that hosts the rendezvous"):
        machines.await_news(1, Wire)


def with_new(news: NodeArrived) -> WatchNodes:
    """Return what a launcher asks for when it knows of a new machine."""
    return WatchNodes({news.name: {"host": news.host, "ranks": news.slots, "standby": news.standby}}, 1)


def accept(machines: Machines, leader: int, news: NodeArrived) -> None:
    """Take a machine in, as the launcher of the leader does."""
    group = machines.groups[leader]
    group.change(with_new(news))
    nodes = [[name, entry["host"], entry["ranks"], entry["standby"]] for name, entry in group._nodes.items()]
    place = {"node_rank": 2, "num_nodes": 3, "first_rank": 4, "world_size": 6, "late": True}
    group.take_in(TakeIn({"master_addr": "", "master_port": 1, "nodes": nodes}, {news.name: place}))


def test_a_machine_that_comes_late_is_known_to_all_and_may_take_over():
    """The leader is lost, and of those that are left the one that came late has to know all others, and they it."""
    machines = elastic(2)
    places = machines.gather(0, 1)
    assert [[machine[2] for machine in each.nodes] for each in places] == [[2, 2], [2, 2]]
    with ThreadPoolExecutor() as pool:
        late = pool.submit(machines.gather, 2, attempt=0)
        news = machines.await_news(0, NodeArrived)
        accept(machines, 0, news)
        ((place,),) = [late.result()]
    first = machines.groups[0]._own
    assert (place.late, place.run_id, place.leader) == (True, "run0", first)
    machines.groups[1].change(with_new(news))  # as its launcher has heard from the leader
    machines.kill(0)
    lost = machines.await_news(1, LeaderLost)
    second = machines.groups[1]._own
    assert (lost.leader, lost.term) == (second, 1)
    assert machines.await_news(2, LeaderLost).leader == second
    machines.groups[1].lead(1)
    hello = encode(Hello((), 1, 1))
    machines.groups[2].post(LEADER, hello)
    assert machines.await_news(1, Mailed) == Mailed(machines.groups[2]._own, hello)
    places = machines.gather(1, 2, attempt=1)
    assert {each.run_id for each in places} == {"run0"}, "as before"


def test_a_leader_that_still_closes_its_connections_is_asked_again():
    """Its store has ended a moment before its standby store: it must not count as one that may go on."""
    machines = elastic(2)
    machines.gather(0, 1)
    standby = machines.groups[0]._standby
    machines.kill(0)
    until(lambda: machines.groups[1]._mailbox.failed)
    assert machines.groups[1].news() == []
    del standby
    assert machines.await_news(1, LeaderLost).address is not None


def test_a_lost_machine_no_longer_counts_for_the_quorum():
    """Of three machines two are lost, one after the other: the leader's machine must not wait for the first."""
    machines = elastic(3)
    machines.gather(0, 1, 2)
    machines.kill(2)
    (lost,) = machines.await_news(0, NodesLost).names
    machines.groups[1].change(WatchNodes({lost: None}, 1))  # as its launcher has heard from the leader
    machines.kill(0)
    assert machines.await_news(1, LeaderLost).address is not None


def test_a_leader_that_is_started_again_comes_late_instead_of_beginning_a_second_run():
    machines = elastic(2, seconds=30.0)
    machines.gather(0, 1)
    machines.kill(0)
    second = machines.await_news(1, LeaderLost).leader
    machines.groups[1].lead(1)
    with ThreadPoolExecutor() as pool:
        again = pool.submit(machines.gather, 0)
        news = machines.await_news(1, NodeArrived)
        assert news.name not in ("00001", "00002"), "a name that no machine had"
        accept(machines, 1, news)
        ((place,),) = [again.result()]
    assert (place.late, place.leader, place.run_id) == (True, second, "run0")


def test_a_launcher_and_its_agent_do_not_wait_for_each_other(tmp_path):
    """Each has thousands of messages for the other one before it reads: more than their connection holds."""
    near, far = messages.socket_pair()
    count = 2_000
    received: list[int] = []

    class Nodes:
        """The machines, of which each message is answered."""

        def __init__(self) -> None:
            self.wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._news = [News(0, Mailed("00002", encode(ResizeAsked(number)))) for number in range(count)]

        def post(self, to: str, message: dict[str, Any]) -> None:
            received.append(message["ranks"])

        def news(self) -> list[News]:
            news, self._news = self._news, []
            return news

    agent = threading.Thread(target=_follow, args=(far, Nodes()), daemon=True)
    agent.start()
    spec = LaunchSpec(
        target=CallTarget("m:f"), ranks_per_node=1, log_dir=tmp_path, num_nodes=2, node_rank=0, rdzv_endpoint="a:1"
    )
    rendezvous = Rendezvous(spec, SimpleNamespace())
    rendezvous.agent, rendezvous._outbox = near, messages.Outbox(near)
    for number in range(count):
        rendezvous.post(ALL, ResizeAsked(number))
    answers = [rendezvous.receive().message.message.ranks for _ in range(count)]
    until(lambda: rendezvous.flush() or not rendezvous.has_unsent)
    near.close()
    agent.join(LIMIT_SECONDS)
    far.close()
    assert answers == received == list(range(count))


def test_machines_that_do_not_answer_are_asked_at_the_same_time():
    """A rack without power: nothing refuses, and nothing answers."""
    with socket.socket() as silent, contextlib.ExitStack() as opened:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(4):  # whose queue is full
            filling = opened.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(silent.getsockname())
        with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            addresses = {str(number): silent.getsockname() for number in range(50)}
            addresses |= {"there": there.getsockname(), "ended": closed.getsockname()}
            probes = Probes(LIMIT_SECONDS)
            began, found = time.monotonic(), dict[str, bool | None]()
            probes.ask(addresses)
            assert time.monotonic() - began < LIMIT_SECONDS / 2, "nothing waits"
            until(lambda: found.update(probes.answers()) or len(found) == 2)
            probes._seconds = 0.0
            until(lambda: found.update(probes.answers()) or len(found) == len(addresses))
    assert [name for name, answer in found.items() if answer] == ["there"]
    assert [name for name, answer in found.items() if answer is False] == ["ended"]


def test_machines_may_be_fewer_where_enough_ranks_have_come():
    entry = {"node_rank": None, "host": "a", "ranks": 2}

    def lead(least: int) -> NodePlace:
        store = HashStore()
        request = {"num_nodes": 3, "seconds": 0.2, "min_ranks": least}
        leader, _ = (Gathering(store, request, entry, "here") for _ in range(2))
        return leader.lead(3, lambda present: None, {})

    assert (lead(4).num_nodes, lead(4).world_size) == (2, 4)
    with pytest.raises(PhalanxError, match=r"too few ranks joined .* \(2 ranks\) came, and 5 ranks are needed"):
        lead(5)


def test_machines_that_have_counted_other_attempts_meet():
    store = HashStore()
    assert agree_on_round(store, 0) == 0
    assert agree_on_round(store, 2) == 2
    assert agree_on_round(store, 1) == 2


def test_the_load_of_the_store_is_bounded():
    assert [beat_seconds(nodes) for nodes in (2, 1_000, 16_384)] == [0.5, 0.5, 8.192]
