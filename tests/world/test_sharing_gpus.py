"""Several ranks on one GPU: what is planned, what is refused, what each rank gets, and the mark on every figure."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import pytest
import torch
from command import phalanx

from phalanx.config import DistributedConfig
from phalanx.errors import ConfigError, UsageError
from phalanx.host import gpus
from phalanx.launch import LaunchSpec, ScriptTarget
from phalanx.launch.environment import NodeInfo, rank_environment
from phalanx.observe import events, format
from phalanx.run.auto_strategy import rank_bytes
from phalanx.run.spec import identity
from phalanx.tools.verify.proofs import _layout_name
from phalanx.world.env import read_rank_env
from phalanx.world.mesh import plan_layout
from phalanx.world.world import _pick_device

NOTE = "4 ranks per GPU: speed is not representative"


class OneGpu:
    """NVML's answers on a machine with one GPU; there is none where these tests run."""

    def __init__(self, memory: int) -> None:
        self.memory = memory

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.total = self.memory
        return 0

    def nvmlSystemGetDriverVersion(self, text, length):
        text.value = b"580.65.06"
        return 0

    def nvmlShutdown(self):
        return 0


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "_load_nvml", lambda: OneGpu(80 * 10**9))


def shared(ranks: int, gpus_here: int, **settings: object) -> int:
    return plan_layout(DistributedConfig(num_workers=ranks, share_gpus=True, **settings), gpus_here).ranks_per_gpu


def test_ranks_are_spread_first():
    assert [shared(4, count) for count in (1, 2, 3, 4, 8)] == [4, 2, 2, 1, 1]
    assert shared(8, 1, num_nodes=2, node_rank=0, rdzv_endpoint="node0:29400") == 4


def test_nodes_on_loopback_are_one_machine():
    places = ("127.0.0.1:29400", "localhost:1", "localhost", "[::1]:29400")
    assert {shared(4, 2, num_nodes=2, node_rank=0, rdzv_endpoint=place) for place in places} == {2}
    variables = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    here = read_rank_env(variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    assert (here.ranks_here, here.number_here) == (4, 3)
    away = replace(here, master_addr="10.0.0.1")
    assert (away.ranks_here, away.number_here) == (2, 1)


def test_gloo_shares_gpus_without_the_setting_and_its_figures_are_marked_too():
    config = DistributedConfig(num_workers=2, device="cuda", communication_backend="gloo")
    assert plan_layout(config, 1).ranks_per_gpu == 2


def test_without_a_gpu_the_cpu_way_is_shown():
    with pytest.raises(UsageError, match="no GPU was found") as caught:
        shared(8, 0)
    assert caught.value.hint.endswith("--num-workers 8 --device cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_ranks_of_torchrun_are_refused_too():
    """They are not planned: each looks for its GPU."""
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
    with pytest.raises(UsageError, match="no GPU was found") as caught:
        _pick_device(DistributedConfig(share_gpus=True), read_rank_env(variables | {"MASTER_PORT": "1"}))
    assert caught.value.hint.endswith("--num-workers 4 --device cpu")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "cpu"}, "leave share_gpus out: --device cpu is enough"),
        ({"communication_backend": "gloo"}, "gloo needs nothing"),
        ({"strategy": "deepspeed"}, "not tried"),
        ({"backend": "ray"}, "backend = 'pytorch-ddp' or 'pytorch-fsdp'"),
        ({"backend": "horovod"}, "backend = 'pytorch-ddp' or 'pytorch-fsdp'"),
        ({"backend": "tensorflow"}, "leave share_gpus out"),
    ],
)
def test_what_cannot_share_is_refused_by_name(settings, words):
    with pytest.raises(ConfigError, match="share_gpus = True") as caught:
        DistributedConfig(num_workers=4, share_gpus=True, **settings)
    assert words in str(caught.value)


def test_a_machine_with_too_few_gpus_is_told_of_the_setting():
    with pytest.raises(UsageError) as caught:
        plan_layout(DistributedConfig(num_gpus=4), 1)
    assert "--share-gpus" in caught.value.hint
    with pytest.raises(UsageError) as caught:
        plan_layout(DistributedConfig(num_gpus=4, backend="horovod"), 1)
    assert "--share-gpus" not in caught.value.hint, "it would be refused"


def test_more_ranks_than_memory_allows(one_gpu):
    assert shared(40, 1) == 40
    with pytest.raises(UsageError, match="41 ranks do not fit on a GPU with 80 GB") as caught:
        shared(41, 1)
    assert "at most 40 per GPU" in caught.value.hint


class TwoGpus(OneGpu):
    """A small card for the screen, and one to compute with."""

    SIZES = (4 * 10**9, 80 * 10**9)
    UUIDS = (b"GPU-small", b"GPU-large")

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        if uuid not in self.UUIDS:
            return 6
        return self.nvmlDeviceGetHandleByIndex_v2(self.UUIDS.index(uuid), handle)

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.total = self.SIZES[handle.value - 1]
        return 0


@pytest.mark.parametrize(
    ("visible", "gigabytes"),
    [(None, 4), ("1", 80), ("0", 4), ("1,0", 4), ("1,-1,0", 80), ("GPU-large", 80), ("GPU-la", 4), ("", 0)],
)
def test_the_memory_is_that_of_the_gpus_that_ranks_see(monkeypatch, visible, gigabytes):
    monkeypatch.setattr(gpus, "_load_nvml", lambda: TwoGpus(0))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.gpu_memory() == gigabytes * 10**9


