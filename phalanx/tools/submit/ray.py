"""Ray: the job API of a running cluster, or KubeRay's RayJob and RayCluster as YAML."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from phalanx.config.option import option
from phalanx.errors import UsageError, error_line
from phalanx.tools.submit import pods
from phalanx.tools.submit.job import ClusterJob, JobRecord
from phalanx.tools.submit.job_files import follow_files, own_limit, program_of, rank_log
from phalanx.tools.submit.kube_client import Object
from phalanx.tools.submit.kubernetes import OnKubernetes
from phalanx.tools.submit.pods import PodOptions
from phalanx.tools.submit.target import Status, Target

_STATES = {
    "PENDING": "queued",
    "RUNNING": "running",
    "STOPPED": "cancelled",
    "SUCCEEDED": "finished",
    "FAILED": "failed",
}
_RUNTIME = "runtime_env.json"
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class RayOptions(PodOptions):
    """Options of Ray; those of pods are for KubeRay."""

    address: str | None = option(None, "the head's dashboard, http://HEAD:8265 (default: RAY_API_SERVER_ADDRESS)")
    kind: str = option(
        "job",
        "job: on a cluster that runs (--address); rayjob, raycluster: YAML for KubeRay, which starts one",
        choices=("job", "rayjob", "raycluster"),
    )
    entrypoint_cpus: float = option(0.0, "cores that the command itself reserves, besides the ranks", minimum=0)


class RayJobs(Target[RayOptions]):
    """Submits through Ray's job API."""

    name = "ray"
    options_class = RayOptions
    lacks_uv = "ray: its nodes run ranks in the environment that Ray runs in"

    def __init__(self, options: RayOptions) -> None:
        super().__init__(options)
        if options.kind != "job":
            self.sees_folder, self.lacks_ship = False, f"kind {options.kind}: KubeRay starts pods without a copy of it"

    def render(self, job: ClusterJob) -> dict[str, str]:
        """Return the command that the cluster runs, or KubeRay's objects."""
        if self._kuberay is not None:
            return self._kuberay.render(job)
        lines = ["# runs on the head of the Ray cluster; the ranks are placed on all its nodes", "set -e"]
        if self.options.ship != "archive":
            lines.append(f"cd {shlex.quote(job.directory)}")
        words = job.train_command(program_of(self.options), *IN_CLUSTER, *own_limit(job, self.options))
        files = {"entrypoint.sh": "\n".join([*lines, f"exec {shlex.join(words)}"]) + "\n"}
        if job.environment:  # not in the script, which is a command line on the head
            files[_RUNTIME] = json.dumps({"env_vars": dict(job.environment)}, indent=1) + "\n"
        return files

    @property
    def _kuberay(self) -> KubeRay | None:
        """The target that a RayJob or a RayCluster is; None for a cluster that runs."""
        return None if self.options.kind == "job" else KubeRay(self.options, self.options.kind)

    def check(self, job: ClusterJob, files: Mapping[str, str]) -> list[str]:
        """Ask the cluster whether it takes jobs."""
        if self._kuberay is not None:
            return self._kuberay.check(job, files)
        version = self._call(lambda client: client.get_version())
        return [f"{self._address()} answers, with version {version} of the job API"]

    def submit(self, job: ClusterJob, folder: Path) -> str:
        """Submit the command; with --ship archive Ray copies the folder to the cluster."""
        if self._kuberay is not None:
            return self._kuberay.submit(job, folder)
        script = (folder / "entrypoint.sh").read_text(encoding="utf-8")
        environment = folder / _RUNTIME
        runtime: dict[str, Any] = json.loads(environment.read_text()) if environment.is_file() else {}
        if self.options.ship == "archive":
            runtime["working_dir"] = str(_unpacked(folder))
        job_id: str = self._call(
            lambda client: client.submit_job(
                entrypoint=f"bash -c {shlex.quote(script)}",
                submission_id=folder.name,
                runtime_env=runtime,
                metadata={"job": job.name},
                entrypoint_num_cpus=self.options.entrypoint_cpus or None,
            )
        )
        return job_id

    def status(self, record: JobRecord) -> Status:
        """Ask the job API."""
        if self._kuberay is not None:
            return self._kuberay.status(record)
        info = self._call(lambda client: client.get_job_info(record.id))
        state = str(getattr(info.status, "value", info.status))
        return Status(_STATES.get(state, "running"), error_line(state, str(info.message or "")))

    def logs(self, record: JobRecord, *, follow: bool, rank: int | None) -> Iterator[str]:
        """Return the output of the command, or the log of one rank."""
        if self._kuberay is not None:
            yield from self._kuberay.logs(record, follow=follow, rank=rank)
        elif rank is not None:
            path = rank_log(Path(record.directory) / record.run_dir, rank)
            yield from follow_files(lambda: [path], None)
        elif not follow:
            yield from self._call(lambda client: client.get_job_logs(record.id)).splitlines()
        else:
            yield from self._tail(record.id)

    def _tail(self, number: str) -> Iterator[str]:
        """Return lines as they come; the client's own method is asynchronous."""
        source = self._call(lambda client: client.tail_job_logs(number))
        rest = ""
        with asyncio.Runner() as runner:
            while True:
                try:
                    *lines, rest = (rest + runner.run(anext(source))).split("\n")
                except StopAsyncIteration:
                    break
                yield from lines
        if rest:
            yield rest

    def cancel(self, record: JobRecord) -> None:
        """Stop the job."""
        if self._kuberay is not None:
            self._kuberay.cancel(record)
            return
        self._call(lambda client: client.stop_job(record.id))

    def _address(self) -> str:
        address = self.options.address or os.environ.get("RAY_API_SERVER_ADDRESS")
        if not address or not address.startswith(("http://", "https://")):
            raise UsageError(
                f"--address {address}: expected the dashboard's URL" if address else "ray needs the cluster's address",
                hint="Write: --address http://HEAD:8265",
            )
        return address

    def _call(self, ask: Callable[[Any], Answer]) -> Answer:
        """Ask the cluster; its own answer, first line first, is the error."""
        address = self._address()
        try:
            from ray.job_submission import JobSubmissionClient
        except ImportError as error:
            raise UsageError(f"Ray's job client is missing: {error}", hint="pip install 'ray[default]'") from None
        try:
            return ask(JobSubmissionClient(address))
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            answer = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            raise UsageError(
                f"{address}: {answer[0]}",
                hint="Is the head's dashboard there? ray start --head --dashboard-host 0.0.0.0",
            ) from None


