"""Analysis of traces: clocks that differ, splits, critical path, verdicts, the merged trace, damaged files."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from command import phalanx
from waiting import LIMIT_SECONDS

from phalanx.config.profile import Profiling, parse_profile
from phalanx.errors import UsageError
from phalanx.tools.profile import read
from phalanx.tools.profile.collect import ClockReading, answer_clocks, compare_clock
from phalanx.tools.profile.findings import document, lines, verdict, what_if
from phalanx.tools.profile.pictures import merge
from phalanx.tools.profile.read import owners_at_peak, top_owners
from phalanx.tools.profile.split import Analysis, analyse
from phalanx.tools.profile.timeline import both, clip, total, union, without

BASE = 1_790_000_000_000_000_000
MAIN, LOADER, STREAM, NCCL = 100, 101, 7, 20


class Recorded:
    """Writes the trace of a rank, whose clock is `behind` seconds behind rank 0's; times are given in ms."""

    def __init__(self, rank: int = 0, behind: float = 0.0, **meta: object) -> None:
        self.rank, self.behind = rank, behind
        self.events: list[dict] = []
        self.meta = {
            "format": 1, "rank": rank, "world_size": 2, "ranks": [0, 1], "host": f"node{rank}", "device": "cpu",
            "main_thread": MAIN, "torch": "2.13.0", "strategy": "ddp", "comm_backend": "gloo", "precision": "fp32",
            "loader_workers": 2, "cores": 8, "local_ranks": 1, "settings": {},
            "clock": [[BASE, int(behind * 1e9), 1], [BASE + 10**9, int(behind * 1e9), 1]], **meta,
        }  # fmt: skip

    def add(self, name: str, begin: float, end: float, cat: str = "cpu_op", tid: int = MAIN, **args: object) -> None:
        ts = begin * 1e3 - self.behind * 1e6
        event = {"ph": "X", "name": name, "cat": cat, "pid": 1, "tid": tid, "ts": ts, "dur": (end - begin) * 1e3}
        self.events.append({**event, "args": args})

    def loop(self, name: str, begin: float, end: float) -> None:
        self.add(f"phalanx:{name}", begin, end, "user_annotation")

    def step(self, number: int, begin: float, *, data: float, forward: float, backward: float, wait: float) -> float:
        """A step of a CPU rank: it loads, computes, then waits for an all-reduce; return when it ends."""
        at = begin
        for name, length in (("data", data), ("forward", forward), ("backward", backward + wait)):
            self.loop(name, at, at + length)
            if name != "data":
                self.add(f"aten::{name}", at, at + length - (wait if name == "backward" else 0))
            at += length
        self.add("gloo:all_reduce", at - wait, at, "user_annotation", tid=55)
        self.loop(f"step {number}", begin, at)
        return at

    def write(self, folder: Path, **header: object) -> Path:
        path = folder / f"rank-{self.rank}.json.gz"
        folder.mkdir(exist_ok=True)
        document = {"schemaVersion": 1, "phalanx": self.meta, "baseTimeNanoseconds": BASE, **header}
        text = json.dumps({**document, "traceEvents": self.events, "traceName": "x"}, indent=1)
        path.write_bytes(gzip.compress(text.encode()))
        return path


def two_ranks(folder: Path, behind: float = 0.0, slow: float = 30.0, data: float = 2.0, transfer: float = 3.0) -> Path:
    """Two steps of two ranks; rank 1 computes `slow` ms longer, and rank 0 waits for it in its all-reduce."""
    ranks = Recorded(0), Recorded(1, behind)
    at = [0.0, 0.0]
    for number in (10, 11):
        for rank, recorded in enumerate(ranks):
            own = {"data": data, "forward": 10 + slow * rank, "backward": 5.0, "wait": transfer + slow * (1 - rank)}
            at[rank] = recorded.step(number, at[rank], **own)
    for recorded in ranks:
        recorded.write(folder)
    return folder


def seconds(found: Analysis, rank: int) -> dict[str, float]:
    return {name: round(value * 1e3, 6) for name, value in found.mean(rank).items()}


