"""The process that holds the connections of `phalanx submit ssh`, with a stand-in for ssh that runs commands here."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.tools.submit import hosts
from phalanx.tools.submit.hosts import STATE, HostPlan, supervise, write_plan


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs a script on two "hosts"; it returns the exit code, the state and the output."""
    (tmp_path / "ssh").write_text('#!/bin/sh\nshift\nexec sh -c "$1"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def begin(script: str, work: str = "") -> tuple[int, dict[str, str], str]:
        output = tmp_path / "output"
        plan = HostPlan(
            hosts=["a", "b"],
            ssh=[str(tmp_path / "ssh")],
            python=shlex.quote(sys.executable),
            script=script,
            endpoint="a:1",
            environment={},
            grace=5.0,
            output=str(output),
            work=work,
        )
        write_plan(plan, tmp_path)
        return supervise(tmp_path), json.loads((tmp_path / STATE).read_text()), output.read_text()

    return begin


def test_ranks_that_have_saved_start_again(run, tmp_path):
    code, state, said = run(f'echo "start $1" >&2; mkdir {tmp_path}/saved-$1 2>/dev/null && exit 75; echo "went on"')
    assert (code, state["state"]) == (0, "finished")
    assert "they start again (1 of at most 10 times)" in said
    assert [said.count(text) for text in ("start 0", "start 1", "went on")] == [2, 2, 2]


def test_they_do_not_start_again_for_ever(run, monkeypatch):
    monkeypatch.setattr(hosts, "_RESTARTS", 2)
    code, state, said = run("echo begins; exit 75")
    assert (code, state["state"], said.count("begins")) == (75, "preempted", 6)


def test_failures_do_not_start_again(run):
    code, state, said = run("echo begins; exit 1")
    assert (code, state["state"], said.count("begins")) == (1, "failed", 2)


@pytest.mark.parametrize("code", [0, 1])
def test_shipped_code_is_removed_at_the_end(run, tmp_path, code):
    copy = tmp_path / "jobs/my job"
    copy.mkdir(parents=True)
    found = run(f'ls -d "$HOME/$3"; exit {code}', work=str(Path("jobs/my job")))
    assert str(copy) in found[2]
    assert not copy.exists()
    assert copy.parent.exists()


def test_an_order_to_end_does_not_interrupt_the_removal_of_the_code(tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift\ncase "$1" in rm*) kill -TERM $PPID; sleep 0.3;; esac\nexec sh -c "$1"\n')
    ssh.chmod(0o755)
    (tmp_path / "copy").mkdir()
    plan = HostPlan(
        ["a"], [str(ssh)], shlex.quote(sys.executable), "exit 0", "a:1", {}, 5.0, str(tmp_path / "out"), "copy"
    )
    write_plan(plan, tmp_path)
    words = [sys.executable, "-m", "phalanx.tools.submit.hosts", str(tmp_path)]
    done = subprocess.run(words, env={**os.environ, "HOME": str(tmp_path)}, timeout=240)
    assert (done.returncode, json.loads((tmp_path / STATE).read_text())["state"]) == (0, "finished")
    assert not (tmp_path / "copy").exists()


def test_no_list_of_processes_shows_the_variables_of_a_script(run):
    code, _, said = run("export KEY=hunter2; tr '\\0' ' ' < /proc/$$/cmdline; echo; echo \"[$0 $1 ${#KEY} $(cat)]\"")
    assert (code, "hunter2" in said) == (0, False), said
    assert said.count("[node.sh 0 7 ]") == said.count("[node.sh 1 7 ]") == 1, "its standard input is empty"
