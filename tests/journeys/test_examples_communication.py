"""The examples of 04-nccl-operations run as their first lines say, and show what they promise."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from pathlib import Path

import programs
import pytest
from ranks import RecordingConsole

from phalanx.launch import LaunchSpec, ScriptTarget, launch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "04-nccl-operations"
COLLECTIVES, MESSAGES, BANDWIDTH = (
    FOLDER / name for name in ("collective_ops.py", "point_to_point.py", "bandwidth_test.py")
)


@pytest.fixture
def start(tmp_path, monkeypatch, fork_server):
    """Run an example on warm ranks of the CPU, in a folder of its own; return how it ended and what it showed."""
    monkeypatch.chdir(tmp_path)

    def run(path, *args, ranks=2):
        console = RecordingConsole()
        target, env = ScriptTarget(path, args), {"PHALANX_DEVICE": "cpu"}
        spec = LaunchSpec(target=target, ranks_per_node=ranks, log_dir=tmp_path / "logs", env=env, threads_per_rank=1)
        return launch(spec, console).failure, console.text

    return run


@pytest.fixture
def show(start):
    """Run an example that must succeed, and return what it showed."""

    def run(path, *args, ranks=2):
        failure, text = start(path, *args, ranks=ranks)
        assert failure is None, failure
        return text

    return run


def picture(text, title):
    """Return what each rank shows under a title, by rank."""
    block = text.split(f"\n{title}", 1)[1].split("\n\n", 1)[0]
    return re.findall(r"^  rank \d+  (.*)$", block, flags=re.MULTILINE)


def after(text, title):
    return [re.search(r"->  (.*?) +sent", line)[1] for line in picture(text, title)]


def test_every_collective_is_drawn_and_agrees(show):
    text = show(COLLECTIVES)
    assert text.startswith("2 ranks on gloo, tensors on cpu; shared memory too")
    titles = re.findall(r"^(\w+(?: \w+)?)   \((torch = ours.*?);", text, flags=re.MULTILINE)
    reductions = [f"all_reduce {op}" for op in ("sum", "mean", "min", "max", "prod")]
    others = ["broadcast", "reduce", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all", "barrier"]
    assert [title for title, _ in titles] == [*reductions, *others]
    assert {title for title, ways in titles if "shared memory" not in ways} == {"reduce", "gather", "scatter"}
    assert after(text, "all_reduce sum") == ["30 32 34 36"] * 2
    assert after(text, "all_reduce mean") == ["15 16 17 18"] * 2
    assert after(text, "all_reduce prod") == ["200 231 264 299"] * 2
    assert after(text, "broadcast") == ["10 11"] * 2
    assert after(text, "reduce ") == ["30 32", "-"]
    assert after(text, "reduce_scatter") == ["30 32", "34 36"]
    assert after(text, "scatter") == ["10 11", "12 13"]
    assert after(text, "all_to_all") == ["10 11 20 21", "12 13 22 23"]
    assert after(text, "barrier") == ["2", "2"]


def test_bytes_are_those_of_theory_on_three_ranks(show):
    text = show(COLLECTIVES, "--only", "all_reduce", "broadcast", "gather", ranks=3)
    sent = re.findall(r"sent (\d+) B, theory (\d+) B", text)
    assert all(bytes_sent == theory for bytes_sent, theory in sent)
    # 6 floats are 24 bytes, and 2 (n-1)/n of them 32; broadcast: the root to two children; gather: all but the root.
    assert [int(bytes_sent) for bytes_sent, _ in sent] == [32] * 15 + [16, 0, 0] + [0, 8, 8]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ours": [1.0, 9.0]}, "ours has 1 9, torch has 1 2"),
        ({"ours": None}, "ours has -, torch has 1 2"),
        ({"shared": [3.0, 2.0]}, "shared has 3 2, torch has 1 2"),
        ({"sent": 7}, "sent 7 bytes, theory says 8"),
    ],
)
def test_a_difference_is_not_drawn_but_raised(change, says):
    import torch

    example = runpy.run_path(str(COLLECTIVES))
    right = {"before": [0.0, 0.0], "torch": [1.0, 2.0], "ours": [1.0, 2.0], "shared": [1.0, 2.0]}
    numbers = {"sent": 8, "theory": 8, "formula": "", "title": "all_reduce"}
    given = {**right, **numbers, **change}
    for name in right:
        given[name] = None if given[name] is None else torch.tensor(given[name])
    with pytest.raises(AssertionError, match=says):
        example["check"](example["Outcome"](**given))


def test_messages_arrive_on_three_ranks_and_a_deadlock_is_shown(show):
    text = show(MESSAGES, "--microbatches", "3", "--show-deadlock", ranks=3)
    assert picture(text, "send, recv") == ["0", "1", "3"]
    assert [line.split(",")[0] for line in picture(text, "isend, irecv")] == [
        "sent 1 1 1 1",
        "got 1 1 1 1",
        "has no partner",
    ]
    for way in ("by turns", "batched", "isend first"):
        assert picture(text, f"ring, {way}") == ["2 2", "0 0", "1 1"]
    assert picture(text, "pipeline of 3") == ["0 1 2 . .", ". 0 1 2 .", ". . 0 1 2"]
    stuck = picture(text, "ring, all ranks send first")
    assert all(line.startswith("stuck: ") for line in stuck)
    assert any(line.startswith("stuck: Timed out") for line in stuck), "a later one may see a closed connection instead"


def test_messages_arrive_on_two_ranks(show):
    text = show(MESSAGES)
    assert picture(text, "ring, batched") == ["1 1", "0 0"]
    # 0 1 4 9 | 16 25 36 49, smoothed over three: the edges 9 and 16 crossed the border.
    assert [line.split()[0] for line in picture(text, "batch_isend_irecv")] == ["0.333333", "16.6667"]
    assert "all ranks send first" not in text


def test_bandwidth_is_measured_by_link_and_algorithm(show, tmp_path):
    text = show(BANDWIDTH, "--sizes", "1K:64K:64", "--rounds", "2", "--iters", "2", "--json", "rates.json", ranks=3)
    assert "links between 3 ranks, by gloo" in text
    assert re.search(r"^ +65536 +\d - \d +[\d.]+ +[\d.]+ +\d - \d +[\d.]+ +[\d.]+$", text, flags=re.MULTILINE)
    found = json.loads((tmp_path / "rates.json").read_text())
    pairs = [(row["size_bytes"], row["first"], row["second"]) for row in found["links"]]
    assert pairs == [(size, *pair) for size in (1024, 65536) for pair in ((0, 1), (0, 2), (1, 2))]
    for row in found["links"]:
        assert row["gbs"] == pytest.approx(row["size_bytes"] / row["time_us"] / 1e3)
    rows = {(row["algo"], row["size_bytes"]): row for row in found["collectives"]}
    assert set(rows) == {(algo, size) for algo in ("ring", "tree", "gloo", "shm") for size in (1024, 65536)}
    for row in rows.values():
        assert row["wrong"] == 0
        assert row["busbw_gbs"] == pytest.approx(row["algbw_gbs"] * 4 / 3)


def test_the_collective_and_its_algorithms_can_be_chosen(show):
    text = show(BANDWIDTH, "--op", "all_gather", "--algo", "ring", "--sizes", "4K", "--rounds", "1", "--iters", "1")
    assert re.findall(r"^(\w+) +4096 ", text, flags=re.MULTILINE) == ["ring"]
    assert "all_gather on 2 ranks" in text


@pytest.mark.parametrize(
    ("path", "args", "says"),
    [
        (BANDWIDTH, ("--op", "allreduce"), "Did you mean 'all_reduce'"),
        (BANDWIDTH, ("--sizes", "1X"), "'1X' is not a size"),
        (BANDWIDTH, ("--json", "nowhere/rates.json"), "there is no folder nowhere"),
        (MESSAGES, ("--microbatches", "0"), "--microbatches is 0"),
    ],
)
def test_bad_input_is_answered(start, path, args, says):
    failure, text = start(path, *args)
    assert failure is not None
    assert says in text + str(failure)


@pytest.mark.parametrize("path", [COLLECTIVES, MESSAGES, BANDWIDTH], ids=lambda path: path.name)
def test_one_rank_is_told_to_bring_another(path, tmp_path):
    env = {**os.environ, "PHALANX_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(path)]
    done = programs.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    assert "one rank has no peer" in done.stderr


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_each_example_opens_with_its_command_and_is_in_the_readme(path):
    head = "\n".join(path.read_text().splitlines()[:12])
    assert re.search(rf"^\s*phalanx train .*{re.escape(path.name)}", head, flags=re.MULTILINE)
    assert f"[`{path.name}`]({path.name})" in (FOLDER / "README.md").read_text()


def disagree():
    import torch
    import torch.distributed as dist

    from phalanx.comm.collectives import P2PChannel, all_reduce
    from phalanx.errors import CommunicationError

    try:
        all_reduce(torch.ones(4 if dist.get_rank() else 5), P2PChannel())
    except CommunicationError as error:
        return str(error)
    return "no error"


def test_the_guide_quotes_what_ranks_say_when_they_disagree(ranks):
    for said in ranks(disagree, world_size=2):
        assert said in (FOLDER / "nccl_debugging.md").read_text()


def test_the_guide_names_the_clusters_and_variables_of_nccl_env():
    from phalanx.launch.nccl import CLUSTERS

    guide = (FOLDER / "nccl_debugging.md").read_text()
    named = set(re.findall(r"phalanx doctor --nccl-env --cluster ([\w-]+)", guide))
    assert named
    assert named <= set(CLUSTERS)
    for variable in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"):
        assert variable in {known.name for known in CLUSTERS["ethernet"]}
        assert variable in guide


def test_every_benchmark_has_its_paragraph():
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for script in sorted((ROOT / "benchmarks").glob("*.py")):
        runs_alone = "argparse" in script.read_text()
        assert (f"## `{script.name}`" in page) == runs_alone, script.name
