"""`phalanx bench comm`: correct rows, JSON and plots, links, and mistakes reported before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from command import clean_environment, phalanx
from hypothesis import given
from hypothesis import strategies as st

from phalanx.tools.bench.comm.plan import ALGORITHMS_OF, bus_factor, element_count, parse_size, parse_sizes
from phalanx.tools.bench.comm.report import (
    BenchRow,
    ExpectedLink,
    link_table,
    network_links,
    parse_nvlink,
    parse_pcie,
    side_by_side,
)

pytestmark = pytest.mark.usefixtures("fork_server")
PROMISED = {"op", "algo", "ranks", "size_bytes", "dtype", "time_us", "algbw_gbs", "busbw_gbs", "wrong"}


def test_every_algorithm_side_by_side():
    algos = ",".join(ALGORITHMS_OF["all_reduce"])
    answer = phalanx("bench", "comm", "--algo", algos, "--sizes", "1000,64K", "--iters", 2, "--json")
    assert answer.code == 0, answer.text
    assert "nccl             left out: " in answer.err
    rows = json.loads(answer.out)
    assert {row["algo"] for row in rows} == set(ALGORITHMS_OF["all_reduce"]) - {"nccl"}
    for row in rows:
        assert row.keys() >= PROMISED
        assert (row["wrong"], row["ranks"], row["op"]) == (0, 2, "all_reduce")
        assert row["algbw_gbs"] == pytest.approx(row["size_bytes"] / row["time_us"] / 1e3)
        assert row["busbw_gbs"] == pytest.approx(row["algbw_gbs"])  # 2 (n-1)/n is 1 on two ranks
    assert answer.err.count("\n65536") == 1  # the line of the comparison


@pytest.mark.parametrize("op", [name for name in ALGORITHMS_OF if name != "all_reduce"])
def test_every_collective_is_correct(op):
    algos = ",".join(set(ALGORITHMS_OF[op]) - {"nccl"})
    answer = phalanx("bench", "comm", "--op", op, "--algo", algos, "--sizes", "4K", "--iters", 1, "--json")
    rows = json.loads(answer.out)
    assert [row["wrong"] for row in rows] == [0] * (len(ALGORITHMS_OF[op]) - 1)


OWN = """
import torch
import torch.distributed as dist
from phalanx.comm.collectives import ALGORITHMS

