"""`phalanx submit slurm` on a real Slurm of two nodes."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import programs
import pytest
from long_proofs import long_proof
from slurm_cluster import SlurmCluster, slurm_cluster
from uv_project import uv_variables, write_project
from waiting import until

from phalanx.tools.submit.job import ENDED

TRAIN = ["digits", "--num-nodes", "2", "--num-workers", "2", "--checkpoint-frequency", "20 steps"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = Path("/tmp") / f"slurm-{tmp_path_factory.mktemp('slurm').parent.name[-8:]}-{time.time_ns() % 10**6}"
    folder.mkdir()  # sockets have short names
    with slurm_cluster(folder) as found:
        yield found


@pytest.fixture
def phalanx(cluster: SlurmCluster, tmp_path, monkeypatch):
    """Return a function that runs the command line in a folder of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)

    monkeypatch.chdir(tmp_path)

    def run(*words: str, code: int = 0, seconds: float = 300.0) -> str:
        found = programs.run([sys.executable, "-m", "phalanx", *words], capture_output=True, text=True, timeout=seconds)
        assert found.returncode == code, found.stdout + found.stderr
        return found.stdout + found.stderr

    return run


def state_of(phalanx, job: str) -> dict[str, str]:
    found: dict[str, str] = json.loads(phalanx("jobs", "show", job, "--json"))
    return found


def wait_for(phalanx, job: str, *states: str) -> dict[str, str]:
    """Wait for a state, and return what was said with it: a moment later Slurm may say less."""
    found: list[dict[str, str]] = []

    def reached() -> bool:
        found.append(state_of(phalanx, job))
        return found[-1]["state"] in states

    until(reached, lambda: phalanx("jobs", "logs", job))
    return found[-1]


def starts(run_dir: Path) -> list[dict[str, str]]:
    """Return the events of a run's starts."""
    path = run_dir / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == "run_started"]


def test_the_way_of_a_user_from_a_project_to_a_trained_model(phalanx, cluster, tmp_path, monkeypatch):
    """Render, submit, watch, cancel, and submit again what then continues to its end: on two nodes, from docs alone."""
    phalanx("init", "net")
    monkeypatch.chdir(tmp_path / "net")
    ranks = ("--num-nodes", "2", "--num-workers", "2", "--device", "cpu")
    words = ("submit", "slurm", "recipe.toml", *ranks, "--partition", "main", "--time-limit", "1h", "--job-name", "net")
    long = (*words, "--checkpoint-frequency", "20 steps", "--epochs", "100000")
    assert "#SBATCH --cpus-per-task=1 " in phalanx(*long, "--render")
    assert "# checked: sbatch --test-only accepts it" in phalanx(*long, "--dry-run")

    assert re.search(r"submitted net as slurm job \d+", phalanx(*long))
    run_dir = tmp_path / "net/runs/net"
    until(lambda: list(run_dir.glob("checkpoints/step-*")), lambda: phalanx("jobs", "logs", "net"))
    found = state_of(phalanx, "net")
    assert (found["state"], found["nodes"]) == ("running", ["n[1-2]"])
    tasks = cluster.ask("scontrol", "show", "step", f"{found['id']}.0", "--oneliner")
    assert "CPUs=2 Tasks=2" in tasks, "srun's own step has the cores of both tasks"
    assert re.search(r"run +\S+/runs/net: running, step \d+", phalanx("jobs", "show", "net"))
    assert "2 ranks" in phalanx("jobs", "logs", "net")
    assert "running" in phalanx("runs", "show", "net"), "the run of the job has its name"

    said = phalanx("runs", "stop", "net")
    assert "cancelled net (slurm job " in said, "a run that is stopped would come back from the queue"
    until(lambda: "CANCELLED" in cluster.ask("scontrol", "show", "job", found["id"]), lambda: "it is in the queue")
    until(lambda: not cluster.ask("squeue", "--noheader").strip(), lambda: cluster.ask("squeue"))
    before = max(int(path.name[5:]) for path in run_dir.glob("checkpoints/step-*"))

    phalanx(*words, "--epochs", "100000", "--max-steps", str(before + 20))
    output = phalanx("jobs", "logs", "net", "-f")
    assert wait_for(phalanx, "net", *ENDED)["detail"].startswith("COMPLETED"), output
    assert f"step-{before:08}" in str(starts(run_dir)[-1]["resumed_from"])
    assert f"step {before + 20}/{before + 20}" in phalanx("jobs", "show", "net")
    assert "has ended already" in phalanx("jobs", "cancel", "net")
    assert "accuracy" in phalanx("evaluate", "net")


def test_one_rank_on_each_machine_is_started_again_in_place(phalanx, tmp_path):
    (tmp_path / "once.py").write_text(
        "import os\nprint('start', start := os.environ['TORCHELASTIC_RESTART_COUNT'])\nassert start != '0'\n"
    )
    ranks = ("--num-nodes", "2", "--num-workers", "2", "--device", "cpu", "--max-restarts", "1")
    phalanx("submit", "slurm", "--script", "once.py", *ranks, "--job-name", "once")
    output = phalanx("jobs", "logs", "once", "-f")
    assert wait_for(phalanx, "once", *ENDED)["state"] == "finished", output
    assert "start 1" in output


def test_wrong_settings_are_not_tried_again(phalanx, cluster):
    phalanx("submit", "slurm", *TRAIN, "--job-name", "wrong", "--env", "PHALANX_BATCHSIZE=3")
    found = wait_for(phalanx, "wrong", *ENDED)
    assert (found["state"], found["detail"]) == ("failed", "FAILED, exit code 2:0"), phalanx("jobs", "logs", "wrong")
    assert "Restarts=0" in cluster.ask("scontrol", "show", "job", found["id"])
    assert "unknown environment variable PHALANX_BATCHSIZE" in phalanx("jobs", "logs", "wrong")


