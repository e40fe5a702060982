"""`phalanx doctor` on recordings: a healthy machine, broken ones, clouds, several hosts; and on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from command import ROOT, phalanx

from phalanx.cli.doctor import examine
from phalanx.errors import UsageError
from phalanx.host.versions import NEWEST_TORCH
from phalanx.tools.doctor.gpus import check_log, read_log, topology
from phalanx.tools.doctor.hosts import compare_hosts
from phalanx.tools.doctor.network import check_links
from phalanx.tools.doctor.reader import HostReader, worst

DATA = ROOT / "tests" / "recorded" / "doctor"


def recorded(name: str, **changes) -> HostReader:
    answers = json.loads((DATA / f"{name}.json").read_text())
    return HostReader({**answers, **{key.replace("__", " "): value for key, value in changes.items()}})


def said(machine: HostReader, level: str) -> str:
    return "\n".join(f"{each.topic}: {each.text} -> {each.fix}" for each in examine(machine) if each.level == level)


def test_a_healthy_machine_has_no_warnings_and_its_parts_are_named():
    machine = recorded("dgx-h100")
    assert worst(examine(machine)) == "note"
    ok = said(machine, "ok")
    for part in (
        "8 x NVIDIA H100 80GB HBM3",
        "all 8 GPUs are linked (NV18",
        "mlx5_7: 400 Gb/sec",
        "the kernel module for RDMA",
        "amx_bf16",
    ):
        assert part in ok
    assert "NCCL would choose RDMA (mlx5_0" in ok


@pytest.mark.parametrize(
    ("level", "part"),
    [
        ("error", "torch: torch 2.11.0 (CUDA 12.8) needs driver 525 or later, there is 520.61.05"),
        ("error", "GPU 3 has 2 uncorrected memory errors"),
        ("error", "the fabric manager does not run: CUDA fails with error 802 -> systemctl enable --now"),
        ("error", "NCCL_SOCKET_IFNAME=eth7, and there is no card eth7: NCCL fails at its start -> export NCCL"),
        ("error", "mlx5_2 is not active"),
        ("error", "NCCL_IB_DISABLE=1 while RDMA devices are active"),
        ("error", "/dev/shm: 67 MB is too small"),
        ("error", "66 kB of memory may be locked"),
        ("warning", "GPU 5 uses 8 of 16 PCIe lanes"),
        ("warning", "GPU 6 is at 88 C"),
        ("warning", "different rates (100 Gb/sec (4X EDR), 400 Gb/sec (4X NDR))"),
        ("warning", "data stop in host memory on their way -> modprobe nvidia-peermem"),
        ("warning", "port 29500 has a listener"),
        ("warning", "libraries see 192: they start too many threads -> export OMP_NUM_THREADS=8"),
        ("warning", "1024 open files"),
        ("note", "persistence mode is off"),
        ("note", "the own name dgx-broken leads to 127.0.1.1"),
    ],
)  # fmt: skip
def test_each_fault_of_a_broken_machine_is_found_with_what_mends_it(level, part):
    assert part in said(recorded("dgx-broken"), level)


def test_clouds_and_boxes_have_findings_of_their_own():
    assert "variables for EFA are not set -> phalanx train --nccl-env aws-efa" in said(recorded("p5-efa"), "note")
    without = recorded("p5-efa", **{"folder__/opt/amazon/ofi-nccl": []})
    assert "EFA cards without the aws-ofi-nccl plugin" in said(without, "error")
    assert "(CPU only): the GPUs are not used" in said(recorded("a3-gcp"), "error")
    assert "gVNIC limits each TCP flow" in said(recorded("a3-gcp"), "note")
    pairs = said(recorded("a6000-pairs"), "warning")
    assert "2 by NV4 (NV4), 4 by the link between CPUs (SYS)" in pairs
    assert "1 pair of GPUs without peer access" in pairs
    assert "CUDA_VISIBLE_DEVICES='0,1': 2 of 4" in said(recorded("a6000-pairs"), "note")


@pytest.mark.parametrize(("visible", "count"), [("-1", 0), ("", 0), ("9", 0), ("0,1,-1,2", 2)])
def test_visible_devices_are_counted_as_cuda_does(visible, count):
    machine = recorded("dgx-h100", fact__environment={"CUDA_VISIBLE_DEVICES": visible})
    level = "note" if count else "error"
    assert f"CUDA_VISIBLE_DEVICES={visible!r}: {count} of 8" in said(machine, level)


def test_a_listener_on_an_address_of_ipv6_is_found():
    line = f"  0: {'0' * 32}:733C {'0' * 32}:0000 0A 00000000:00000000"  # 29500
    machine = recorded("dgx-h100", **{"file__/proc/net/tcp6": f"  sl  local_address\n{line}"})
    assert "port 29500 has a listener" in said(machine, "warning")


def test_a_recording_of_a_real_gpu_machine():
    machine = recorded("h200")
    assert worst(examine(machine)) == "note"
    assert "torch 2.11.0 (CUDA 13.0) fits driver 580.159.04" in said(machine, "ok")


def test_a_cpu_without_bf16_is_a_warning_where_there_are_no_gpus():
    slow = {"file__/proc/cpuinfo": "Features\t: fp asimd", "folder__/proc/driver/nvidia/gpus": []}
    assert "60 times slower" in said(recorded("dgx-h100", **slow), "warning")
    assert "60 times slower" not in said(recorded("dgx-h100"), "warning")


def test_a_torch_newer_than_the_newest_tested_is_named():
    versions = {**recorded("dgx-h100").fact("versions"), "torch": "2.99.1"}
    words = said(recorded("dgx-h100", fact__versions=versions), "note")
    assert f"torch 2.99.1 is newer than {NEWEST_TORCH}, the newest that Phalanx was tested with" in words
    assert "the newest that" not in said(recorded("dgx-h100"), "note")


def test_doctor_and_a_failure_name_a_torch_that_was_not_tested(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)
    for module in ("phalanx.host.versions", "phalanx.tools.doctor.host"):
        monkeypatch.setattr(f"{module}.NEWEST_TORCH", "2.0")
    note = f"orch {torch.__version__} is newer than 2.0, the newest that Phalanx was tested with"
    shown = phalanx("doctor").out
    assert re.search(rf"note +torch +t{re.escape(note)}\n +-> if a run fails with it: pip install 'torch==2.0", shown)

    Path("train.py").write_text("from phalanx import Formation\nFormation()\nraise ValueError('of the user')\n")
    answer = phalanx("train", "--script", "train.py", "--num-workers", 2)
    assert answer.code == 1
    assert answer.err.count(note) == 1
    assert "raised ValueError: of the user" in answer.err


def test_the_topology_is_read_as_nvidia_smi_prints_it():
    text = (DATA / "a6000-pairs.json").read_text()
    pairs = topology(json.loads(text)["command nvidia-smi topo -m"])
    assert pairs == {(0, 1): "NV4", (0, 2): "SYS", (0, 3): "SYS", (1, 2): "SYS", (1, 3): "SYS", (2, 3): "NV4"}
    assert topology("no such command") == {}


def test_hosts_that_differ_are_named():
    usual = recorded("dgx-h100")
    versions = {**usual.fact("versions"), "torch": "2.12.0", "kernel": "6.1"}
    odd = recorded("dgx-h100", fact__versions=versions, clock__offset=-7.5, fact__architecture="aarch64")
    results = list(compare_hosts({"a": usual, "b": recorded("dgx-h100"), "c": odd}))
    text = "\n".join(f"{each.level} {each.text}" for each in results)
    assert "error torch differs: c has 2.12.0; the others 2.11.0" in text
    assert "note kernel differs" in text
    assert "error architecture differs: c has aarch64" in text
    assert "warning clocks differ from this machine's: c by -7.5 s" in text
    assert list(compare_hosts({"a": usual})) == []


@pytest.mark.parametrize(("printed", "ok"), [("welcome\n{}", True), ("5", False), ('{"a": 1}', False), ("", False)])
def test_an_answer_of_a_host_may_follow_what_its_shell_prints(tmp_path, printed, ok):
    answer = printed.replace("{}", (DATA / "dgx-h100.json").read_text().replace("\n", " "))
    (tmp_path / "answer").write_text(answer)
    shell = tmp_path / "ssh"
    shell.write_text(f"#!/bin/sh\ncat {tmp_path}/answer\n")
    shell.chmod(0o755)
    out = phalanx("doctor", "--hosts", "node1", "--ssh", shell).out
    assert ("8 x NVIDIA H100" in out) == ok
    assert ("its answer is not a recording" in out) != ok


def test_slow_links_are_named_against_the_card_and_the_other_links():
    machine = HostReader(json.loads((DATA / "dgx-h100.json").read_text()))
    names = ["a", "b", "c"]
    rates = [[0.0, 2.0, 2.1], [2.0, 0.0, 0.1], [2.1, 0.1, 0.0]]
    done = subprocess.CompletedProcess([], 0, json.dumps({"bandwidth_gbs": rates}), "")
    found = list(check_links(dict.fromkeys(names, machine), lambda: [done]))
    assert [each.text for each in found] == [
        "b - c: 0.1 GB/s by TCP; 2 GB/s are expected",
        "0.1 to 2.1 GB/s by TCP between 3 hosts, one stream per pair",
    ]
    (alone,) = check_links({"a": machine, "b": machine}, lambda: [subprocess.CompletedProcess([], 1, "", "x\nrefused")])
    assert (alone.level, alone.text) == ("error", "the links were not measured: refused")
    with pytest.raises(UsageError, match="33 hosts are too many"):
        list(check_links({str(number): machine for number in range(33)}, list))


def test_links_of_a_job_are_named_rightly_where_a_node_does_not_answer(tmp_path, monkeypatch):
    recorded = json.loads((DATA / "dgx-h100.json").read_text())
    for number, name in ((0, "n1"), (2, "n3")):
        (tmp_path / f"{number}.json").write_text(f"{number}: {json.dumps({**recorded, 'fact hostname': name})}\n")
    rates = [[0.0, 1.5], [1.5, 0.0]]
    (tmp_path / "rates.json").write_text(json.dumps({"bandwidth_gbs": rates}))
    scripts = {
        "scontrol": "echo n1; echo n2; echo n3",
        "srun": f"""cd {tmp_path}
            case "$*" in
            *--record*) cat 0.json 2.json; echo "n2 is down" >&2;;
            *--nodes=2*--nodelist=n1,n3*) cat rates.json;;
            esac""",
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    out = phalanx("doctor", "--measure").out
    assert "n2 is down" in out
    assert "1.5 GB/s by TCP between 2 hosts" in out


def test_links_are_not_measured_where_no_host_answers():
    found = phalanx("doctor", "--hosts", "a,b", "--ssh", "false", "--measure")
    assert (found.code, found.out.count("it could not be checked")) == (1, 2), found.err
    assert "no link was measured: that needs two hosts" in found.out


def test_this_machine_is_recorded_and_replayed_alike(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_FAKE_TOKEN", "hidden")
    path = tmp_path / "here.json"
    assert phalanx("doctor", "--record", path).code == 0
    assert "hidden" not in path.read_text()
    answer = phalanx("doctor", "--replay", path, "--json")
    assert answer.code in (0, 1)
    (results,) = json.loads(answer.out).values()
    assert {"GPUs", "CPU", "cores", "memory"} <= {each["topic"] for each in results}
    assert "errors," in phalanx("doctor", "--problems").out or "error," in phalanx("doctor", "--problems").out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--replay", "missing.json"), "missing.json cannot be read"),
        (("--replay", "other.json"), "other.json is not a recording of a machine"),
        (("--hosts", ","), "names no host"),
        (("--hosts", "a,a"), "a host is named twice"),
        (("--hosts", "a", "--ssh", "'x"), "is not a command: No closing quotation"),
        (("--replay", "other.json", "--measure"), "--measure needs the machine itself"),
    ],
)
def test_bad_input_is_answered(tmp_path, monkeypatch, words, error):
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text("{}")
    answer = phalanx("doctor", *words)
    assert answer.code == 2
    assert error in answer.err


SHARED = """\
vm:10:10 [0] NCCL INFO NCCL version 2.28.9+cuda13.0
vm:10:10 [0] NCCL INFO NCCL_HOSTID set by environment to vm-0
vm:10:10 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
vm:10:10 [0] NCCL INFO NET/Socket : Using [0]lo:127.0.0.1<0>
vm:10:44 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
vm:10:44 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
"""


@pytest.mark.parametrize(
    ("log", "shared", "level", "words"),
    [
        (SHARED, True, "ok", "2.28.9, NET/Socket/0: each rank has its own host id, as with --share-gpus, so that they "
         "talk by TCP over lo"),
        (SHARED, False, "note", "2.28.9, NET/Socket/0: TCP over lo, as NCCL_IB_DISABLE is set"),
        ("NCCL version 2.26\nChannel 00/1 : 0[0] -> 1[1] via P2P/CUMEM", False, "ok",
         "2.26, P2P/CUMEM: GPUs read and write each other's memory"),
        ("Channel 00 : 0[0] -> 1[1] via SHM/direct/direct", False, "warning",
         "SHM/direct/direct: through host memory: the GPUs have no peer access"),
        ("NCCL_P2P_DISABLE set by environment to 1.\nChannel 00 : 0[0] -> 1[1] via SHM/direct/direct", False, "warning",
         "through host memory, as NCCL_P2P_DISABLE is set"),
        ("Channel 00/0 : 0[3] -> 8[3] [send] via NET/IB/0/GDRDMA", False, "ok", "RDMA from GPU memory"),
        ("", False, "error", "no communicator was made"),
    ],
)  # fmt: skip
def test_the_transport_that_nccl_has_chosen_is_named_with_the_reason(tmp_path, log, shared, level, words):
    (tmp_path / "nccl.7.log").write_text(log)
    (found,) = check_log(read_log(tmp_path), shared=shared)
    assert (found.level, found.topic, words in found.text) == (level, "NCCL", True), found