def by_torch(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return sum(parts)

def by_channel(tensor, channel, redop):
    ALGORITHMS["all_reduce"]["ring"](tensor, channel, redop)

def forgets(tensor):
    pass

size = 3
"""


def test_functions_of_the_user_are_measured_and_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_moves.py").write_text(OWN)
    algos = "own_moves:by_torch,own_moves:by_channel,own_moves:forgets"
    answer = phalanx("bench", "comm", "--algo", algos, "--sizes", "4K", "--iters", 1, "--json")
    assert answer.code == 1, answer.text
    wrong = {row["algo"]: row["wrong"] for row in json.loads(answer.out)}
    assert wrong == {"own_moves:by_torch": 0, "own_moves:by_channel": 0, "own_moves:forgets": 2 * 1024}
    for name, message in (("own_moves:by_torhc", "Did you mean 'by_torch'?"), ("own_move:x", "no module 'own_move'")):
        refused = phalanx("bench", "comm", "--algo", name)
        assert refused.code == 2
        assert message in refused.err
    assert "own_moves:size is an int" in phalanx("bench", "comm", "--algo", "own_moves:size", "--sizes", "4K").text


def test_wrong_elements_are_counted():
    """The check itself: what comes out must be compared with what should."""
    import torch

    from phalanx.tools.bench.comm import measure
    from phalanx.tools.bench.comm.measure import Case, sample
    from phalanx.tools.bench.comm.plan import BenchPlan

    class Alone:
        rank, size = 0, 2

    plan = BenchPlan(op="all_reduce", algos=(), sizes=())
    right = sample(0, 6, "float32") + sample(1, 6, "float32")
    assert measure._count_wrong(Case(lambda given: right), torch.empty(6), plan, 6, Alone()) == 0
    assert measure._count_wrong(Case(lambda given: given), torch.empty(6), plan, 6, Alone()) == 6
    assert measure._count_wrong(Case(lambda given: None), torch.empty(6), plan, 6, Alone()) == 6


def test_links_as_tables_and_heat_map(tmp_path):
    picture = tmp_path / "links.svg"
    answer = phalanx("bench", "comm", "--link-report", "--plot", picture, "--json")
    assert answer.code == 0, answer.text
    assert "latency, one way (us)" in answer.err
    assert "memory (loopback)" in answer.err
    assert picture.read_text().count("<rect") == 5, "a background, and two pairs in two maps"
    found = json.loads(answer.out)
    assert found["latency_us"][0][1] > 0
    assert found["bandwidth_gbs"][0][1] == found["bandwidth_gbs"][1][0] > 0


def test_rows_as_a_plot(tmp_path):
    picture = tmp_path / "rows.svg"
    assert phalanx("bench", "comm", "--algo", "gloo", "--sizes", "1K,4K", "--iters", 1, "--plot", picture).code == 0
    drawn = ElementTree.fromstring(picture.read_text())
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    assert picture.read_text().count("<title>gloo: ") == 4


def test_ranks_that_torchrun_started(tmp_path):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "phalanx.cli", "bench"]
    words += ["comm", "--algo", "ring", "--sizes", "1K", "--iters", "1", "--json"]
    done = subprocess.run(
        [sys.executable, *words],
        env=clean_environment(TMPDIR=str(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["algo"], row["ranks"], row["wrong"]) for row in rows] == [("ring", 2, 0)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--algo", "rign"), "Did you mean 'ring'?"),
        (("--op", "allreduce"), "Did you mean 'all_reduce'?"),
        (("--op", "broadcast", "--algo", "ring"), "broadcast has no algorithm 'ring'"),
        (("--sizes", "4Q"), "'4Q' is not a size"),
        (("--sizes", "1M:1K"), "not a range of sizes"),
        (("--sizes", "0"), "'0' is not a size"),
        (("--dtype", "float33"), "Did you mean 'float32'?"),
        (("--redop", "sun"), "Did you mean 'sum'?"),
        (("--redop", "mean", "--dtype", "int32"), "--redop mean of int32"),
        (("--iters", "0"), "--iters is 0"),
        (("--num-workers", "0"), "--num-workers is 0"),
        (("--ranks-per-host", "0"), "--ranks-per-host is 0"),
        (("--sise", "3"), "Did you mean --sizes?"),
        (("--plot", "picture"), "Write: --plot picture.svg"),
        (("--plot", "/no/such/folder/x.svg"), "there is no folder /no/such/folder"),
        (("--json", "-"), "--json takes no file"),
    ],
)
def test_mistakes_are_reported_before_anything_starts(words, expected):
    answer = phalanx("bench", "comm", *words)
    assert answer.code == 2
    assert expected in answer.err
    assert not answer.out


def test_an_unknown_subject():
    assert "Did you mean 'comm'?" in phalanx("bench", "com").err


def test_sizes():
    assert parse_size("64K") == parse_size("65536") == parse_size("64KiB") == parse_size("64kb")
    assert parse_sizes("1K:8K") == (1024, 2048, 4096, 8192)
    assert parse_sizes("1K:1M:32") == (1 << 10, 1 << 15, 1 << 20)
    assert parse_sizes("3,4K") == (3, 4096)


@given(st.sampled_from(list(ALGORITHMS_OF)), st.integers(1, 10000), st.integers(1, 9))
def test_counts_can_be_split(op, nbytes, ranks):
    count = element_count(op, nbytes, "float32", ranks)
    assert count >= 1
    if op not in ("all_reduce", "broadcast", "reduce"):
        assert count % ranks == 0


def test_bus_bandwidth_is_that_of_nccl_tests():
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == bus_factor("all_to_all", 4) == 0.75
    assert bus_factor("broadcast", 4) == bus_factor("reduce", 4) == 1
    row = BenchRow("all_reduce", "ring", 4, 4_000_000, 1_000_000, "float32", "sum", 1000.0, 0)
    assert (row.algbw_gbs, row.busbw_gbs) == (4.0, 6.0)
    assert side_by_side([row]) == ""


def test_expected_bandwidth(tmp_path):
    for name, state, speed in (
        ("eth0", "up", "10000"),
        ("eth1", "down", "1000"),
        ("lo", "unknown", ""),
        ("v", "up", "-1"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(state + "\n")
        (tmp_path / name / "speed").write_text(speed + "\n")
    links = network_links(tmp_path)
    assert [(link.name, link.expected_gbs) for link in links] == [("eth0", 1.25), ("v", None)]
    text = "GPU 0: H\n\t Link 0: 26.5 GB/s\n\t Link 1: 26.5 GB/s\nGPU 1: H\n\t Link 0: 26.5 GB/s\n"
    assert [(link.name, link.expected_gbs) for link in parse_nvlink(text)] == [
        ("GPU 0 NVLink", 53),
        ("GPU 1 NVLink", 26.5),
    ]
    assert parse_pcie("5, 16\n[N/A], 16\n")[0].expected_gbs == pytest.approx(63.0, abs=0.1)
    across = link_table(1.0, 5.0, one_host=False, links=[ExpectedLink("eth0", 1.25, "sysfs")])
    assert "80%" in across
    assert "memory" not in across


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--share-gpus"], "--share-gpus, but no GPU was found"),
        (["--device", "cuda"], "--device cuda, but no GPU was found"),
        (["--device", "cudo"], "'cudo'"),
    ],
)
def test_gpus_that_are_not_there_are_refused_with_the_way_without_them(monkeypatch, flags, words):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    answer = phalanx("bench", "comm", *flags)
    assert (answer.code, words in answer.err) == (2, True), answer.text
