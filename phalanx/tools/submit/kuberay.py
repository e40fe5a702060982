"""KubeRay: a RayJob that runs a job on a cluster of its own, or a RayCluster that stays; for `phalanx submit ray`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from phalanx.errors import UsageError
from phalanx.tools.submit import pods
from phalanx.tools.submit.job import ClusterJob, JobRecord
from phalanx.tools.submit.kube_client import Object
from phalanx.tools.submit.kubernetes import OnKubernetes
from phalanx.tools.submit.pods import PodOptions
from phalanx.tools.submit.target import Status

IN_CLUSTER = ("--backend", "ray", "--address", "auto")
"""How train runs inside a cluster of Ray."""
_PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10001}
_STATES = {"Complete": "finished", "Failed": "failed", "Suspended": "queued", "Running": "running"}


class KubeRay(OnKubernetes):
    """Submits a RayJob or a RayCluster; the image has phalanx and Ray in it."""

    name = "ray"
    file = "raycluster.yaml"

    def __init__(self, options: PodOptions, kind: str) -> None:
        super().__init__(options)
        self.kind = kind

    def objects(self, job: ClusterJob) -> list[Object]:
        """Return the RayJob (which makes its own cluster) or the RayCluster."""
        about = {"metadata": pods.metadata(job, self.options)}
        if self.kind == "raycluster":
            return [{"apiVersion": "ray.io/v1", "kind": "RayCluster", **about, "spec": self._ray_cluster(job)}]
        spec = {
            "entrypoint": shlex.join(job.train_command("phalanx", *IN_CLUSTER)),
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 86400,
            **self.limit(job),
            "submitterPodTemplate": self._submitter(job),
            "rayClusterSpec": self._ray_cluster(job),
        }
        return [{"apiVersion": "ray.io/v1", "kind": "RayJob", **about, "spec": spec}]

    def _ray_cluster(self, job: ClusterJob) -> Object:
        """Return a head that runs no ranks, and one worker for each machine of the job."""
        head = self._pod(job, "head")
        container = head["spec"]["containers"][0]
        container["resources"] = {}
        container["ports"] = [{"name": name, "containerPort": port} for name, port in _PORTS.items()]
        count = dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), job.nodes)
        worker = {"groupName": "node", **count, "rayStartParams": {}, "template": self._pod(job, "worker")}
        start = {"dashboard-host": "0.0.0.0", "num-cpus": "0", "num-gpus": "0"}
        return {"headGroupSpec": {"rayStartParams": start, "template": head}, "workerGroupSpecs": [worker]}

    def _pod(self, job: ClusterJob, name: str) -> Object:
        """Return a pod of the cluster; KubeRay starts Ray in it."""
        found = pods.pod_template(job, self.options, "", name)
        del found["spec"]["restartPolicy"], found["spec"]["containers"][0]["command"]
        return found

    def _submitter(self, job: ClusterJob) -> Object:
        """Return the pod that hands the job to Ray and shows its output; KubeRay sets its command."""
        found = self._pod(job, "ray-job-submitter")
        found["spec"]["restartPolicy"] = "Never"
        found["spec"]["containers"][0]["resources"] = {}
        return found

    def state(self, found: Object) -> Status | None:
        """Return what KubeRay says: of a job its status, of a cluster whether it is ready."""
        status: dict[str, Any] = found.get("status", {})
        said = status.get("jobDeploymentStatus") or {"ready": "Running"}.get(status.get("state", ""), "")
        if said not in _STATES:
            return None
        words = (
            status.get("jobStatus") or status.get("state", ""),
            status.get("reason", ""),
            status.get("message", ""),
        )
        return Status(_STATES[said], ": ".join(word for word in words if word))

    def logs(self, record: JobRecord, *, follow: bool, rank: int | None) -> Iterator[str]:
        """Read the output of the pods; Ray chooses where ranks run, so one rank's is not a pod's."""
        if rank is not None:
            raise UsageError(
                "Ray chooses the pod of each rank, so --rank cannot name one",
                hint=f"The logs of the ranks are in {record.run_dir}/logs on the job's volume.",
            )
        return super().logs(record, follow=follow, rank=None)
