"""`phalanx submit` without a cluster: options from every source, what is rendered, refusals, shipped code."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest
from command import phalanx

from phalanx.errors import ConfigError, UsageError
from phalanx.tools.submit.job import JobRecord, find_record, job_name, jobs_folder, records, write_record
from phalanx.tools.submit.job_files import _chosen, archive, archive_line
from phalanx.tools.submit.target import read_options

LLAMA = ("llama", "--preset", "70b", "--num-nodes", "8", "--gpus-per-node", "8", "--batch-size", "1")


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def refused(*words: str) -> str:
    found = phalanx("submit", *words)
    assert found.code == 2, found.text
    return found.err


def rendered(*words: str) -> str:
    found = phalanx("submit", "slurm", *words, "--job-name", "job", "--render")
    assert found.code == 0, found.err
    return found.out


def test_train_arguments_reach_the_script_and_options_do_not():
    script = rendered("digits", "--num-workers", "2", "--partition", "gpu", "--set", "model.width=8")
    assert "phalanx train digits --num-workers 2 --set model.width=8 --run-dir runs/job" in script
    assert "#SBATCH --partition=gpu" in script
    assert "--resume-from-checkpoint=true" in script


def test_each_task_of_an_array_has_its_own_folder():
    script = rendered("digits", "--num-workers", "2", "--array", "0-3")
    assert script.count("--run-dir") == 2, "once in the comment, once in the command"
    assert '--run-dir runs/job/"$SLURM_ARRAY_TASK_ID"' in script
    assert '--checkpoint-dir runs/job/"$SLURM_ARRAY_TASK_ID"/checkpoints' in script


def test_options_come_from_files_environment_and_flags(tmp_path, monkeypatch):
    own = tmp_path / "config/phalanx/submit.toml"
    own.parent.mkdir(parents=True)
    own.write_text('time_limit = "1h"\n[slurm]\npartition = "mine"\naccount = "a"\nqos = "low"\n')
    (tmp_path / "run.toml").write_text('seed = 3\n[submit.slurm]\naccount = "b"\nqos = "mid"\n')
    monkeypatch.setenv("PHALANX_SUBMIT_SLURM_QOS", "high")
    options = read_options("slurm", {"gres": "gpu:2"}, ["run.toml"], {"PHALANX_SUBMIT_SLURM_QOS": "high"})
    assert (options.partition, options.account, options.qos, options.gres) == ("mine", "b", "high", "gpu:2")
    assert options.time_limit == "1h"
    script = rendered("digits", "--num-workers", "2", "--config", "run.toml", "--checkpoint-frequency", "1")
    assert "--account=b" in script
    assert "--qos=high" in script


def test_mistakes_of_options_are_reported_together(tmp_path):
    with pytest.raises(ConfigError) as error:
        read_options("slurm", {"partitoin": "x", "start": "mpirun"}, None, {})
    assert "partition" in str(error.value)
    assert "'launcher', 'srun'" in str(error.value)


def test_the_planner_refuses_what_does_not_fit():
    assert "a rank needs" in refused("slurm", *LLAMA, "--gpu", "h100", "--render")
    more = ("--strategy", "fsdp", "--mixed-precision", "bf16", "--activation-checkpointing", "full")
    assert "planned:" in phalanx("submit", "slurm", *LLAMA, *more, "--gpu", "h100", "--render").err
    assert "Did you mean 'h100'" in refused("slurm", *LLAMA, *more, "--gpu", "h10", "--render")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "phalanx submit slurm text --num-nodes 2 --gpus-per-node 8 --partition gpu --time-limit 12h\n"),
        (("slrum", "digits"), "Did you mean 'slurm'"),
        (("slurm", "digits", "--time", "12h"), "Did you mean --time-limit?"),
        (("slurm", "digits", "--array", "5-1"), "--array 5-1: expected numbers that rise"),
        (("slurm", "digits", "--array", "0-7%"), "Write: --array 0-7"),
        (("slurm",), "nothing to submit was named"),
        (("slurm", "digits", "--job-name", "My Job"), "--job-name my-job"),
        (("slurm", "digits", "--env", "A"), "'A' is not NAME=value"),
        (("slurm", "--script", "none.py"), "none.py"),
        (("slurm", "digits", "--num-workers", "2", "--num-wrokers", "3"), "Did you mean --num-workers"),
        (("slurm", "digits", "--image", "x"), "--container pyxis"),
        (("slurm", "digits", "--sbatch", "--comment='a", "--render"), "No closing quotation"),
        (("slurm", "--tune", "digits", "--array", "0-3"), "--space is not given"),
        (("kubernetes", "--tune", "digits", "--image", "x"), "which kubernetes does not have"),
        (("compose", "digits", "--image", "x", "--cpus", "many"), "cpus = 'many': expected a number"),
        (("compose", "digits", "--image", "x", "--time-limit", "soon"), "such as 30m"),
        (("ssh", "digits", "--hosts", "a:1", "--time-limit", "5s"), "leaves hardly any time"),
        (("ray", "digits", "--time-limit", "soon"), "such as 30m"),
        (("ssh", "digits"), "ssh needs the hosts"),
        (("ssh", "digits", "--hosts", "a:8,b:4", "--num-workers", "6"), "do not fill nodes with different slots"),
        (
            ("ssh", "digits", "--hosts", "a:8,b:4", "--strategy", "fsdp", "--sharding", "hybrid"),
            "hybrid sharding needs shard_size",
        ),
        (("ssh", "digits", "--hosts", "a:2,b:2", "--num-workers", "3"), "cannot be spread evenly"),
        (("ssh", "digits", "--hosts", "./nothing"), "No such file"),
        (("ssh", "digits", "--hosts", "a,b", "--node-rank", "0"), "leave node_rank out"),
        (("ssh", "digits", "--hosts", "a,b", "--image", "x"), "give --venv"),
    ],
)
def test_bad_input(words, said, tmp_path):
    assert said in refused(*words)
    assert not list(tmp_path.iterdir()), "neither a record nor a run folder"


def test_rendering_for_ssh_needs_no_host_and_is_deterministic():
    words = ("submit", "ssh", "digits", "--hosts", "a:8,b:8", "--job-name", "same", "--render")
    first = phalanx(*words).out
    assert first == phalanx(*words).out
    assert '--node-rank "$1" --rdzv-endpoint "$2"' in first
    assert "a slots=8" in first
    commands = first.partition("# ---- commands\n")[2]
    assert "a free port of a" in commands
    for host in ("a", "b"):
        assert re.search(
            rf"^ssh -T -o BatchMode=yes .* -- {host} '.*/python -P -m phalanx.tools.submit.node run'$", commands, re.M
        )
    more = ("--user", "ann", "--ship", "archive", "--rdzv-endpoint", "a:29400")
    script, _, commands = phalanx(*words, *more).out.partition("# ---- commands\n")
    assert '--run-dir "$HOME"/runs/same --checkpoint-dir "$HOME"/runs/same/checkpoints ' in script
    assert "(a:29400)" in commands
    assert re.search(r"^ssh .* -l ann -- b 'mkdir -p .*/phalanx/jobs/same-ID && tar .* < code.tar.gz$", commands, re.M)


def test_targets_without_a_limit_let_the_run_end_itself():
    words = ("digits", "--time-limit", "1h", "--checkpoint-frequency", "1", "--job-name", "job", "--render")
    for target in (("compose", "--image", "x"), ("ssh", "--hosts", "a:1"), ("ray",)):
        assert "--max-time 3600" in phalanx("submit", *target, *words).out


def test_files_of_options_that_are_not_tables_are_refused(tmp_path):
    (tmp_path / "run.toml").write_text("submit = 3\n")
    assert "run.toml: the options of slurm are not a table" in refused("slurm", "digits", "--config", "run.toml")
    own = tmp_path / "config/phalanx/submit.toml"
    own.parent.mkdir(parents=True)
    own.write_text("slurm = 3\n")
    assert "the options of slurm are not a table" in refused("slurm", "digits")


@pytest.mark.parametrize(
    ("words", "cores"),
    [
        (("--gpus-per-node", "8"), 32),
        (("--gpus-per-node", "8", "--start", "srun"), 4),
        (("--num-workers", "3"), 3),
        (("--num-workers", "3", "--cpus-per-rank", "5"), 15),
        (("--num-workers", "3", "--exclusive", "--cpus-per-rank", "5", "--start", "srun"), 5),
    ],
)
def test_tasks_have_cores_for_their_ranks(words, cores):
    script = rendered("digits", *words)
    assert re.search(rf"^#SBATCH --cpus-per-task={cores} ", script, re.M)
    assert '--cpus-per-task="$SLURM_CPUS_PER_TASK"' in script, "srun does not take it over from sbatch"
    assert ("ranks x (" in script) == ("--cpus-per-rank" not in words), "how they are counted"


def test_ranks_of_exclusive_machines_get_all_cores():
    script = rendered("digits", "--num-workers", "2", "--exclusive", "--start", "srun")
    assert "#SBATCH --cpus-per-task" not in script
    assert '--cpus-per-task="$((SLURM_CPUS_ON_NODE / 2))"' in script


@pytest.mark.parametrize(
    ("container", "image", "named"),
    [
        ("pyxis", "nvcr.io/nvidia/x:1", "'nvcr.io#nvidia/x:1'"),
        ("pyxis", "docker://registry:5000/x", "'docker://registry:5000#x'"),
        ("pyxis", "nvcr.io#nvidia/x:1", "'nvcr.io#nvidia/x:1'"),
        ("pyxis", "org/x:1", "org/x:1"),
        ("pyxis", "/images/x.sqsh", "/images/x.sqsh"),
        ("apptainer", "nvcr.io#nvidia/x:1", "docker://nvcr.io/nvidia/x:1"),
        ("apptainer", "x.sif", "x.sif"),
    ],
)
def test_images_are_written_as_the_container_program_writes_them(container, image, named):
    script = rendered("digits", "--container", container, "--image", image)
    assert f"--container-image={named} " in script if container == "pyxis" else f" {named} phalanx train" in script


@pytest.mark.parametrize(("container", "flag"), [("pyxis", "--container-mounts="), ("apptainer", "--bind ")])
def test_mounts_are_added_to_the_folder(tmp_path, container, flag):
    words = ("digits", "--container", container, "--image", "x.sif")
    assert f"{flag}{tmp_path} " in rendered(*words)
    assert f"{flag}{tmp_path},/data:/data,/scratch " in rendered(*words, "--mounts", "/data:/data,/scratch")
    assert f'{flag}"$PWD",{tmp_path},/data ' in rendered(*words, "--mounts", "/data", "--ship", "archive"), (
        "the copy of the code, and the run"
    )
    assert f"{flag}/else:{tmp_path} " in rendered(*words, "--mounts", f"/else:{tmp_path}"), "the user's own"


def test_a_job_without_a_time_limit_is_warned():
    words = ("submit", "slurm", "digits", "--render")
    assert "trained since the last checkpoint is lost. Write: --time-limit 12h" in phalanx(*words).err
    assert phalanx(*words, "--time-limit", "12h").err == phalanx(*words, "--sbatch=--signal=USR1@60").err == ""


def test_requeue_can_be_switched_off():
    script = rendered("digits", "--no-requeue")
    assert "#SBATCH --no-requeue" in script, "without it the cluster's own default holds"
    assert "scontrol requeue" not in script


def test_the_run_of_shipped_code_stays_in_the_shared_folder(tmp_path):
    script = rendered("digits", "--ship", "archive")
    assert f"--run-dir {tmp_path}/runs/job --checkpoint-dir {tmp_path}/runs/job/checkpoints" in script


def test_checkpoints_of_shipped_code_are_not_in_the_copy_that_is_removed(tmp_path):
    words = ("digits", "--ship", "archive", "--checkpoint-frequency", "10")
    assert f"--checkpoint-dir {tmp_path}/kept\n" in rendered(*words, "--checkpoint-dir", "kept")
    for elsewhere in ("/data/kept", "memory://kept"):
        assert f"--checkpoint-dir {elsewhere}\n" in rendered(*words, "--checkpoint-dir", elsewhere)


def a_record(folder: Path, **more: str) -> JobRecord:
    record = JobRecord("job", "slurm", "12", 0.0, str(folder), "runs/job", ["digits"], {"env": "KEY=secret"}, **more)
    write_record(record)
    return record


def test_records_are_private(tmp_path):
    a_record(tmp_path)
    assert jobs_folder().stat().st_mode & 0o077 == 0


def test_logs_are_those_of_the_job_and_not_of_the_one_it_continues(tmp_path):
    (tmp_path / "runs/job").mkdir(parents=True)
    for number, text in (("11", b"before\n"), ("12", b"ours \xff\r\nagain\n"), ("121", b"other\n")):
        (tmp_path / f"runs/job/slurm-{number}.out").write_bytes(text)
    a_record(tmp_path)
    assert phalanx("jobs", "logs", "job").out.splitlines() == ["ours \ufffd", "again"]


def test_a_controller_that_does_not_answer_does_not_lose_the_job(tmp_path, monkeypatch):
    said = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    (tmp_path / "squeue").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    a_record(tmp_path, state="running")
    assert "Unable to contact" in phalanx("jobs").out
    assert records()[0].state == "running"


def test_without_slurm_it_says_what_was_looked_for(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "sbatch is not on this machine's PATH" in refused("slurm", "digits")


def test_a_refused_job_leaves_the_files_of_an_ended_one_with_its_name(tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text(
        '#!/bin/sh\n[ "$1" = --test-only ] || { echo "sbatch: error: full" >&2; exit 1; }\n'
    )
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    a_record(tmp_path, state="finished")
    (jobs_folder() / "job").mkdir()
    (jobs_folder() / "job/train.sbatch").write_text("before")
    assert "sbatch: full" in refused("slurm", "digits", "--job-name", "job")
    assert (jobs_folder() / "job/train.sbatch").read_text() == "before"
    assert sorted(path.name for path in jobs_folder().iterdir()) == ["job", "job.json"]


@pytest.mark.parametrize("cancels", [True, False])
def test_a_job_that_cannot_be_recorded_is_cancelled(tmp_path, monkeypatch, cancels):
    # The disk fails between the files of the job and its record: sbatch puts a folder where the record belongs.
    record = tmp_path / "state/phalanx/jobs/job.json"
    programs = {
        "sbatch": f'[ "$1" = --test-only ] || {{ mkdir {record}; echo 17; }}',
        "scancel": f"echo $1 >> {tmp_path}/cancelled" if cancels else "echo 'scancel: error: away' >&2; exit 1",
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    said = refused("slurm", "digits", "--job-name", "job")
    assert "slurm job 17 was submitted, but its record was not written" in said
    if cancels:
        assert "It was cancelled." in said
        assert (tmp_path / "cancelled").read_text() == "17\n"
    else:
        assert "scancel: away" in said
        assert "End it: scancel 17" in said
    assert not (tmp_path / "state/phalanx/jobs/job").exists(), "nothing is left of it"


def test_a_folder_of_records_that_cannot_be_written_ends_the_submission(tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text(f'#!/bin/sh\n[ "$1" = --test-only ] || touch {tmp_path}/submitted\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/self")
    assert "/proc/self" in refused("slurm", "digits", "--job-name", "job")
    assert not (tmp_path / "submitted").exists()


def test_records_are_found_by_name_beginning_and_id():
    for index, name in enumerate(("alpha-1", "alpha-2", "beta")):
        write_record(JobRecord(name, "slurm", str(100 + index), float(index), "/", "runs/x", ["digits"], {}))
    assert [record.name for record in records()] == ["beta", "alpha-2", "alpha-1"]
    assert find_record("last").name == find_record("be").name == find_record("102").name == "beta"
    with pytest.raises(UsageError, match="is the beginning of"):
        find_record("alpha")
    with pytest.raises(UsageError, match="Did you mean 'beta'"):
        find_record("bata")


def test_names():
    assert job_name("a-1", "x") == "a-1"
    assert job_name(None, "My Script_2").startswith("my-script-2-")
    with pytest.raises(UsageError):
        job_name("1a", "x")


@pytest.mark.parametrize("in_git", [False, True])
def test_secrets_and_outputs_are_not_shipped_and_what_is_shipped_is_said(tmp_path, in_git):
    secrets = [".env", ".git-credentials", ".npmrc", ".pypirc", ".ssh/config", "certs/server.p12", "id_rsa"]
    outputs = ["best.onnx", "empty.yaml", "job.yaml", "net.pt", "plan.html"]
    for path in [*secrets, *outputs, "runs/a/run.json", "run.yaml", "train.py"]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("" if path == "empty.yaml" else "a: 1\n")
    (tmp_path / "job.yaml").write_text("apiVersion: v1\nkind: Service\n")
    if in_git:
        subprocess.run(["git", "init", "-q"], check=True)
        subprocess.run(["git", "add", "-f", *secrets, "net.pt"], check=True)
        outputs.remove("net.pt")
    line = archive_line(tmp_path)
    assert line.startswith(
        "code: 3 files, 15 bytes: net.pt, run.yaml, train.py;" if in_git else "code: 2 files, 10 bytes: run."
    )
    assert line.endswith(f"; left out: {', '.join(sorted([*secrets, *outputs])[:6])}, ...")
    (tmp_path / "code.tar.gz").write_bytes(archive(tmp_path, ["best.onnx"])[1])
    with tarfile.open(tmp_path / "code.tar.gz") as tar:
        expected = ["best.onnx", *(["net.pt"] if in_git else []), "run.yaml", "train.py"]
        assert tar.getnames() == expected, "what the command names is shipped"
    found = phalanx("submit", "ssh", "digits", "--hosts", "a:1", "--ship", "archive", "--render")
    assert "code: " in found.err
    assert "code: " not in found.out


@pytest.mark.parametrize("in_git", [False, True])
def test_links_are_shipped_as_links_and_those_that_would_lead_nowhere_are_named(tmp_path, in_git):
    folder = tmp_path / "code"
    for path in ("code/src/net.py", "code/lib/net.py", "code/data/big", "shared.py", "code/.env"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x = 1\n")
    targets = {"net.py": "src/net.py", "package": folder / "lib", "src/other.py": "../package/net.py"}
    outside = {"shared.py": "../shared.py", "settings": ".env", "lost": "nothing", "loop": "loop", "home": Path.home()}
    for name, target in {**targets, **outside}.items():
        (folder / name).symlink_to(target)
    if in_git:
        (folder / ".gitignore").write_text("data\n")
        (folder / "dataset").symlink_to("data")
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
        outside["dataset"] = "data"
    (tmp_path / "code.tar.gz").write_bytes(archive(folder)[1])
    said = archive_line(folder).partition("left out: ")[2]
    copy = tmp_path / "copy"
    copy.mkdir()
    subprocess.run(["tar", "-xzf", tmp_path / "code.tar.gz", "-C", copy], check=True)
    for name in targets:
        assert (copy / name).is_symlink()
        assert (copy / name).resolve().is_relative_to(copy), "not to this machine's folder"
    assert (copy / "package/net.py").read_text() == (copy / "src/other.py").read_text() == "x = 1\n"
    _, left_out = _chosen(folder, [])
    links = {line.partition(" (a link to ")[0] for line in left_out if " (a link to " in line}
    assert links == outside.keys()
    assert not any((copy / name).is_symlink() for name in outside)
    assert "a link to nothing, which is not shipped" in " ".join(left_out)
    assert said.startswith(".env, ")


def test_submodules_are_shipped_and_those_that_are_not_checked_out_are_named(tmp_path):
    def git(folder: Path, *words: str) -> None:
        own = ("-c", "protocol.file.allow=always", "-c", "user.name=x", "-c", "user.email=x@y")
        subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True)

    for name in ("lib", "code"):
        (tmp_path / name).mkdir()
        git(tmp_path / name, "init", "-q")
    (tmp_path / "lib" / "helpers.py").write_text("x = 1\n")
    git(tmp_path / "lib", "add", ".")
    git(tmp_path / "lib", "commit", "-qm", "x")
    for name in ("vendored", "absent"):
        git(tmp_path / "code", "submodule", "add", "-q", str(tmp_path / "lib"), name)
    git(tmp_path / "code", "commit", "-qm", "x")
    git(tmp_path / "code", "submodule", "deinit", "-f", "absent")
    files, left_out = _chosen(tmp_path / "code", [])
    assert tmp_path / "code/vendored/helpers.py" in files
    assert left_out == ["absent (a submodule that is not checked out: git submodule update --init)"]


def test_an_archive_is_named_by_its_content_and_leaves_ignored_files_out(tmp_path):
    subprocess.run(["git", "init", "-q"], check=True)
    (tmp_path / ".gitignore").write_text("data\n")
    (tmp_path / "data").write_text("x" * 100)
    (tmp_path / "train.py").write_text("print(1)\n")
    for path in ("runs/first/checkpoint", "net/runs/table.py"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("")
    name, content = archive(tmp_path)
    assert (name, content) == archive(tmp_path)
    (tmp_path / "code.tar.gz").write_bytes(content)
    with tarfile.open(tmp_path / "code.tar.gz") as tar:
        assert tar.getnames() == [".gitignore", "net/runs/table.py", "train.py"], "neither data nor runs"
    (tmp_path / "code.tar.gz").unlink()
    (tmp_path / "train.py").write_text("print(2)\n")
    assert archive(tmp_path)[0] != name