@pytest.mark.parametrize("behind", [0.0, 7.25, -3.5])
def test_ranks_whose_clocks_differ_by_seconds_are_aligned(tmp_path, behind):
    found = analyse(two_ranks(tmp_path / "profile", behind=behind))
    assert seconds(found, 0) == pytest.approx(
        {"compute": 15, "hidden": 0, "exposed": 33, "data": 2, "checkpoint": 0, "idle": 0}, abs=0.01
    )
    assert seconds(found, 1) == pytest.approx(
        {"compute": 45, "hidden": 0, "exposed": 3, "data": 2, "checkpoint": 0, "idle": 0}, abs=0.01
    )
    assert found.waits == pytest.approx({1: 0.030}, abs=1e-5)
    assert found.step_seconds == pytest.approx(0.050, abs=1e-5)
    assert found.path_seconds == pytest.approx(
        {"compute": 0.045, "hidden": 0, "exposed": 0.003, "data": 0.002, "checkpoint": 0, "idle": 0}, abs=1e-5
    )
    assert {part.rank for path in found.paths.values() for part in path} <= {0, 1}
    assert found.paths[10][0].rank == 1, "the path begins on the slow rank"
    said = verdict(found)
    assert said.startswith("straggler-bound: for 60% of the step the other ranks wait for rank 1 on node1"), said
    assert "its forward phase takes 30.0 ms longer" in said
    assert "compare that node with the others" in said
    gains = {each.change: each.seconds for each in what_if(found)}
    wanted = {"no data wait": 0.048, "network twice as fast": 0.0485, "perfect overlap": 0.047, "no straggler": 0.02}
    assert gains == pytest.approx(wanted, abs=1e-5)
    events = json.loads(gzip.decompress(merge(tmp_path / "profile", found).read_bytes()))["traceEvents"]
    begins = {e["pid"]: e["ts"] for e in events if e["name"] == "phalanx:step 10"}
    assert begins[0] == pytest.approx(begins[1], abs=1)
    flows = [(e["ph"], e["pid"], e["name"]) for e in events if e.get("cat") == "collective"]
    assert flows[:2] == [
        ("s", 0, "gloo:all_reduce #1 of step 10"),
        ("f", 1, "gloo:all_reduce #1 of step 10"),
    ]


def test_the_offset_between_clocks_is_measured_through_a_store():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    now = [0]

    def ticking(ahead: int):  # one clock for both, of which a rank's is ahead
        def clock() -> int:
            now[0] += 1000
            return now[0] + ahead

        return clock

    found: list[ClockReading] = []
    asking = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    thread = threading.Thread(target=lambda: found.append(compare_clock(asking, "t", 3, ticking(5_000_000_000))))
    thread.start()
    assert answer_clocks(store, "t", [3], ticking(0)).offset == 0
    thread.join(timeout=LIMIT_SECONDS)
    assert found[0].offset == pytest.approx(-5_000_000_000, abs=2000)
    assert found[0].round_trip <= 4000


def test_clocks_that_drift_are_followed(tmp_path):
    recorded = Recorded(1, clock=[[BASE, 0, 1], [BASE + 10**9, 2_000_000, 1]])
    recorded.step(10, 0, data=1, forward=1, backward=1, wait=1)
    file = read.RankFile.open(recorded.write(tmp_path))
    assert file.seconds(0.0, BASE) == 0.0
    assert file.seconds(500_000.0, BASE) == pytest.approx(0.501)
    assert file.seconds(3_000_000.0, BASE) == pytest.approx(3.002), "after the last reading it stays"


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ({"data": 41, "forward": 30, "backward": 29, "wait": 0}, "data-bound: 41% of the step waits for the loader; "
         "num_workers=2 of 8 cores are used. Raise it: DataLoader(..., num_workers=7)."),
        ({"data": 1, "forward": 20, "backward": 19, "wait": 60}, "communication-bound: 60% of the step waits for "
         "communication, 0% of which is hidden. gradient_accumulation_steps=4"),
        ({"data": 1, "forward": 60, "backward": 38, "wait": 1}, "compute-bound: 98% of the step computes; "
         "aten::forward takes 60% of it: begin there."),
    ],
)  # fmt: skip
def test_verdicts(tmp_path, work, said):
    recorded = Recorded(0, world_size=1, ranks=[0])
    recorded.step(10, 0, **work)
    recorded.write(tmp_path)
    assert verdict(analyse(tmp_path)).startswith(said)


def test_a_checkpoint_and_python_between_operations(tmp_path):
    recorded = Recorded(0, world_size=1, ranks=[0], settings={"checkpoint_frequency": "10 steps"})
    recorded.loop("step 10", 0, 100)
    recorded.add("aten::mm", 0, 20)
    recorded.loop("checkpoint", 20, 80)
    recorded.add("aten::copy_", 30, 70)  # a part of saving
    recorded.write(tmp_path)
    found = analyse(tmp_path)
    assert seconds(found, 0) == {"compute": 20, "hidden": 0, "exposed": 0, "data": 0, "checkpoint": 60, "idle": 20}
    assert verdict(found).startswith("checkpoint-bound: 60% of the step waits for checkpoints. Save less often")