def _unpacked(folder: Path) -> Path:
    """Return the shipped code as a folder, which Ray packs itself."""
    code = folder / "code"
    for packed in folder.glob("code-*.tar.gz"):
        with tarfile.open(packed) as archive:
            if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and newer
                archive.extraction_filter = tarfile.data_filter
            archive.extractall(code)
    return code


IN_CLUSTER = ("--backend", "ray", "--address", "auto")
"""How train runs inside a cluster of Ray."""
_PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10001}
_RAYJOB_STATES = {"Complete": "finished", "Failed": "failed", "Suspended": "queued", "Running": "running"}


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
        """Return a head that runs no ranks, and one worker for each node of the job."""
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
        template = pods.pod_template(job, self.options, "", name)
        del template["spec"]["restartPolicy"], template["spec"]["containers"][0]["command"]
        return template

    def _submitter(self, job: ClusterJob) -> Object:
        """Return the pod that hands the job to Ray and shows its output; KubeRay sets its command."""
        template = self._pod(job, "ray-job-submitter")
        template["spec"]["restartPolicy"] = "Never"
        template["spec"]["containers"][0]["resources"] = {}
        return template

    def state(self, thing: Object) -> Status | None:
        """Return what KubeRay says: of a job its status, of a cluster whether it is ready."""
        status: dict[str, Any] = thing.get("status", {})
        deployment = status.get("jobDeploymentStatus") or {"ready": "Running"}.get(status.get("state", ""), "")
        if deployment not in _RAYJOB_STATES:
            return None
        words = (
            status.get("jobStatus") or status.get("state", ""),
            status.get("reason", ""),
            status.get("message", ""),
        )
        return Status(_RAYJOB_STATES[deployment], ": ".join(word for word in words if word))

    def logs(self, record: JobRecord, *, follow: bool, rank: int | None) -> Iterator[str]:
        """Read the output of the pods; Ray chooses where ranks run, so one rank's is not a pod's."""
        if rank is not None:
            raise UsageError(
                "Ray chooses the pod of each rank, so --rank cannot name one",
                hint=f"The logs of the ranks are in {record.run_dir}/logs on the job's volume.",
            )
        return super().logs(record, follow=follow, rank=None)
