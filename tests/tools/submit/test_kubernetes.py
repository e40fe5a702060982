"""`phalanx submit kubernetes|jobset` and the verbs on jobs, against a stand-in for the API server."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
import tarfile

import pytest
from packages import on_first_use

from phalanx.cli import main
from phalanx.errors import UsageError

kubernetes = on_first_use("kubernetes")
yaml = pytest.importorskip("yaml")

from kube_schema import validate  # noqa: E402
from kube_server import FORBIDDEN, KubeServer, kube_server  # noqa: E402

IMAGE = ["--image", "registry/phalanx:1"]
TRAIN = ["digits", "--num-nodes", "2", "--num-workers", "4", *IMAGE, "--pvc", "work:/workspace"]
GPUS = ["digits", "--num-nodes", "2", "--gpus-per-node", "8", "--device", "cuda", *IMAGE]


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    with kube_server(tmp_path) as (found, config):
        monkeypatch.setenv("KUBECONFIG", str(config))
        yield found


@pytest.fixture
def phalanx(capsys):
    """Return a function that runs the command line and returns what it prints."""

    def run(*words: str, code: int = 0) -> str:
        found = main([*words])
        said = capsys.readouterr()
        assert found == code, said.out + said.err
        return said.out + said.err

    return run


def rendered(phalanx, target: str, *words: str) -> list[dict]:
    said = phalanx("submit", target, *words, "--job-name", "demo", "--render")
    return list(yaml.safe_load_all(said.partition("\nphalanx: ")[0]))  # without standard error


@pytest.fixture
def project(phalanx, tmp_path, monkeypatch):
    """The project that `phalanx init` writes, as the current folder."""
    monkeypatch.chdir(tmp_path)
    phalanx("init", "net")
    assert "runs/\n" in (tmp_path / "net/.gitignore").read_text()
    monkeypatch.chdir(tmp_path / "net")
    return tmp_path / "net"


def shipped(code: dict) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(code["binaryData"]["code.tar.gz"]))) as packed:
        return packed.getnames()


def test_a_project_of_init_is_shipped_as_it_is_rendered(phalanx, project):
    code, job = rendered(phalanx, "kubernetes", "recipe.toml", *IMAGE)
    for thing in (code, job):
        validate(thing)
    assert {"recipe.toml", "model.py", "data.py"} <= set(shipped(code))
    pod = job["spec"]["template"]["spec"]
    (name,) = [each["name"] for each in pod["volumes"] if each.get("configMap") == {"name": code["metadata"]["name"]}]
    assert {"name": name, "mountPath": "/phalanx-code"} in pod["containers"][0]["volumeMounts"]
    assert "tar -xzf /phalanx-code/code.tar.gz" in pod["containers"][0]["command"][2]
    assert "--run-dir /workspace/runs/demo" in pod["containers"][0]["command"][2], "not in the copy"
    (job,) = rendered(phalanx, "kubernetes", "recipe.toml", *IMAGE, "--ship", "folder")
    assert "tar" not in job["spec"]["template"]["spec"]["containers"][0]["command"][2], "the image has it"


@pytest.mark.parametrize(
    "words",
    [
        ["--script", "model.py"],
        ["-m", "model"],
        ["digits", "--config", "more.toml"],
        ["digits", "--model", "model:Net"],
    ],
)
def test_what_a_command_names_is_shipped(phalanx, project, words):
    (project / "more.toml").write_text("epochs = 2\n")
    (project / ".gitignore").write_text("*.toml\n")
    subprocess.run(["git", "init", "-q"], check=True)
    names = shipped(rendered(phalanx, "kubernetes", *words, *IMAGE)[0])
    assert "model.py" in names
    assert ("more.toml" in names) == ("more.toml" in words), "what is named is shipped though git ignores it"


def test_files_that_pods_would_not_have_are_refused(phalanx, project, tmp_path):
    (tmp_path / "train.py").write_text("print(1)\n")
    for path in ("../train.py", str(tmp_path / "train.py")):
        said = phalanx("submit", "kubernetes", "--script", path, *IMAGE, "--render", code=2)
        assert f"{path} is not in {project}, of which a copy is shipped" in said
    said = phalanx("submit", "kubeflow", "recipe.toml", *IMAGE, "--kind", "mpijob", "--render", code=2)
    assert "recipe.toml is on this machine alone: kind mpijob" in said
    said = phalanx("submit", "ray", "recipe.toml", *IMAGE, "--kind", "rayjob", "--render", code=2)
    assert "recipe.toml is on this machine alone: kind rayjob" in said
    (project / "data.bin").write_bytes(os.urandom(800_000))
    said = phalanx("submit", "kubernetes", "recipe.toml", *IMAGE, "--render", code=2)
    assert "a ConfigMap holds 750,000" in said


def test_pods_without_a_common_folder_are_refused(phalanx, tmp_path):
    words = ["digits", "--num-nodes", "2", "--num-workers", "2", *IMAGE]
    for target in ("kubernetes", "jobset", "kubeflow"):
        said = phalanx("submit", target, *words, "--job-name", "demo", "--render", code=2)
        assert "2 pods do not share /workspace/runs/demo/checkpoints" in said
        assert "--pvc CLAIM:/workspace or --checkpoint-dir s3://BUCKET/demo" in said
    assert "do not share" in phalanx("submit", "kubernetes", *words, "--pvc", "sets:/data", "--render", code=2)
    (tmp_path / "nfs.yaml").write_text(
        "spec: {template: {spec: {volumes: [{name: runs, emptyDir: null, nfs: {server: a, path: /b}}]}}}\n"
    )
    for more in (["--checkpoint-dir", "s3://b/c"], ["--overrides", str(tmp_path / "nfs.yaml")]):
        assert len(rendered(phalanx, "kubernetes", *words, *more)) == 2
    said = phalanx("submit", "kubernetes", "digits", *IMAGE, "--job-name", "demo", "--render")
    assert "/workspace/runs/demo/checkpoints is removed with the pod" in said, "one pod trains, and is warned"


def test_pods_ask_for_cores_and_memory(phalanx):
    def asked(*words: str) -> dict:
        *_, job = rendered(phalanx, "kubernetes", *words, "--pvc", "work:/workspace")
        return job["spec"]["template"]["spec"]["containers"][0]["resources"]

    gpus = {"nvidia.com/gpu": "8"}
    assert asked(*GPUS) == {"requests": {"cpu": "32", "memory": "32Gi", **gpus}, "limits": gpus}
    assert asked(*TRAIN) == {"requests": {"cpu": "2", "memory": "2Gi"}}, "without limits"
    given = {"cpu": "3", "memory": "64Gi"}
    assert asked(*TRAIN, "--cpu", "3", "--memory", "64Gi") == {"requests": given, "limits": given}
    workers = ("imagenet", "--data", ".", "--set", "data.workers=6", "--gpus-per-node", "2", *IMAGE)
    assert asked(*workers)["requests"]["cpu"] == "16"
    text = phalanx("submit", "kubernetes", *workers, "--render")
    assert "# 2 ranks x (2 to train + 6 for data workers); --cpu" in text


def test_the_job_is_valid_and_its_pods_find_each_other(phalanx):
    service, job = rendered(phalanx, "kubernetes", *GPUS, "--pvc", "work:/workspace,sets:/data", "--queue", "team")
    for thing in (service, job):
        validate(thing)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert pod["subdomain"] == service["metadata"]["name"] == "demo"
    assert service["spec"]["publishNotReadyAddresses"], "pods look for the first one before it is ready"
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    container = pod["containers"][0]
    assert '--node-rank "$JOB_COMPLETION_INDEX" --rdzv-endpoint demo-0.demo:29400' in container["command"][2]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert {"name": "sets", "mountPath": "/data"} in container["volumeMounts"]
    assert pod["volumes"][0]["emptyDir"]["medium"] == "Memory"
    rules = {
        str(rule.get("onExitCodes", {}).get("values")): rule["action"] for rule in spec["podFailurePolicy"]["rules"]
    }
    assert rules == {"[2]": "FailJob", "[75]": "Ignore", "None": "Ignore"}
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"


def test_pods_have_few_rights(phalanx):
    (job,) = rendered(phalanx, "kubernetes", "digits", *IMAGE)
    pod = job["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    paths = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert paths == {"/dev/shm", "/tmp", "/workspace/runs"}, "what a run writes is on a volume"


def test_one_machine_needs_no_service(phalanx):
    (job,) = rendered(phalanx, "kubernetes", "digits", "--num-workers", "2", "--image", "x:1")
    validate(job)
    assert "rdzv" not in job["spec"]["template"]["spec"]["containers"][0]["command"][2]


def test_options_of_pods(phalanx):
    job = rendered(
        phalanx, "kubernetes", *GPUS, "--node-selector", "pool=gpu", "--tolerations", "gpu=1:NoSchedule,spot:NoExecute",
        "--priority-class", "high", "--image-pull-secret", "registry", "--rdma-resource", "rdma/hca=4", "--cpu", "32",
        "--memory", "64Gi", "--time-limit", "2h", "--checkpoint-frequency", "auto", "--env", "A=1", "--namespace", "ml",
        "--pvc", "work:/workspace",
    )[1]  # fmt: skip
    validate(job)
    pod = job["spec"]["template"]["spec"]
    assert job["spec"]["activeDeadlineSeconds"] == 7200
    assert pod["nodeSelector"] == {"pool": "gpu"}
    assert [each["operator"] for each in pod["tolerations"]] == ["Equal", "Exists"]
    assert pod["containers"][0]["resources"]["requests"]["rdma/hca"] == "4"
    assert {"name": "A", "value": "1"} in pod["containers"][0]["env"]


def test_claims_keep_apart_from_the_pods_own_volumes(phalanx, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("--pvc", "code:/workspace,my.data:/data", "--ship", "archive")
    *_, job = rendered(phalanx, "kubernetes", *TRAIN, *words)
    validate(job)
    found = {each["name"]: each for each in job["spec"]["template"]["spec"]["volumes"]}
    assert found["code"]["configMap"]["name"] == "demo-code"
    assert found["claim-code"]["persistentVolumeClaim"]["claimName"] == "code"
    assert found["my-data"]["persistentVolumeClaim"]["claimName"] == "my.data"


def test_a_jobset_is_valid(phalanx):
    (found,) = rendered(phalanx, "jobset", *TRAIN)
    validate(found)
    inside = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "demo"}, "spec": inside})
    assert "--rdzv-endpoint demo-node-0-0.demo:29400" in inside["template"]["spec"]["containers"][0]["command"][2]
    (rule,) = found["spec"]["failurePolicy"]["rules"]
    assert rule == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"]}
    first = inside["podFailurePolicy"]["rules"][0]
    assert (first["action"], first["onExitCodes"]["values"]) == ("FailJob", [2]), "so that exit code 2 ends the JobSet"


def test_rendering_is_the_same_twice_and_has_comments(phalanx):
    first, second = (phalanx("submit", "kubernetes", *TRAIN, "--job-name", "demo", "--render") for _ in range(2))
    assert first == second
    for line in ("parallelism: 2", "image: registry/phalanx:1", "sizeLimit: 8Gi", "runAsUser: 1000"):
        assert any(line in each and "  # " in each for each in first.splitlines()), line


def test_overrides_are_merged(phalanx, tmp_path):
    path = tmp_path / "more.yaml"
    path.write_text(
        "spec: {suspend: true, template: {spec: {enableServiceLinks: null, "
        "containers: [{name: train, tty: true}, {name: side, image: side:1}]}}}\n"
        "---\nkind: Service\nmetadata: {annotations: {a: b}}\n"
    )
    service, job = rendered(phalanx, "kubernetes", *TRAIN, "--overrides", str(path))
    validate(job)
    assert service["metadata"]["annotations"] == {"a": "b"}
    pod = job["spec"]["template"]["spec"]
    assert job["spec"]["suspend"] is True
    assert "enableServiceLinks" not in pod
    assert [(each["name"], each["image"]) for each in pod["containers"]] == [
        ("train", "registry/phalanx:1"),
        ("side", "side:1"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("spec: [", "is not valid YAML"),
        ("just text", "expected keys and values"),
        ("kind: Jbo\nspec: {}", "Did you mean 'Job'"),
        (None, "No such file"),
    ],
)
def test_wrong_overrides_are_refused(phalanx, tmp_path, text, said):
    path = tmp_path / "wrong.yaml"
    if text is not None:
        path.write_text(text)
    assert said in phalanx("submit", "kubernetes", *TRAIN, "--overrides", str(path), "--render", code=2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["digits"], "--image is not given"),
        ([*TRAIN, "--pvc", "work"], "'work' has no path"),
        ([*TRAIN, "--node-selector", "gpu"], "is not NAME=value"),
        ([*TRAIN, "--tolerations", "a:Never"], "expected KEY=value:NoSchedule"),
        ([*TRAIN, "--time-limit", "1m"], "would hardly train"),
        (
            ["--script", __file__, "--num-workers", "2", "--image", "x:1", "--time-limit", "2h"],
            "it saves no checkpoints",
        ),
        ([*TRAIN, "--nmespace", "x"], "--namespace"),
        ([*TRAIN, "--memory", "64GB"], "Write: --memory 64G (powers of 1000) or 64Gi (of 1024)"),
        ([*TRAIN, "--memory", "512m"], "--memory 512M (powers of 1000) or 512Mi"),
        ([*TRAIN, "--shm-size", "lots"], "--shm-size lots: not a quantity of Kubernetes"),
        ([*TRAIN, "--cpu", "4 cores"], "--cpu 4 or 500m"),
    ],
)
def test_wrong_options_are_refused(phalanx, words, said):
    assert said in phalanx("submit", "kubernetes", *words, "--render", code=2)


def test_a_job_from_submission_to_its_end(phalanx, server: KubeServer):
    said = phalanx("submit", "kubernetes", *TRAIN, "--job-name", "one")
    assert "submitted one as kubernetes job ml/one" in said
    assert server.kinds() == {"Service", "Secret", "Job"}
    secret = server.objects["ml", "secrets", "one"]
    assert len(secret["stringData"]["secret"]) == 64
    assert secret["metadata"]["ownerReferences"][0]["kind"] == "Job", "it is removed together with the job"
    assert "no pods yet" in phalanx("jobs", "show", "one")
    server.add_pod("one", 0, "Pending", conditions=[
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}
    ])  # fmt: skip
    assert "Unschedulable: 0/3 nodes are available" in phalanx("jobs", "show", "one")
    server.pods.clear()
    names = [server.add_pod("one", 0), server.add_pod("one", 1)]
    server.logs = {names[0]: ["from zero"], names[1]: ["from one", "and more"]}
    found = json.loads(phalanx("jobs", "show", "one", "--json"))
    assert (found["state"], found["nodes"]) == ("running", ["n0", "n1"])
    assert phalanx("jobs", "logs", "one").splitlines() == ["[0] from zero", "[1] from one", "[1] and more"]
    assert phalanx("jobs", "logs", "one", "--rank", "3").splitlines() == ["from one", "and more"], (
        "ranks 2 and 3 are in pod 1"
    )
    assert "no pod has rank 4" in phalanx("jobs", "logs", "one", "--rank", "4", code=2)
    assert "is not finished" in phalanx("submit", "kubernetes", *TRAIN, "--job-name", "one", code=2)
    server.end("Job", "Complete")
    assert sorted(phalanx("jobs", "logs", "one", "-f").splitlines()) == [
        "[0] from zero",
        "[1] and more",
        "[1] from one",
    ]
    assert "finished" in phalanx("jobs", "show", "one")


def test_an_image_that_does_not_exist_is_said(phalanx, server: KubeServer):
    phalanx("submit", "jobset", *TRAIN, "--job-name", "bad")
    waiting = {"reason": "ErrImagePull", "message": "registry/phalanx:1: not found"}
    status = {
        "name": "train",
        "image": "x",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"waiting": waiting},
    }
    server.add_pod("bad", 0, "Pending", containerStatuses=[status])
    assert "ErrImagePull: registry/phalanx:1: not found" in phalanx("jobs", "show", "bad")
    server.end("JobSet", "Failed", "FailedJobs")
    assert "failed (FailedJobs)" in phalanx("jobs", "show", "bad")


def test_cancel_removes_everything(phalanx, server: KubeServer, tmp_path):
    (tmp_path / "train.py").write_text("print('hi')\n")
    words = ["--script", "train.py", "--num-nodes", "2", "--num-workers", "2", *IMAGE, "--pvc", "work:/workspace"]
    phalanx("submit", "kubernetes", *words, "--job-name", "one")
    assert server.kinds() == {"Service", "Secret", "Job", "ConfigMap"}
    assert "cancelled one" in phalanx("jobs", "cancel", "one")
    assert not server.objects
    assert "cancelled" in phalanx("jobs")


def test_a_job_that_was_deleted_elsewhere_is_lost(phalanx, server: KubeServer):
    phalanx("submit", "kubernetes", *TRAIN, "--job-name", "one")
    server.objects.clear()
    assert "lost (not in namespace ml" in phalanx("jobs", "show", "one")


@pytest.mark.parametrize("kind", ["Job", "Service"])
def test_nothing_is_left_when_an_object_is_refused(phalanx, server: KubeServer, kind):
    server.refuse = {kind}
    said = phalanx("submit", "kubernetes", *TRAIN, "--job-name", "one", code=2)
    assert "is forbidden: exceeded quota" in said.splitlines()[0]
    assert not server.objects
    assert "no jobs were submitted" in phalanx("jobs")


def test_the_refusal_comes_first_where_objects_cannot_be_removed(phalanx, server: KubeServer, monkeypatch):
    def delete(self, thing):
        raise UsageError("cannot delete")

    monkeypatch.setattr("phalanx.tools.submit.kube_client.KubeClient.delete", delete)
    server.refuse = {"Job"}
    said = phalanx("submit", "kubernetes", *TRAIN, "--job-name", "one", code=2)
    assert "is forbidden: exceeded quota" in said
    assert "Service one was not removed: cannot delete" in said
    assert "Secret one was not removed: cannot delete" in said


def test_a_namespace_without_rights(phalanx, server: KubeServer):
    said = phalanx("submit", "kubernetes", *TRAIN, "--namespace", FORBIDDEN, code=2)
    assert 'is forbidden: User "ann" cannot post in the namespace "locked"' in said.splitlines()[0]
    assert not server.objects


def test_a_name_that_exists_in_the_cluster(phalanx, server: KubeServer):
    server.objects["ml", "jobs", "one"] = {"kind": "Job", "metadata": {"name": "one"}}
    said = phalanx("submit", "kubernetes", *TRAIN, "--job-name", "one", code=2)
    assert 'jobs "one" already exists' in said
    assert list(server.objects) == [("ml", "jobs", "one")], "the other job is left alone"


def test_more_gpus_than_a_node_has(phalanx, server: KubeServer):
    server.nodes = [{"metadata": {"name": "n1"}, "status": {"allocatable": {"nvidia.com/gpu": "4", "cpu": "8"}}}]
    words = [*GPUS, "--pvc", "work:/workspace"]
    said = phalanx("submit", "kubernetes", *words, code=2)
    assert "a pod asks for 8 nvidia.com/gpu, and the largest node has 4" in said
    server.nodes[0]["status"]["allocatable"]["nvidia.com/gpu"] = "8"
    said = phalanx("submit", "kubernetes", *words, "--dry-run")
    assert "server-side dry run" in said
    assert "# nothing was submitted" in said
    assert not server.objects


def test_no_cluster_is_said_with_what_was_looked_for(phalanx, tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    said = phalanx("submit", "kubernetes", *TRAIN, code=2)
    assert f"looked for {tmp_path / 'none'}" in said
    assert "service account" in said


def test_a_missing_package_is_said_with_its_extra(phalanx, server: KubeServer, monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    assert "phalanx[kubernetes]" in phalanx("submit", "kubernetes", *TRAIN, code=2)


def test_a_context_that_does_not_exist(phalanx, server: KubeServer):
    assert "there" in phalanx("submit", "kubernetes", *TRAIN, "--context", "there", code=2)


def test_a_server_that_does_not_answer(phalanx, server: KubeServer):
    server.server.shutdown()
    server.server.server_close()
    assert "no answer from the Kubernetes API server http://127.0.0.1" in phalanx(
        "submit", "kubernetes", *TRAIN, code=2
    )