def test_a_message_under_way_hides_behind_what_the_loop_computes(tmp_path):
    recorded = Recorded(0, world_size=1, ranks=[0])
    recorded.loop("step 10", 0, 100)
    recorded.add("c10d::send", 0, 10)
    recorded.add("gloo:send", 5, 60, "user_annotation")  # on the loop's own thread, as torch records it
    recorded.add("aten::mm", 10, 50)
    recorded.write(tmp_path)
    found = analyse(tmp_path)
    assert seconds(found, 0) == {"compute": 0, "hidden": 40, "exposed": 20, "data": 0, "checkpoint": 0, "idle": 40}


def test_a_gpu_is_judged_by_its_kernels(tmp_path):
    recorded = Recorded(0, device="cuda", world_size=1, ranks=[0], comm_backend="nccl")
    recorded.loop("step 10", 0, 100)
    recorded.loop("data", 0, 30)  # the host waits for data; the GPU is busy for 10 of these
    recorded.add("phalanx.module:inner", 30, 36, "user_annotation")
    recorded.add("aten::linear", 31, 35, **{"External id": 5, "Sequence number": 9})
    backward = "autograd::engine::evaluate_function: AddmmBackward0"
    recorded.add(backward, 40, 42, tid=300, **{"External id": 6, "Sequence number": 9})
    recorded.add("phalanx:step 10", 5, 95, "gpu_user_annotation", STREAM)
    recorded.add("gemm", 0, 10, "kernel", STREAM)
    recorded.add("gemm", 40, 60, "kernel", STREAM, **{"External id": 5})
    recorded.add("gemm_backward", 60, 90, "kernel", STREAM, **{"External id": 6})
    recorded.add("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 80, 95, "kernel", NCCL, **{"Collective name": "allreduce"})
    recorded.write(tmp_path)
    found = analyse(tmp_path)
    assert seconds(found, 0) == {"compute": 50, "hidden": 10, "exposed": 5, "data": 20, "checkpoint": 0, "idle": 15}
    modules = found.timelines[0].modules
    assert {name: round(usage.seconds * 1e3, 6) for name, usage in modules.items()} == {"inner": 50}
    assert [(call.key, call.number) for call in found.timelines[0].collectives[10]] == [("allreduce", 1)]
    assert "gemm_backward" in "\n".join(lines(found, None, tmp_path))


def test_host_waits_for_the_device_are_shown_with_operation_and_line(tmp_path):
    recorded = Recorded(0, device="cuda", world_size=1, ranks=[0], comm_backend="nccl")
    runtime = {"cat": "cuda_runtime"}
    for number, begin in ((10, 0), (11, 100)):
        recorded.loop(f"step {number}", begin, begin + 100)
        recorded.add("train.py(12): log_loss", begin + 1, begin + 20, "python_function")
        recorded.add("torch/_tensor.py(9): item", begin + 1, begin + 19, "python_function")
        recorded.add("aten::item", begin + 2, begin + 12)
        recorded.add("aten::_local_scalar_dense", begin + 3, begin + 11)
        recorded.add("cudaMemcpyAsync", begin + 3, begin + 4, **runtime)
        recorded.add("cudaStreamSynchronize", begin + 4, begin + 10, **runtime)
        recorded.add("phalanx.profile:wait", begin + 90, begin + 99, "user_annotation")
        recorded.add("cudaDeviceSynchronize", begin + 91, begin + 98, **runtime)  # the recorder's own
        recorded.add("cudaEventSynchronize", begin + 50, begin + 60, tid=LOADER, **runtime)  # beside the loop
    recorded.add("phalanx.module:experts", 140, 149, "user_annotation")
    recorded.add("aten::nonzero", 141, 145)
    recorded.add("cudaStreamSynchronize", 142, 144, **runtime)
    recorded.add("autograd::engine::evaluate_function: IndexBackward0", 130, 140, tid=300)
    recorded.add("hipStreamSynchronize", 131, 133, tid=300, **runtime)
    recorded.add("cudaStreamSynchronize", 250, 260, **runtime)  # after the steps
    recorded.add("gemm", 0, 200, "kernel", STREAM)
    recorded.write(tmp_path)
    found = analyse(tmp_path)
    waits = {name: (round(each.seconds * 1e3, 6), each.calls) for name, each in found.timelines[0].host_waits.items()}
    assert waits == {
        "aten::item in train.py(12): log_loss": (12, 2),
        "aten::nonzero in experts": (2, 1),
        "hipStreamSynchronize": (2, 1),
    }
    shown = "\n".join(lines(found, None, tmp_path))
    assert "host waits for the device, rank 0, per step" in shown
    assert "aten::item in train.py(12): log_loss  6.000  1" in shown
    assert document(found, tmp_path)["host_waits"][0][0]["name"] == "aten::item in train.py(12): log_loss"


def test_a_step_without_host_waits_says_so(tmp_path):
    recorded = Recorded(0, device="cuda", world_size=1, ranks=[0], comm_backend="nccl")
    recorded.loop("step 10", 0, 100)
    recorded.add("aten::item", 5, 6)  # of a tensor on the CPU
    recorded.write(tmp_path)
    assert "host waits for the device, rank 0, per step: none" in lines(analyse(tmp_path), None, tmp_path)


def test_modules_are_charged_for_their_backward_pass_and_memory(tmp_path):
    recorded = Recorded(0, world_size=1, ranks=[0])
    recorded.loop("step 10", 0, 100)
    recorded.add("phalanx.module:Net", 0, 50, "user_annotation")
    recorded.add("phalanx.module:inner", 10, 30, "user_annotation")
    recorded.add("aten::linear", 10, 30, **{"Sequence number": 4})
    recorded.add("aten::addmm", 12, 28, **{"Sequence number": 4})
    recorded.add("aten::relu", 30, 40, **{"Sequence number": 5})
    recorded.add("autograd::engine::evaluate_function: AddmmBackward0", 60, 80, **{"Sequence number": 4})
    for ts, nbytes, address in ((15, 1000, 1), (35, 500, 2), (50, -1000, 1), (90, 200, 3)):
        args = {"Bytes": nbytes, "Addr": address}
        recorded.events.append({"ph": "i", "name": "[memory]", "pid": 1, "tid": MAIN, "ts": ts * 1e3, "args": args})
    recorded.write(tmp_path)
    found = analyse(tmp_path)
    usages = found.timelines[0].modules
    assert {name: round(usage.seconds * 1e3, 6) for name, usage in usages.items()} == {"inner": 40, "Net": 10}
    assert found.timelines[0].operations["aten::linear"].seconds == pytest.approx(0.004)
    assert found.timelines[0].memory == (1500, [("inner", 1000, 1), ("Net", 500, 1)])
    assert document(found, tmp_path)["memory"][0]["peak"] == 1500


def test_owners_of_a_cuda_history_are_lines_of_the_program():
    def entry(action: str, addr: int, size: int, *frames: str) -> dict:
        listed = [{"filename": name, "line": 8, "name": "forward"} for name in frames]
        return {"action": action, "addr": addr, "size": size, "frames": listed}

    found = top_owners(
        [
            entry("alloc", 1, 100, "??", "/site/torch/nn/functional.py", "/home/me/net.py"),
            entry("free_requested", 1, 100),
            entry("alloc", 2, 70),
            entry("free_completed", 1, 100),
            entry("free_completed", 9, 5),
        ]
    )
    assert found["peak"] == 170
    assert found["owners"] == [("/home/me/net.py:8 forward", 100, 1), ("backward pass (no Python line)", 70, 1)]
    assert owners_at_peak([]).peak == 0


def test_sets_of_time():
    spans = union([(3, 4), (0, 1), (0.5, 2), (5, 5)])
    assert spans == [(0, 2), (3, 4)]
    assert both(spans, [(1, 3.5)]) == [(1, 2), (3, 3.5)]
    assert clip(spans, 1, 3.5) == [(1, 2), (3, 3.5)]
    assert clip(spans, 2, 3) == []
    assert without([(0, 10)], spans) == [(2, 3), (4, 10)]
    assert total(without(spans, [(0, 10)])) == 0


def test_a_trace_is_read_in_parts_of_any_size(tmp_path, monkeypatch):
    two_ranks(tmp_path / "profile")
    whole = analyse(tmp_path / "profile").path_seconds
    monkeypatch.setattr(read, "_CHUNK", 17)
    assert analyse(tmp_path / "profile").path_seconds == whole


def test_damaged_and_foreign_traces_are_named(tmp_path):
    folder = two_ranks(tmp_path / "profile")
    path = folder / "rank-1.json.gz"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UsageError, match=r"rank-1\.json\.gz is damaged"):
        analyse(folder)
    path.write_bytes(gzip.compress(gzip.decompress(content)[:-200]))
    with pytest.raises(UsageError, match="is damaged: it ends within an event"):
        analyse(folder)
    path.write_bytes(b"not a trace")
    with pytest.raises(UsageError, match="is damaged"):
        analyse(folder)
    Recorded(1).write(folder, schemaVersion=2)
    with pytest.raises(UsageError, match=r"not a trace that this version reads \(torch 2\.13\.0, schema 2\)"):
        analyse(folder)
    path.write_bytes(gzip.compress(b'{"schemaVersion": 1, "traceEvents": []}'))
    with pytest.raises(UsageError, match="not a trace that this version reads"):
        analyse(folder)
    path.unlink()
    found = analyse(folder)
    assert found.missing == [1]
    assert "not found: the traces of ranks 1" in "\n".join(lines(found, None, folder))


