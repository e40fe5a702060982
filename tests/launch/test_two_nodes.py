"""Two nodes on one machine: two supervisors join at an endpoint, share failures and restarts, leave together."""

from __future__ import annotations

import pytest
from ranks import free_endpoint, run_nodes, run_script

from phalanx.errors import UsageError
from phalanx.launch import watches

SUM = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"], dist.get_rank(), int(total))
"""


def test_numbered_nodes_of_different_size_form_one_group(tmp_path, fork_server):
    first, second = run_nodes(tmp_path, SUM, env={"PHALANX_JOB_SECRET": "of both nodes"})
    assert first.result.failure is None, first.report
    assert sorted(line for _, line in first.console.lines) == ["0 0 0 3", "0 1 1 3"]
    assert [line for _, line in second.console.lines] == ["1 0 2 3"]


def test_unnumbered_nodes_number_themselves(tmp_path, fork_server):
    runs = run_nodes(tmp_path, SUM, node_ranks=(None, None), sizes=(1, 1))
    assert sorted(run.console.text for run in runs) == ["0 0 0 2", "1 0 1 2"]


def test_a_failure_is_known_on_every_node(tmp_path, fork_server):
    source = SUM + "if dist.get_rank() == 2:\n    raise ValueError('only here')\ndist.barrier()\n"
    first, second = run_nodes(tmp_path, source)
    for run in (first, second):
        assert run.result.exit_code == 1
        assert run.report.startswith("rank 2 on ")
        assert "raised ValueError: only here" in run.report
        assert "2 other ranks stopped because of it." in run.report


@pytest.mark.parametrize("who", ["rank == '2'", "True"])
def test_all_nodes_restart_together(tmp_path, fork_server, who):
    """Whether one rank failed or all did at once, so that each node finds a failure."""
    leave_once = f"""
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
if attempt == "0" and {who}:
    os._exit(9)
dist.barrier()
"""
    source = SUM + leave_once
    runs = run_nodes(tmp_path, source, max_restarts=1)
    assert [(run.result.exit_code, run.result.attempts) for run in runs] == [(0, 2), (0, 2)], runs[0].report


def test_two_nodes_with_one_number_are_refused(tmp_path, fork_server):
    runs = run_nodes(tmp_path, SUM, node_ranks=(1, 1, 0), sizes=(1, 1, 1))
    assert [run.result.exit_code for run in runs] == [2, 2, 2]
    assert all("two nodes say they are node 1" in run.report for run in runs)


def test_a_machine_with_another_version_or_other_settings_is_refused_with_the_difference(tmp_path, fork_server):
    both = {"phalanx": "1.0", "seed": "0"}
    identities = ({**both, "batch_size": "8"}, {**both, "batch_size": "16"})
    runs = run_nodes(tmp_path, SUM, sizes=(1, 1), identities=identities, join_timeout=8.0)
    refused = next(run for run in runs if run.result.exit_code == 2)
    assert "batch_size is " in refused.report
    assert "seed" not in refused.report
    assert {run.result.exit_code for run in runs} == {1, 2}, "the other one waited, and no rank has started"


def test_an_endpoint_that_does_not_answer_is_named(launch_script):
    endpoint = free_endpoint()
    run = launch_script(SUM, num_nodes=2, node_rank=1, rdzv_endpoint=endpoint, join_timeout=1.0)
    assert run.result.exit_code == 1
    assert f"no answer from the rendezvous endpoint {endpoint} (waited" in run.report


def test_nodes_that_do_not_come_are_waited_for_only_so_long(launch_script):
    run = launch_script(SUM, num_nodes=2, node_rank=0, rdzv_endpoint=free_endpoint(), join_timeout=1.0)
    assert "not all 2 nodes joined" in run.report


def test_the_notice_counts_the_missing_machines(tmp_path, fork_server, monkeypatch):
    monkeypatch.setattr(watches, "NODES_MOMENTS", (2.0, 30.0))
    endpoint = free_endpoint()
    runs = run_nodes(tmp_path, SUM, num_nodes=3, endpoint=endpoint, join_timeout=6.0)
    for run in runs:
        assert f"waiting for 1 of 3 nodes at {endpoint}" in run.console.notices
    assert any("not all 3 nodes joined" in run.report for run in runs)


def test_a_host_that_is_not_known_is_refused_before_anything_starts(tmp_path, fork_server):
    with pytest.raises(UsageError, match=r"the host 'nowhere\.invalid'"):
        run_script(tmp_path, SUM, num_nodes=2, node_rank=1, rdzv_endpoint="nowhere.invalid:29400")
    assert not (tmp_path / "logs").exists()