def test_the_memory_is_divided(one_gpu):
    assert gpus.shared_memory(4, 80 * 10**9) == 19 * 10**9
    assert rank_bytes("cuda", 4) == 20 * 10**9
    assert rank_bytes("cuda", 1) == 80 * 10**9


def test_a_host_id_of_the_user_is_refused(monkeypatch):
    monkeypatch.setenv("NCCL_HOSTID", "mine")
    with pytest.raises(UsageError, match="it is set to 'mine'") as caught:
        shared(4, 1)
    assert caught.value.hint == "Run: unset NCCL_HOSTID"
    assert shared(4, 4) == 1, "no rank needs one"


def variables_of(tmp_path, rank: int, environ: dict[str, str], **settings: object) -> dict[str, str]:
    spec = LaunchSpec(target=ScriptTarget("train.py"), ranks_per_node=2, log_dir=tmp_path, **settings)
    return rank_environment(spec, NodeInfo(0, 1, 0, 2, "127.0.0.1", 1), rank, 0, environ)


def test_each_process_is_a_host_of_its_own_for_nccl(tmp_path):
    first, second = (variables_of(tmp_path, rank, {}, ranks_per_gpu=2) for rank in range(2))
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
    assert f"-{os.getpid()}.1" in second["NCCL_HOSTID"], "it differs between the launchers of one host, too"
    assert (first["NCCL_IB_DISABLE"], first["NCCL_SOCKET_IFNAME"]) == ("1", "lo")
    assert variables_of(tmp_path, 0, {"NCCL_IB_DISABLE": "0"}, ranks_per_gpu=2)["NCCL_IB_DISABLE"] == "0"
    assert "NCCL_HOSTID" not in variables_of(tmp_path, 0, {}), "each rank has its own GPU"


def test_machines_with_other_drivers_do_not_meet(one_gpu):
    config = DistributedConfig(num_workers=4, share_gpus=True)
    assert identity(config, ScriptTarget("none.py"))["NVIDIA driver"] == "580.65.06"
    assert "NVIDIA driver" not in identity(config.replace(share_gpus=False), ScriptTarget("none.py"))


def test_a_dry_run_says_it(one_gpu):
    words = ("train", "digits", "--num-workers", "4", "--share-gpus", "--dry-run")
    assert f"4 ranks on cuda (mesh: dp_replicate 4); {NOTE}" in phalanx(*words).out
    assert json.loads(phalanx(*words, "--json").out)["ranks_per_gpu"] == 4


def test_a_verdict_says_it(one_gpu):
    config = DistributedConfig(num_workers=4, share_gpus=True, strategy="fsdp")
    assert _layout_name(config, plan_layout(config, 1)) == "fsdp, 4 ranks on cuda, 4 on each GPU"


def started(ranks_per_gpu: int) -> events.RunStarted:
    sizes = {"parameters": 10, "batch_size": 2, "accumulation": 1, "global_batch": 8}
    layout = f"ddp ({format.speed_note(ranks_per_gpu)})"
    return events.RunStarted(
        "r", "runs/r", 4, "cuda", "ddp", "fp32", **sizes, layout=layout, ranks_per_gpu=ranks_per_gpu
    )


def test_every_figure_of_the_console_is_marked():
    run, end = started(4), events.RunEnded("finished", 10, 5.0, 100.0)
    assert NOTE in format.start_line(run)
    assert ("", NOTE) in format.summary_rows(end, run)
    assert not any(NOTE in value for _, value in format.summary_rows(end, replace(run, ranks_per_gpu=1, layout="ddp")))
    step = events.StepDone(1, 1, 0.5, 1e-3, samples_per_second=10.0)
    assert "10 samples/s (shared GPU)" in format.step_line(step, run)
    assert "10 samples/s (" not in format.step_line(step, replace(run, ranks_per_gpu=1))


def test_every_verb_about_the_run_marks_its_figures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "r"
    (folder / "logs").mkdir(parents=True)
    now = time.time()
    told = [
        replace(started(4), time=now),
        events.Goodput(10, 0, {"productive": 1.0}, now, samples=80, time=now + 1),
        events.RanksReported(5, [0], {"samples_per_second": [8.0]}, {}, time=now + 1),
        events.RunEnded("finished", 10, 5.0, 100.0, time=now + 2),
    ]
    (folder / "events.jsonl").write_text("".join(f"{event.to_json()}\n" for event in told))
    for words in (("runs", "show", "r"), ("report", "r"), ("top", "r", "--once")):
        assert NOTE in (answer := phalanx(*words)).out, (words, answer.text)
    for words in (("report", "r"), ("top", "r")):
        assert json.loads(phalanx(*words, "--json").out)["ranks_per_gpu"] == 4
    assert phalanx("ui", "r", "--save", "page.html").code == 0
    assert NOTE in (tmp_path / "page.html").read_text()


def test_a_cluster_that_asks_for_a_gpu_per_rank_has_nothing_to_share(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("digits", "--num-gpus", "4", "--share-gpus", "--job-name", "j", "--render")
    answer = phalanx("submit", "slurm", *words)
    assert answer.code == 2
    assert "a job of slurm asks for a GPU per rank" in answer.err
    answer = phalanx("submit", "ssh", *words, "--hosts", "a:4")
    assert "--share-gpus" in answer.out, answer.text


def test_bench_comm_without_a_gpu():
    answer = phalanx("bench", "comm", "--share-gpus")
    assert answer.code == 2
    assert "no GPU was found" in answer.err