def test_the_command_says_why_there_is_no_profile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    record = {"command": ["phalanx"], "settings": {}, "started": 1.0, "host": "elsewhere", "pid": 1, "directory": "."}
    (run / "events.jsonl").write_text('{"event":"run_started","time":1.0,"rank":0,"first_step":0}\n')
    answer = phalanx("report", "run", "--profile")
    assert answer.code == 2
    assert "run was not profiled" in answer.err
    assert "phalanx train ... --profile steps=10:15" in answer.err
    (run / "run.json").write_text(json.dumps({**record, "settings": {"profile": "steps=90:95"}, "outcome": "finished"}))
    answer = phalanx("report", "run", "--profile")
    assert "was to record a profile (steps=90:95), but ended before it was complete" in answer.err, answer.err


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (True, Profiling(3, 5)),
        ("steps=10:15 ranks=0,3", Profiling(10, 15, (0, 3))),
        ("steps=10 memory", Profiling(10, 10, memory=True)),
        ("nvtx", Profiling(0, 0, nvtx=True)),
        ("nvtx ranks=all", Profiling(3, 5, nvtx=True)),
        (False, None),
    ],
)
def test_words_of_the_setting(text, wanted):
    assert parse_profile(text) == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step=3", "Did you mean steps"),
        ("steps=5:3", "not a range of steps"),
        ("steps=0:3", "not a range of steps"),
        ("ranks=x", "not a list of ranks"),
        ("memory=1", "memory takes no value"),
        ("steps", "steps needs a value"),
        ("10:15", "written steps=10:15"),
        ("steps=1 steps=2", "given twice"),
    ],
)
def test_wrong_words_say_what_to_write(text, said):
    with pytest.raises(ValueError, match=said):
        parse_profile(text)


