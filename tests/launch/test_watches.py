"""The clocks of a start, without waiting for them: reminders, what is waited for, and which rank never joined."""

from __future__ import annotations

from phalanx.launch import LaunchSpec, ScriptTarget
from phalanx.launch.group import RankState
from phalanx.launch.launcher_loop import MOMENTS, Reminder, duration_text
from phalanx.launch.watches import IMPORT_MOMENTS, NODES_MOMENTS, StartupNotices, StartWatch


def _spec(tmp_path, **fields):
    return LaunchSpec(target=ScriptTarget("train.py"), ranks_per_node=2, log_dir=tmp_path, **fields)


class Start(StartWatch):
    """A watch that keeps what it has found at the last check."""

    def __init__(self, spec, ranks):
        super().__init__(spec, ranks, len(ranks), on_hang=self.keep, on_slow=lambda watch: self.keep("slow"))
        self.found = None

    def keep(self, found):
        self.found = found

    def look(self, now):
        self.found = None
        self.check(now)
        return self.found


class Notices(StartupNotices):
    """Notices that are returned."""

    def __init__(self, spec, now, *, serving):
        self.given = []
        super().__init__(spec, now, self.given.append, serving=serving)

    def look(self, now):
        self.given.clear()
        self.check(now)
        return next(iter(self.given), None)


def _watch(spec, ranks, begun=None):
    watch = Start(spec, ranks)
    for rank in ranks if begun is not None else ():
        watch.on_process(RankState(rank, "", "", rank), begun)
    return watch


def test_reminders_come_ever_more_rarely():
    reminder = Reminder(100.0, moments=(30.0, 120.0, 600.0))
    told = [now for now in range(100, 2600, 10) if reminder.is_due(float(now))]
    assert told == [130, 220, 700, 1300, 1900, 2500]


def test_reminders_missed_together_are_one():
    reminder = Reminder(0.0, moments=(1.0, 2.0, 10.0))
    assert reminder.is_due(35.0)
    assert not reminder.is_due(35.0)
    assert reminder.next_moment == 40.0


def test_durations_as_text():
    assert [duration_text(seconds) for seconds in (30, 120, 600, 5400)] == ["30 s", "2 min", "10 min", "1.5 h"]


def test_the_start_watch_names_who_is_missing(tmp_path):
    watch = _watch(_spec(tmp_path, join_timeout=5.0), (0, 1, 2), begun=100.0)
    assert watch.next_deadline == 100.0 + MOMENTS[0]
    watch.on_event({"event": "joining", "rank": 0}, 110.0)
    watch.on_event({"event": "joining", "rank": 2}, 111.0)
    assert watch.next_deadline == 115.0
    assert watch.look(114.9) is None
    assert watch.look(115.0).missing == (1,)
    for rank in (0, 2):
        watch.on_event({"event": "joined", "rank": rank}, 116.0)
    assert watch.look(200.0) is None


def test_no_timeout_counts_before_the_last_rank_was_forked(tmp_path):
    watch = _watch(_spec(tmp_path, start_timeout=1.0, join_timeout=1.0), (0, 1))
    watch.on_process(RankState(0, "", "", 0), 10.0)
    assert (watch.next_deadline, watch.look(1000.0)) == (None, None)
    watch.on_process(RankState(1, "", "", 1), 1000.0)
    assert watch.look(1000.9) is None
    assert watch.look(1001.0).none_came


def test_a_rank_that_came_early_waits_from_the_last_fork_on(tmp_path):
    watch = _watch(_spec(tmp_path, join_timeout=5.0), (0, 1))
    watch.on_process(RankState(0, "", "", 0), 10.0)
    watch.on_event({"event": "joining", "rank": 0}, 11.0)
    watch.on_process(RankState(1, "", "", 1), 100.0)
    assert watch.next_deadline == 105.0
    assert watch.look(104.0) is None


def test_a_slow_start_is_reported_repeatedly_until_a_rank_joins(tmp_path):
    watch = _watch(_spec(tmp_path), (0, 1), begun=0.0)
    told = [now for now in range(0, 2000, 10) if watch.look(float(now)) == "slow"]
    assert told == [30, 120, 600, 1800]
    assert watch.waited(600.0) == 600.0
    watch.on_event({"event": "joining", "rank": 1}, 2000.0)
    assert watch.next_deadline is None
    assert watch.look(10000.0) is None


def test_a_rank_alone_need_not_join(tmp_path):
    watch = _watch(_spec(tmp_path), (0,), begun=0.0)
    assert (watch.next_deadline, watch.look(1000.0)) == (None, None)


def test_a_slow_import_is_called_by_its_name(tmp_path):
    notices = Notices(_spec(tmp_path), 0.0, serving=False)
    assert notices.look(IMPORT_MOMENTS[0] - 1) is None
    assert notices.look(IMPORT_MOMENTS[0]) == f"still importing torch after {IMPORT_MOMENTS[0]:.0f} s"
    assert notices.next_deadline == IMPORT_MOMENTS[1]
    notices.on_serving(20.0)
    assert notices.activity == "starting the ranks"
    assert notices.next_deadline == 20.0 + MOMENTS[0]
    notices.end()
    assert (notices.next_deadline, notices.look(1e6)) == (None, None)


def test_what_is_imported_together_with_torch_is_named_too(tmp_path):
    spec = _spec(tmp_path, env={"PHALANX_PRELOAD": "tensorflow,keras._tf_keras.keras"})
    assert Notices(spec, 0.0, serving=False).activity == "importing torch and tensorflow"


def test_missing_machines_are_counted(tmp_path):
    notices = Notices(_spec(tmp_path, num_nodes=4, rdzv_endpoint="a:1"), 0.0, serving=False)
    assert notices.activity == "importing torch"
    notices.on_serving(10.0)
    due = 10.0 + NODES_MOMENTS[0]
    assert notices.look(due - 0.1) is None
    assert notices.look(due) == "waiting for 3 of 4 nodes at a:1 (no answer there yet)"
    host = Notices(_spec(tmp_path, num_nodes=4, rdzv_endpoint="a:1", node_rank=0), 0.0, serving=True)
    assert host.activity == "waiting for 3 of 4 nodes at a:1"
    notices.on_arrived(1, 20.0)
    assert notices.activity == "waiting for 3 of 4 nodes at a:1"
    assert notices.next_deadline == 10.0 + NODES_MOMENTS[1]
    notices.on_arrived(3, 21.0)
    assert notices.look(21.0 + NODES_MOMENTS[0]) == "waiting for 1 of 4 nodes at a:1"
    notices.on_gathered(30.0)
    assert notices.activity == "starting the ranks"
