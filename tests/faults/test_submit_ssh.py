"""`phalanx submit ssh` and `phalanx train --hosts`: real sshd on two hosts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import programs
import pytest
from command import clean_environment
from long_proofs import long_proof
from ssh_hosts import SshHosts, ssh_hosts
from uv_project import uv_variables, write_project
from waiting import until

TRAIN = ["digits", "--device", "cpu", "--checkpoint-frequency", "20 steps"]
LONG = [*TRAIN, "--max-steps", "100000", "--epochs", "100000"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with ssh_hosts(tmp_path_factory.mktemp("ssh"), 2) as found:
        yield found


@pytest.fixture
def start(hosts: SshHosts, tmp_path):
    """Return a function that starts the command line on the first host, in a folder of its own.

    After the test no process may be left on the hosts; what a failed test left is ended, for the sake of the next one.
    """

    def begin(*words: str) -> subprocess.Popen[str]:
        environment = clean_environment(
            XDG_STATE_HOME=str(tmp_path / "state"), XDG_CONFIG_HOME=str(tmp_path / "config"), **hosts.variables
        )
        return programs.Popen(
            hosts.hosts[0].command(sys.executable, "-m", "phalanx", *words),
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    yield begin
    try:
        until(lambda: not hosts.processes(), hosts.processes, seconds=30)
    finally:
        hosts.end_processes()


@pytest.fixture
def phalanx(start):
    def run(*words: str, code: int = 0, seconds: float = 300.0) -> str:
        process = start(*words)
        said, _ = process.communicate(timeout=seconds)
        assert process.returncode == code, said
        return said

    return run


def two(hosts: SshHosts, slots: int = 1) -> list[str]:
    return ["--hosts", ",".join(f"{name}:{slots}" for name in hosts.names)]


def state_of(phalanx, job: str) -> str:
    return str(json.loads(phalanx("jobs", "show", job, "--json"))["state"])


def test_train_on_two_hosts_in_the_foreground(phalanx, hosts, tmp_path):
    """Two ranks on the first host, one on the second."""
    said = phalanx("train", *TRAIN, "--hosts", f"{hosts.names[0]}:2,{hosts.names[1]}", "--max-steps", "10")
    assert re.search(rf"\[{hosts.names[0]}\].*10/10", said), said
    assert "3 ranks" in said
    assert len(list(tmp_path.glob("runs/*/run.json"))) == 1, "both launchers share one run folder"


@long_proof  # test_train_on_two_hosts_in_the_foreground has the same ranks
def test_lines_carry_host_and_rank_and_hosts_may_have_different_slots(phalanx, hosts, tmp_path):
    (tmp_path / "say.py").write_text(
        "import os\nprint('this is', *(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE')))\n"
    )
    (tmp_path / "hosts").write_text(f"# two machines\n{hosts.names[0]} slots=2\n{hosts.names[1]} slots=1\n")
    said = phalanx("train", "--script", "say.py", "--hosts", "./hosts", "--device", "cpu")
    for rank, size in enumerate((2, 2, 1)):
        assert re.search(rf"\[{hosts.names[rank // 2]}\].*r{rank}.*this is {rank} 3 {size}", said), said


def test_a_failure_on_one_host_ends_all(phalanx, hosts, tmp_path):
    (tmp_path / "fail.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1': raise ValueError('broken on purpose')\ntime.sleep(600)\n"
    )
    began = time.monotonic()
    said = phalanx("train", "--script", "fail.py", *two(hosts), "--device", "cpu", code=1)
    assert "broken on purpose" in said
    assert time.monotonic() - began < 300, "the other rank sleeps for ten minutes"


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=long_proof), signal.SIGKILL])
def test_processes_end_with_the_command(start, hosts, tmp_path, number):
    process = start("train", *LONG, *two(hosts), "--run-dir", "run")
    until(lambda: list(tmp_path.glob("run/checkpoints/step-*")), lambda: "no checkpoint was saved")
    assert any("phalanx train" in line for line in hosts.processes())
    process.send_signal(number)
    process.communicate(timeout=240)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)


@long_proof  # test_a_job_with_shipped_code_runs_to_its_end has the same way to its end
def test_a_job_survives_the_command_and_is_cancelled(phalanx, hosts, tmp_path):
    said = phalanx("submit", "ssh", *LONG, *two(hosts), "--job-name", "long")
    assert re.search(r"submitted long as ssh job \d+", said)
    until(lambda: list(tmp_path.glob("runs/long/checkpoints/step-*")), lambda: phalanx("jobs", "logs", "long"))
    assert state_of(phalanx, "long") == "running"
    shown = " ".join(hosts.processes())
    plan = json.loads((tmp_path / "state/phalanx/jobs/long/plan.json").read_text())
    assert plan["environment"]["PHALANX_JOB_SECRET"] not in shown, "ps must not show the secret"
    assert (tmp_path / "state/phalanx/jobs/long/plan.json").stat().st_mode & 0o077 == 0
    assert "is not finished" in phalanx("submit", "ssh", *LONG, *two(hosts), "--job-name", "long", code=2)
    phalanx("jobs", "cancel", "long")
    assert state_of(phalanx, "long") == "cancelled"


def test_a_job_with_shipped_code_runs_to_its_end(phalanx, hosts, tmp_path):
    (tmp_path / "mine.py").write_text("import os\nprint('shipped to', os.getcwd())\n")
    words = ("--script", "mine.py", *two(hosts), "--device", "cpu", "--ship", "archive")
    phalanx("submit", "ssh", *words, "--job-name", "test-ship", "--run-dir", str(tmp_path / "run"))
    output = phalanx("jobs", "logs", "last", "-f")
    (folder,) = set(re.findall(r"shipped to (\S+)", output))
    assert len(re.findall("shipped", output)) == 2, output
    assert state_of(phalanx, "last") == "finished"
    assert folder.startswith(f"{Path.home()}/.cache/phalanx/jobs/test-ship-")
    assert not Path(folder).exists(), "the copy is removed at the end"


@pytest.fixture
def locked(hosts, tmp_path):
    """A locked project in the folder of the command; hosts have uv, and homes without phalanx."""
    home = tmp_path / "home"
    home.mkdir()
    write_project(tmp_path, home)

    def configure(*, has_uv: bool) -> None:
        variables = {**uv_variables(home), **({} if has_uv else {"PATH": "/usr/bin:/bin"})}
        for number in range(2):
            hosts.configure(number, "SetEnv " + " ".join(f"{name}={value}" for name, value in variables.items()))

    yield configure
    for number in range(2):
        hosts.configure(number)


@long_proof
def test_hosts_make_the_environment_of_a_lock(phalanx, hosts, tmp_path, locked):
    locked(has_uv=True)
    words = (*TRAIN, *two(hosts), "--max-steps", "4", "--uv")
    phalanx("submit", "ssh", *words, "--job-name", "lock", "--ship", "archive", "--follow")
    assert state_of(phalanx, "lock") == "finished"
    assert (tmp_path / "home/runs/lock/run.json").exists(), "the run is in the home folder of the hosts"
    assert not list((tmp_path / "home/.cache/phalanx/jobs").iterdir())
    locked(has_uv=False)
    said = phalanx("submit", "ssh", *words, "--job-name", "none", code=2)
    assert re.search(rf"{hosts.names[1]}: uv is not on the PATH", said), said
    assert not list((tmp_path / "state").rglob("none*"))


@long_proof
def test_a_job_that_was_ended_after_it_had_saved_starts_again(phalanx, hosts, tmp_path):
    (tmp_path / "saved.py").write_text(
        "import os, signal, time\n"
        "if os.path.exists('saved'): raise SystemExit(print('went on'))\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(75))\n"
        "print('waits', flush=True)\n"
        "time.sleep(100)\n"
    )
    phalanx("submit", "ssh", "--script", "saved.py", *two(hosts), "--device", "cpu", "--job-name", "saved")
    until(lambda: phalanx("jobs", "logs", "saved").count("waits") == 2, lambda: phalanx("jobs", "logs", "saved"))
    (tmp_path / "saved").touch()
    listed = subprocess.run(["ip", "netns", "pids", hosts.hosts[1].namespace], capture_output=True, text=True).stdout
    lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in listed.split()}
    (launcher,) = (pid for pid, line in lines.items() if b"--node-rank" in line and b"bash" not in line)
    os.kill(launcher, signal.SIGTERM)
    said = phalanx("jobs", "logs", "saved", "-f")
    assert "they start again (1 of at most 10 times)" in said, said
    assert said.count("went on") == 2
    assert state_of(phalanx, "saved") == "finished"


def test_a_host_that_does_not_answer_is_named(phalanx, hosts, tmp_path):
    hosts.hosts[1].cut()
    try:
        words = ("submit", "ssh", *TRAIN, *two(hosts), "--job-name", "cut", "--connect-timeout", "2")
        said = phalanx(*words, code=2)
    finally:
        subprocess.run(["ip", "link", "set", hosts.hosts[1].cable, "up"], check=True)
    assert re.search(rf"{hosts.names[1]}: ssh: connect to host .*(timed out|No route).*after \d\.\d s", said), said
    assert f"answered: {hosts.names[0]}; nothing was started" in said
    assert not list((tmp_path / "state").rglob("cut*"))


def test_different_versions_are_refused(phalanx, hosts, tmp_path):
    fake = tmp_path / "fake" / "torch-2.11.0.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n")
    hosts.configure(1, f"SetEnv PYTHONPATH={fake.parent}")
    try:
        said = phalanx("train", *TRAIN, *two(hosts), code=2)
    finally:
        hosts.configure(1)
    assert re.search(rf"different versions of torch: .* on {hosts.names[0]}, 2\.11\.0 on {hosts.names[1]}", said), said


def test_an_unknown_host_key_is_refused(phalanx, hosts, tmp_path):
    words = ("train", *TRAIN, *two(hosts))
    known = hosts.folder / "known_hosts"
    before = known.read_text()
    known.write_text(before.splitlines()[0] + "\n")
    try:
        said = phalanx(*words, code=2)
    finally:
        known.write_text(before)
    assert "host key is known" in said
    assert "ssh-keyscan" in said


@long_proof
def test_the_state_of_a_killed_supervisor(phalanx, hosts, tmp_path):
    phalanx("submit", "ssh", *LONG, *two(hosts), "--job-name", "gone")
    until(lambda: list(tmp_path.glob("runs/gone/checkpoints/step-*")), lambda: phalanx("jobs", "logs", "gone"))
    record = json.loads((tmp_path / "state/phalanx/jobs/gone.json").read_text())
    subprocess.run(["kill", "-KILL", record["id"]], check=True)
    until(lambda: state_of(phalanx, "gone") == "lost", lambda: phalanx("jobs", "show", "gone"))


@long_proof
def test_a_job_that_has_ended_is_submitted_again(phalanx, hosts, tmp_path):
    words = (*TRAIN, *two(hosts), "--max-steps", "40", "--job-name", "again")
    phalanx("submit", "ssh", *words, "--follow")
    assert state_of(phalanx, "again") == "finished"
    assert "submitted again as it was" in phalanx("resume", "again", "--max-steps", "60", code=2)
    assert "submitted again-2 as ssh job" in phalanx("resume", "again")
    assert "again-2" in phalanx("jobs")
    phalanx("jobs", "logs", "again-2", "-f")
    record = json.loads((tmp_path / "state/phalanx/jobs/again-2.json").read_text())
    assert record["resumes"] == "again"
    events = [json.loads(line) for line in (tmp_path / "runs/again/events.jsonl").read_text().splitlines()]
    begun = [event for event in events if event["event"] == "run_started"]
    assert "step-00000040" in str(begun[-1]["resumed_from"])


def test_doctor_checks_both_hosts_and_says_what_differs(hosts: SshHosts, phalanx):
    ssh = f"ssh -p 2222 -i {hosts.folder / 'key'} -o UserKnownHostsFile={hosts.folder / 'known_hosts'}"
    said = phalanx("doctor", "--hosts", f"{hosts.names[0]},{hosts.names[1]},192.0.2.7", "--ssh", ssh, "--json", code=1)
    found = json.loads(said)
    assert list(found) == [*hosts.names[:2], "192.0.2.7", "all hosts"]
    (unreachable,) = found["192.0.2.7"]
    assert unreachable["level"] == "error"
    assert "could not be checked" in unreachable["text"]
    assert any(result["topic"] == "memory" for result in found[hosts.names[1]])
    assert [result["text"] for result in found["all hosts"] if result["level"] == "ok"] == [
        "2 hosts, clocks within 1 s"
    ]


def test_doctor_measures_the_link_between_hosts_and_names_a_slow_one(hosts: SshHosts, phalanx):
    ssh = f"ssh -p 2222 -i {hosts.folder / 'key'} -o UserKnownHostsFile={hosts.folder / 'known_hosts'}"
    hosts.hosts[1].slow("100mbit")
    try:
        said = phalanx("doctor", "--hosts", ",".join(hosts.names[:2]), "--ssh", ssh, "--measure", "--json")
    finally:
        hosts.hosts[1].slow("10gbit")
    (slow,) = [each for each in json.loads(said)["all hosts"] if each["level"] == "warning"]
    pair, rate = re.match(r"(.+): ([\d.e-]+) GB/s by TCP; 1.25 GB/s are expected", slow["text"]).groups()
    assert pair == f"{hosts.names[0]} - {hosts.names[1]}"
    assert float(rate) < 0.03  # 100 Mb/s one way, the other way is fast
