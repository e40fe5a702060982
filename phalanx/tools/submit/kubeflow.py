"""Kubeflow: a TrainJob of the trainer (v2), or a PyTorchJob or MPIJob of the training operator (v1)."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from phalanx.config.option import option
from phalanx.host.job_secret import VARIABLE
from phalanx.tools.submit import pods
from phalanx.tools.submit.job import ClusterJob
from phalanx.tools.submit.kube_client import Object
from phalanx.tools.submit.kubernetes import INDEX, OnKubernetes
from phalanx.tools.submit.pods import PodOptions

_LABELS = {
    "trainjob": "jobset.sigs.k8s.io/jobset-name",
    "pytorchjob": "training.kubeflow.org/job-name",
    "mpijob": "training.kubeflow.org/job-name",
}
_TYPE, _INDEX = "training.kubeflow.org/replica-type", "training.kubeflow.org/replica-index"


@dataclass(frozen=True, kw_only=True)
class KubeflowOptions(PodOptions):
    """Options of Kubeflow."""

    kind: str = option("trainjob", "trainjob (v2), pytorchjob or mpijob (v1)", choices=tuple(_LABELS))
    runtime: str = option("torch-distributed", "trainjob: the ClusterTrainingRuntime it starts from")


class Kubeflow(OnKubernetes):
    """Submits one of Kubeflow's kinds."""

    name = "kubeflow"
    options_class = KubeflowOptions
    options: KubeflowOptions
    file = "kubeflow.yaml"

    def __init__(self, options: KubeflowOptions) -> None:
        super().__init__(options)
        self.selector = _LABELS[options.kind]
        if options.kind == "mpijob":
            self.lacks_uv = "kind mpijob: mpirun starts the ranks in the environment of the image"
            self.lacks_ship = "kind mpijob: mpirun starts in the workers' folder"

    def objects(self, job: ClusterJob) -> list[Object]:
        """Return the object of the kind; v1's MPIJob needs a Service for its first worker."""
        return {"trainjob": self._trainjob, "pytorchjob": self._pytorchjob, "mpijob": self._mpijob}[self.options.kind](
            job
        )

    def node(self, pod: Object) -> int:
        """Return which node a pod is: the master, and after it the workers."""
        labels = pod["metadata"].get("labels", {})
        if INDEX in labels:
            return int(labels[INDEX])
        shift = 1 if self.options.kind == "pytorchjob" and labels.get(_TYPE) == "worker" else 0
        return int(labels.get(_INDEX, 0)) + shift

    def _trainjob(self, job: ClusterJob) -> list[Object]:
        """Return a TrainJob; what its trainer has no field for is a patch of the runtime's pods."""
        host = f"{job.name}-node-0-0.{job.name}"
        text = pods.script(job, self.options, node="$JOB_COMPLETION_INDEX", host=host)
        template = pods.pod_template(job, self.options, text, "node")
        whole, pod = template["spec"]["containers"][0], template["spec"]
        patched = ("imagePullSecrets", "nodeSelector", "tolerations", "terminationGracePeriodSeconds")
        patch = {
            **{key: pod[key] for key in (*patched, "securityContext", "volumes") if key in pod},
            "containers": [{key: whole[key] for key in ("name", "securityContext", "volumeMounts")}],
        }
        work = f"cd {shlex.quote(pods.folder_of(job, self.options))} || exit 1\n"
        trainer = {
            "image": self.options.image,
            "command": ["/bin/sh", "-c", work + text],
            "numNodes": job.nodes,
            "env": whole["env"],
            **({"resourcesPerNode": whole["resources"]} if whole["resources"] else {}),
        }
        jobs = [{"name": "node", "template": {"spec": {"template": {"metadata": template["metadata"], "spec": patch}}}}]
        spec = {
            "runtimeRef": {"name": self.options.runtime},
            **self.limit(job),
            "trainer": trainer,
            "runtimePatches": [
                {"manager": "phalanx", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
            ],
        }
        return [self._object(job, "trainer.kubeflow.org/v1alpha1", "TrainJob", spec)]

    def _object(self, job: ClusterJob, version: str, kind: str, spec: Object) -> Object:
        return {"apiVersion": version, "kind": kind, "metadata": pods.metadata(job, self.options), "spec": spec}

    def _policy(self, job: ClusterJob) -> Object:
        return {"cleanPodPolicy": "None", "backoffLimit": 6, "ttlSecondsAfterFinished": 86400, **self.limit(job)}

    def _pytorchjob(self, job: ClusterJob) -> list[Object]:
        """Return a PyTorchJob: a master and workers, each a launcher; RANK is the number of the node."""
        before = 'node="$RANK"; unset RANK WORLD_SIZE  # the launcher sets them for its ranks'
        text = pods.script(job, self.options, node="$node", host=f"{job.name}-master-0", before=before)
        # v1 restarts only codes above 127 under ExitCode, and 75 must be started again.
        replica = {"restartPolicy": "OnFailure", "template": self._template(job, text, "pytorch")}
        workers = {"Worker": {"replicas": job.nodes - 1, **replica}} if job.nodes > 1 else {}
        spec = {
            "runPolicy": self._policy(job),
            "pytorchReplicaSpecs": {"Master": {"replicas": 1, **replica}, **workers},
        }
        return [self._object(job, "kubeflow.org/v1", "PyTorchJob", spec)]

    def _template(self, job: ClusterJob, text: str, container: str) -> Object:
        template = pods.pod_template(job, self.options, text, container)
        del template["spec"]["restartPolicy"]  # the replica has one
        return template

    def _mpijob(self, job: ClusterJob) -> list[Object]:
        """Return an MPIJob whose mpirun starts one launcher per worker, and a Service that names the first worker."""
        names = [variable["name"] for variable in pods.variables(job) if "value" in variable]
        exports = [word for name in [*names, VARIABLE] for word in ("-x", name)]
        endpoint = ["--rdzv-endpoint", f"{job.name}:{pods.PORT}"] if job.nodes > 1 else []
        start = ["mpirun", "-n", str(job.nodes), "--map-by", "ppr:1:node", "--bind-to", "none", *exports]
        start += ["-x", f"MASTER_ADDR={job.name}"]
        launcher = self._template(
            job, f"exec {shlex.join([*start, *job.train_command('phalanx', *endpoint)])}\n", "mpi"
        )
        launcher["spec"]["containers"][0]["resources"] = {}
        launcher["spec"]["automountServiceAccountToken"] = True  # v1's mpirun starts workers by kubectl exec
        worker = self._template(job, "exec sleep infinity\n", "mpi")
        spec = {
            "slotsPerWorker": 1,
            "runPolicy": self._policy(job),
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "restartPolicy": "OnFailure", "template": launcher},
                "Worker": {"replicas": job.nodes, "restartPolicy": "OnFailure", "template": worker},
            },
        }
        first = {_LABELS["mpijob"]: job.name, _TYPE: "worker", _INDEX: "0"}
        service = self._object(job, "v1", "Service", {"clusterIP": "None", "publishNotReadyAddresses": True})
        service["spec"] |= {"selector": first, "ports": [{"name": "rendezvous", "port": pods.PORT}]}
        return [*([service] if job.nodes > 1 else []), self._object(job, "kubeflow.org/v1", "MPIJob", spec)]
