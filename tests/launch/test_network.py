"""Who may reach a run: listeners on loopback, half a request to the store, values that no rank has signed."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist
from command import write_script
from test_starters import run_together, srun_environments

from phalanx.errors import CommunicationError
from phalanx.host.job_secret import VARIABLE
from phalanx.host.signed_store import sign_store
from phalanx.launch.membership import Heartbeats

HALF_A_REQUEST = """
import os, socket
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    held = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    held.sendall(bytes([0]))
dist.barrier()
store = dist.distributed_c10d._get_default_store()
for number in range(20):
    store.set(f"key{number}/{dist.get_rank()}", "value")
    store.get(f"key{number}/{1 - dist.get_rank()}")
print("answered")
"""


def test_half_a_request_from_any_process_does_not_stop_the_store(launch_script):
    run = launch_script(HALF_A_REQUEST, ranks_per_node=2)
    assert run.result.failure is None, run.report
    assert run.console.text == "answered"


LISTENERS = """
import psutil
from phalanx import Formation
with Formation(device="cpu") as formation:
    here = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    formation.print("listens at", *sorted(here))
"""


def test_ranks_of_one_machine_listen_on_loopback_only(launch_script, tmp_path):
    run = launch_script(LISTENERS, ranks_per_node=2)
    assert run.console.text == "listens at 127.0.0.1"
    command = [sys.executable, str(write_script(tmp_path / "listen.py", LISTENERS))]
    answers = run_together([command, command], tmp_path, srun_environments())
    assert "listens at 127.0.0.1\n" in "".join(answers)  # rank 0 hosts the store there


def test_the_launcher_gives_ranks_a_secret_and_a_card(launch_script):
    source = "import os\nprint(len(os.environ['PHALANX_JOB_SECRET']), os.environ['GLOO_SOCKET_IFNAME'])"
    assert launch_script(source, ranks_per_node=1).console.text == "64 lo"


def test_a_value_that_no_rank_has_signed_is_refused():
    inner = dist.HashStore()
    store, twin = (sign_store(inner, {VARIABLE: "secret"}) for _ in range(2))
    store.set("place", "here")
    assert twin.get("place") == b"here"
    assert twin.compare_set("wish", "", "stop") == b"stop"
    assert store.compare_set("wish", "", "go on") == b"stop"
    inner.set("place", "elsewhere")
    with pytest.raises(CommunicationError, match="'place' that no rank of this job has signed"):
        twin.get("place")
    inner.set("other", inner.get("wish"))  # a signed value under another key
    with pytest.raises(CommunicationError, match="'other'"):
        store.get("other")
    assert sign_store(inner, {}) is inner


def test_a_node_without_a_changed_counter_falls_silent():
    beats = Heartbeats()
    beats.watch(["1", "2"], 0.0)
    beats.take({"1": 1, "2": 1}, 0.0)
    beats.watch(["1", "2", "3"], 4.0)
    beats.take({"1": 2, "2": 1, "3": 1, "4": 1}, 4.0)
    assert beats.silent(5.0, 4.0) == []
    beats.take({"1": 3, "2": 1, "3": 2}, 6.0)
    assert beats.silent(5.0, 6.0) == ["2"]