def test_traces_of_machines_that_share_no_folder_are_sent_to_rank_0(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from phalanx.tools.profile import collect

    monkeypatch.setattr(collect, "_CHUNK", 100)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [store, *(dist.TCPStore("127.0.0.1", store.port, is_master=False) for _ in range(2))]
    exchanges = []
    for rank in range(3):
        env = SimpleNamespace(on_one_node=False)
        world = SimpleNamespace(rank=rank, world_size=3, is_main=rank == 0, store=stores[rank], env=env)
        folder = tmp_path / ("here" if rank != 2 else "elsewhere") / "profile"
        exchanges.append(collect.TraceExchange(Profiling(3, 5), world, folder))
        folder.parent.mkdir(exist_ok=True)
        Recorded(rank).write(folder)
    threads = [threading.Thread(target=each.collect) for each in exchanges]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=LIMIT_SECONDS)
    here, elsewhere = (tmp_path / name / "profile/rank-2.json.gz" for name in ("here", "elsewhere"))
    assert here.read_bytes() == elsewhere.read_bytes()
    assert [file.rank for file in read.find_files(here.parent)] == [0, 1, 2]


def test_ranges_of_phases_end_where_the_next_begins():
    from contextlib import contextmanager

    from phalanx.observe.step_clock import StepClock
    from phalanx.tools.profile.record import PhaseRanges, under_nsys

    seen = []

    @contextmanager
    def push_and_pop(name: str):
        seen.append(f"+{name}")
        yield
        seen.append(f"-{name}")

    ranges, phases = PhaseRanges(push_and_pop), StepClock()
    phases.on_enter = ranges.enter
    phases.enter("data")
    phases.enter("forward")
    with phases.paused("checkpoint"):
        pass
    ranges.leave()
    assert seen == ["+data", "-data", "+forward", "-forward", "+checkpoint", "-checkpoint", "+forward", "-forward"]
    assert under_nsys({"NSYS_PROFILING_SESSION_ID": "1"})
    assert not under_nsys({})
