"""`phalanx submit kubeflow`, and the objects of KubeRay, against published models and schemas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from packages import on_first_use

from phalanx.cli import main
from phalanx.cli.submit import describe_job
from phalanx.tools.submit.pods import PodOptions
from phalanx.tools.submit.ray import KubeRay

kubernetes = on_first_use("kubernetes")
yaml = pytest.importorskip("yaml")

from kube_schema import VERSION, validate  # noqa: E402
from kube_server import KubeServer, kube_server  # noqa: E402

TRAIN = ["digits", "--num-nodes", "2", "--gpus-per-node", "8", "--device", "cuda"]
MORE = ["--image", "registry/phalanx:1", "--pvc", "work:/workspace", "--time-limit", "2h", "--job-name", "demo"]


def rendered(capsys, *words: str) -> list[dict]:
    assert main(["submit", "kubeflow", *TRAIN, *MORE, *words, "--render"]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob", "mpijob"])
def test_objects_follow_the_published_models(capsys, kind):
    if kind != "trainjob":
        pytest.importorskip("kubeflow.training")
    for thing in rendered(capsys, "--kind", kind):
        validate(thing)


def test_a_trainjob_patches_what_its_trainer_lacks(capsys):
    (job,) = rendered(capsys, "--runtime", "my-torch")
    spec = job["spec"]
    assert spec["runtimeRef"] == {"name": "my-torch"}
    assert spec["trainer"]["numNodes"] == 2
    assert spec["activeDeadlineSeconds"] == 7200
    assert "--rdzv-endpoint demo-node-0-0.demo:29400" in spec["trainer"]["command"][2]
    pod = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert pod["template"]["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["template"]["spec"]["containers"][0]["name"] == "node", "the container of the runtime"


def test_a_pytorchjob_starts_one_launcher_per_machine(capsys):
    (job,) = rendered(capsys, "--kind", "pytorchjob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert (replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == (1, 1)
    assert replicas["Worker"]["restartPolicy"] == "OnFailure", "ExitCode would not start 75 again"
    script = replicas["Worker"]["template"]["spec"]["containers"][0]["command"][2]
    assert "unset RANK WORLD_SIZE" in script
    assert '--node-rank "$node" --rdzv-endpoint demo-master-0:29400' in script


def test_an_mpijob_starts_one_launcher_per_worker(capsys):
    service, job = rendered(capsys, "--kind", "mpijob")
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert "mpirun -n 2 --map-by ppr:1:node" in launcher["command"][2]
    assert "--rdzv-endpoint demo:29400" in launcher["command"][2]
    assert launcher["resources"] == {}, "GPUs belong to the workers"
    assert service["spec"]["selector"]["training.kubeflow.org/replica-index"] == "0"


def test_unknown_kinds_are_refused(capsys):
    assert main(["submit", "kubeflow", *TRAIN, *MORE, "--kind", "tfjob", "--render"]) == 2
    assert "trainjob" in capsys.readouterr().err
    assert main(["submit", "kubeflow", *TRAIN, *MORE, "--kind", "mpijob", "--ship", "archive", "--render"]) == 2
    assert "--ship archive: kind mpijob" in capsys.readouterr().err


def test_a_trainjob_from_submission_to_its_end(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with kube_server(tmp_path) as (server, config):
        monkeypatch.setenv("KUBECONFIG", str(config))
        server.nodes = [{"metadata": {"name": "n1"}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}]
        assert main(["submit", "kubeflow", *TRAIN, *MORE]) == 0, capsys.readouterr().err
        assert server.kinds() == {"TrainJob", "Secret"}
        name = server.add_pod("demo", 1)
        server.pods[0]["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"] = "demo"
        server.logs[name] = ["trained"]
        capsys.readouterr()
        assert main(["jobs", "logs", "demo", "--rank", "9"]) == 0
        assert capsys.readouterr().out == "trained\n"
        server.end("TrainJob", "Failed", "DeadlineExceeded")
        assert main(["jobs", "show", "demo"]) == 0
        assert "failed (DeadlineExceeded)" in capsys.readouterr().out
        _deleted(server, capsys)


def _deleted(server: KubeServer, capsys) -> None:
    assert main(["jobs", "cancel", "demo"]) == 0
    assert "has ended already" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["RayJob", "RayCluster"])
def test_objects_of_kuberay(kind):
    job = describe_job(TRAIN, "demo")[0]
    (text,) = KubeRay(PodOptions(image="ray:1", pvc="work:/workspace"), kind.lower()).render(job).values()
    found = yaml.safe_load(text)
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", kind)
    schema = json.loads(Path(__file__).with_name("kuberay_schema.json").read_text())[kind]
    pytest.importorskip("jsonschema").validate(found["spec"], schema)
    cluster = found["spec"] if kind == "RayCluster" else found["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert (workers["replicas"], workers["maxReplicas"]) == (2, 2)
    templates = [cluster["headGroupSpec"]["template"], workers["template"]]
    if kind == "RayJob":
        assert found["spec"]["entrypoint"].startswith("phalanx train digits")
        assert "--backend ray" in found["spec"]["entrypoint"]
        templates.append(found["spec"]["submitterPodTemplate"])
    check = pytest.importorskip("kubernetes_validate").validate
    for template in templates:
        whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        check(whole, VERSION, strict=True)
    assert all(isinstance(value, str) for value in cluster["headGroupSpec"]["rayStartParams"].values())


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, "finished"),
        ({"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "message": "exit code 1"}, "failed"),
        ({"state": "ready"}, "running"),
    ],
)
def test_states_of_kuberay(status, state):
    found = KubeRay(PodOptions(image="x"), "rayjob").state({"status": status})
    assert found is not None
    assert found.state == state
