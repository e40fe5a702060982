"""`phalanx bench compression`: a few steps over a slow link of either kind, the adviser, bad input."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from command import phalanx

from phalanx.tools.bench.compression import run as bench_run
from phalanx.tools.bench.compression.run import NAMESPACES, SLEEPING, read_link, smoothed, target_loss, time_to

SHORT = ("bench", "compression", "--recipes", "digits", "--steps", 8, "--compressors", "topk", "--links", "20Mb")
PROMISED = {"recipe", "compressor", "link", "emulation", "time_to_target_s", "target_loss", "sent_bytes", "plain_bytes"}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)


def checked_records(answer, emulation):
    assert answer.code == 0, answer.text
    assert emulation in answer.err
    plain, topk = json.loads(answer.out)
    assert plain.keys() >= PROMISED
    assert (plain["compressor"], topk["compressor"]) == ("none", "topk")
    assert {plain["emulation"], topk["emulation"]} == {emulation}
    assert plain["sent_bytes"] == plain["plain_bytes"] == topk["plain_bytes"]
    assert topk["sent_bytes"] < 0.021 * plain["sent_bytes"]
    # 397 kB a step and rank at 2.5 MB/s take 0.16 s; topk sends a fiftieth of that.
    assert plain["seconds"] > 8 * 0.14 > topk["seconds"]


def test_an_emulated_link_where_there_are_no_namespaces(monkeypatch):
    monkeypatch.setattr(bench_run, "open_hosts", lambda stack: ([], "not root"))
    answer = phalanx(*SHORT, "--json", "--plot", "out.svg")
    checked_records(answer, SLEEPING)
    assert "not root" in answer.err
    assert "digits  20Mb  topk" in answer.err
    assert ">20Mb</text>" in Path("out.svg").read_text()


def test_a_link_that_the_kernel_shapes():
    with ExitStack() as stack:
        if not bench_run.open_hosts(stack)[0]:
            pytest.skip("needs root, ip, tc and a kernel with namespaces and tbf")
    before = set(Path("/run/netns").glob("*"))
    checked_records(phalanx(*SHORT, "--json"), NAMESPACES)
    assert set(Path("/run/netns").glob("*")) <= before


def test_the_adviser_needs_no_training():
    answer = phalanx("bench", "compression", "--advise", "--recipes", "digits", "--compressors", "bf16,topk",
                     "--links", "1Mb,here", "--json")  # fmt: skip
    assert answer.code == 0, answer.text
    records = json.loads(answer.out)
    assert {(record["link"], record["name"]) for record in records} == {
        (link, name) for link in ("1Mb", "here") for name in ("none", "bf16", "topk")
    }
    # A link so slow that sending outweighs computing, however busy the machine is.
    slow = {record["name"]: record for record in records if record["link"] == "1Mb"}
    assert slow["none"]["send_s"] == pytest.approx(397e3 / 125e3, rel=0.02)
    assert slow["topk"]["verdict"] == slow["bf16"]["verdict"] == "pays"
    assert "digits: 397 kB of gradients" in answer.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--compressors", "tpok"], "unknown compressor 'tpok'. Did you mean 'topk'?"),
        (["--recipes", "gpt"], "unknown recipe 'gpt'"),
        (["--links", "fast"], "'fast' is not a link"),
        (["--links", "here"], "'here' is not a link"),
        (["--steps", "0"], "--steps is too small: 0"),
        (["--advise", "--ranks", "1"], "--ranks is too small: 1"),
        (["--compression-ratio", "2"], "compression_ratio = 2.0: a share of the gradient"),
        (["--stps", "2"], "Did you mean --steps?"),
    ],
)
def test_bad_input_is_reported_before_anything_starts(words, expected):
    answer = phalanx("bench", "compression", *words)
    assert answer.code == 2
    assert expected in answer.err


def test_an_unknown_bench_is_named():
    assert "Did you mean 'compression'?" in phalanx("bench", "compresion").err


@pytest.mark.parametrize(
    ("text", "rate"), [("100Mb", 12.5e6), ("1Gb", 125e6), ("2.5gb/s", 312.5e6), ("10Gbit", 1.25e9)]
)
def test_links_are_bits_per_second(text, rate):
    assert read_link(text) == rate


def test_a_target_is_reached_by_the_mean_of_some_steps():
    curve = [(float(step), 10.0 - step) for step in range(1, 11)]
    assert smoothed(curve)[-1] == pytest.approx(4.5)
    assert target_loss(curve) == pytest.approx(6.5)
    assert time_to(curve, 6.5) == 6.0
    assert time_to(curve, 1.0) is None