def test_shipped_code_runs_in_the_environment_of_its_lock(phalanx, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    write_project(tmp_path, home)
    for name, value in uv_variables(home).items():  # sbatch hands them on
        monkeypatch.setenv(name, f"{value}:{os.environ['PATH']}" if name == "PATH" else value)
    monkeypatch.setenv("TMPDIR", str(home))  # for uv's own lock files
    (tmp_path / "where.py").write_text("import os, sys\nprint('rank in', os.getcwd(), 'of', sys.prefix)\n")
    words = ("--script", "where.py", "--num-nodes", "2", "--num-workers", "4", "--device", "cpu", "--start", "srun")
    phalanx("submit", "slurm", *words, "--ship", "archive", "--uv", "--job-name", "lock")
    output = phalanx("jobs", "logs", "lock", "-f")
    assert wait_for(phalanx, "lock", *ENDED)["state"] == "finished", output
    (folder,) = set(re.findall(r"rank in (\S+) of \1/\.venv$", output, re.M))
    assert output.count("rank in ") == 4, output
    assert not Path(folder).exists(), "the copy is removed at the end"


@long_proof
def test_ranks_that_srun_starts(phalanx, tmp_path):
    phalanx("submit", "slurm", *TRAIN, "--max-steps", "5", "--start", "srun", "--job-name", "ranks")
    wait_for(phalanx, "ranks", "finished")
    script = (tmp_path / "state/phalanx/jobs/ranks/train.sbatch").read_text()
    assert "--ntasks-per-node=1" in script


def test_a_signal_before_the_limit_saves_requeues_and_continues(phalanx, cluster, tmp_path):
    phalanx("submit", "slurm", *TRAIN, "--max-steps", "4000", "--time-limit", "1h", "--job-name", "again")
    until(lambda: list((tmp_path / "runs/again").glob("checkpoints/step-*")), lambda: "no checkpoint was saved")
    number = state_of(phalanx, "again")["id"]
    cluster.ask("scancel", "--signal=USR1", number)  # what --signal=USR1@120 does before the limit
    log = tmp_path / "runs/again" / f"slurm-{number}.out"
    pattern = re.compile(r"stopped by SIGUSR1 after step (\d+)")
    until(lambda: pattern.search(log.read_text()), lambda: "the ranks did not stop")
    stopped = pattern.search(log.read_text())
    assert stopped is not None
    saved = f"step-{int(stopped[1]):08}"
    until(
        lambda: saved in str(starts(tmp_path / "runs/again")[-1]["resumed_from"]),
        lambda: "it did not continue from there",
    )
    phalanx("jobs", "cancel", "again")
    assert state_of(phalanx, "again")["state"] == "cancelled"


@long_proof
def test_a_lost_node_puts_the_job_back_into_the_queue(phalanx, cluster, tmp_path):
    phalanx("submit", "slurm", *TRAIN, "--max-steps", "4000", "--job-name", "lost")
    folder = tmp_path / "runs/lost"
    until(lambda: list(folder.glob("checkpoints/step-*")), lambda: "no checkpoint was saved")
    cluster.stop_node("n2")
    until(lambda: state_of(phalanx, "lost")["state"] == "queued", lambda: "it was not requeued")
    cluster.start_node("n2")
    until(lambda: len(starts(folder)) == 2, lambda: "it did not start again")
    assert starts(folder)[-1]["resumed_from"]
    phalanx("jobs", "cancel", "lost")


@long_proof
def test_a_search_is_split_over_an_array(phalanx, tmp_path):
    (tmp_path / "space.toml").write_text("learning_rate = { loguniform = [1e-4, 1e-1] }\n")
    search = ("digits", "--space", "space.toml", "--trials", "3", "--max-steps", "4")
    phalanx("submit", "slurm", "--tune", *search, "--array", "0-1", "--job-name", "search")
    wait_for(phalanx, "search", "finished")
    parts = [sorted((tmp_path / f"runs/search/{part}/trials").iterdir()) for part in (0, 1)]
    assert [len(trials) for trials in parts] == [2, 1]
    assert "counted from 0" in phalanx("submit", "slurm", "--tune", *search, "--array", "1-2", code=2)


def test_rendering_needs_no_slurm_and_is_deterministic(phalanx, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin/nothing")
    words = ("submit", "slurm", *TRAIN, "--job-name", "same", "--time-limit", "2d", "--gres", "gpu:a100:1", "--render")
    first = phalanx(*words)
    assert first == phalanx(*words)
    assert "#SBATCH --time=2-00:00:00" in first
    assert "scontrol show hostnames" in first


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--partition", "nope"), "invalid partition specified: nope"),
        (("--time-limit", "1m"), "it would hardly train|so it would"),
        (("--container", "pyxis"), "needs --image"),
        (("--partitoin", "x"), "unknown flag '--partitoin'. Did you mean --partition"),
    ],
)
def test_bad_input(phalanx, words, said, tmp_path):
    found = phalanx("submit", "slurm", *TRAIN, "--job-name", "bad", *words, code=2)
    assert re.search(said, found), found
    assert not list((tmp_path / "state").rglob("bad*"))


def test_a_name_that_is_running_is_refused(phalanx):
    phalanx("submit", "slurm", *TRAIN, "--max-steps", "4000", "--job-name", "taken")
    assert "is not finished" in phalanx("submit", "slurm", *TRAIN, "--job-name", "taken", code=2)
    phalanx("jobs", "cancel", "taken")
