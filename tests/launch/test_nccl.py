"""NCCL's variables: each has a reason, the user's own stay, and the launcher passes them on."""

from __future__ import annotations

import json

import pytest

from phalanx.cli import main
from phalanx.launch.nccl import CLUSTERS, nccl_environment, nccl_variables


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_command_prints_what_a_shell_can_read(capsys, cluster):
    assert main(["doctor", "--nccl-env", cluster, "--interface", "ens7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(line.startswith(("export ", "# export ")) and "  # " in line for line in lines)
    assert any("NCCL_SOCKET_IFNAME=ens7" in line for line in lines)


def test_json_shows_what_is_set_already(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    assert main(["doctor", "--nccl-env", "ethernet", "--json"]) == 0
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert found["NCCL_IB_DISABLE"] | {"reason": ""} == {
        "name": "NCCL_IB_DISABLE",
        "value": "1",
        "reason": "",
        "advice": False,
        "set": "0",
    }


def test_sockets_on_ethernet_and_gpudirect_on_infiniband():
    ethernet = {variable.name: variable.value for variable in nccl_variables("ethernet")}
    infiniband = {variable.name: variable.value for variable in nccl_variables("infiniband")}
    assert ethernet["NCCL_IB_DISABLE"] == "1"
    assert int(ethernet["NCCL_SOCKET_NTHREADS"]) * int(ethernet["NCCL_NSOCKS_PERTHREAD"]) <= 64
    assert infiniband["NCCL_IB_DISABLE"] == "0"
    assert "NCCL_NET_GDR_LEVEL" in infiniband


def test_what_may_be_better_is_shown_and_not_set():
    gcp = [(v.value, v.advice) for v in nccl_variables("gcp") if v.name == "NCCL_NSOCKS_PERTHREAD"]
    assert gcp == [("2", False), ("4", True)]
    infiniband = nccl_environment("infiniband", {})
    assert infiniband["NCCL_NET_GDR_LEVEL"] == "2"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in infiniband
    assert ("CUDA_DEVICE_MAX_CONNECTIONS", "1") in {(v.name, v.value) for v in nccl_variables("infiniband")}


def test_what_the_user_set_stays():
    added = nccl_environment("ethernet", {"NCCL_SOCKET_NTHREADS": "9"})
    assert "NCCL_SOCKET_NTHREADS" not in added
    assert added["NCCL_IB_DISABLE"] == "1"
    assert nccl_environment(None, {}) == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [(["infinband"], "Did you mean 'infiniband'?"), ([], "--nccl-env needs a value")],
)
def test_an_unknown_cluster_is_refused(capsys, words, said):
    assert main(["doctor", "--nccl-env", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_launcher_applies_them_on_request(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("NCCL_IB_DISABLE", raising=False)
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "show.py"
    script.write_text("import os\nprint('told', os.environ.get('NCCL_IB_DISABLE'))\n")
    assert (
        main(["train", "--script", str(script), "--num-workers", "1", "--nccl-env", "ethernet", "--device", "cpu"]) == 0
    )
    assert "told 1" in capfd.readouterr().out
