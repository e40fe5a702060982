"""Kubernetes: an Indexed Job with a headless Service, or a JobSet; and what all targets on Kubernetes share."""

from __future__ import annotations

import base64
import secrets
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from phalanx.errors import EXIT_PREEMPTED, EXIT_USAGE, UsageError
from phalanx.observe.guard import say_to_user
from phalanx.tools.submit import pods
from phalanx.tools.submit.job import ENDED, ClusterJob, JobRecord
from phalanx.tools.submit.job_files import archive, limit_seconds
from phalanx.tools.submit.kube_client import KubeClient, Object, follow_pods
from phalanx.tools.submit.pods import PodOptions
from phalanx.tools.submit.target import Status, Target
from phalanx.tools.submit.yaml_text import dump, load, override, parse

LARGEST_CODE = 750_000
"""Bytes of shipped code: a ConfigMap holds 1 MiB, of which base64 makes a third more."""
INDEX = "batch.kubernetes.io/job-completion-index"
_RETRIES = 6
_KEEP_SECONDS = 24 * 3600
_NEVER_AGAIN = {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"]}
"""Without it a JobSet starts all pods again after wrong settings (exit code 2) and after its time limit."""
_FINISHED = ("Complete", "Completed", "Succeeded")


class OnKubernetes(Target[PodOptions]):
    """What targets on Kubernetes share: the files, the client, the states. A target says which objects there are."""

    options_class = PodOptions
    is_contained = True
    sees_folder = False
    file: ClassVar[str] = "kubernetes.yaml"
    selector: str = "app.kubernetes.io/instance"
    """The label with the job's name that its pods have."""

    @abstractmethod
    def objects(self, job: ClusterJob) -> list[Object]:
        """Return the objects, the job itself last."""

    def render(self, job: ClusterJob) -> dict[str, str]:
        """Return the objects as YAML."""
        if self.options.image is None:
            raise UsageError(
                f"{self.name} runs containers, and --image is not given",
                hint="Build one with deploy/Dockerfile, then: --image registry/phalanx:1",
            )
        pods.check_quantities(self.options)
        of_job = self.objects(job)
        code = [_code(job, self.options)] if self.options.ship == "archive" else []
        documents = override([*code, *of_job], self.options.overrides)
        if lost := pods.lost_with_pod(job, self.options, documents):
            keep = f"--pvc CLAIM:{pods.folder_of(job, self.options)} or --checkpoint-dir s3://BUCKET/{job.name}"
            if job.nodes > 1:
                raise UsageError(
                    f"{job.nodes} pods do not share {lost}: each has its own, which is removed with it",
                    hint=f"Write: {keep}. Several pods mount a claim that is ReadWriteMany.",
                )
            say_to_user(f"{lost} is removed with the pod, and one that replaces it starts anew. To keep it: {keep}")
        return {self.file: dump(documents, pods.comments(job, self.options), job.origin(self.name, self.options))}

    def limit(self, job: ClusterJob) -> dict[str, int]:
        """Return the time limit as a field of a spec."""
        seconds = limit_seconds(job, self.options, pods.SAVE_SECONDS)
        return {} if seconds is None else {"activeDeadlineSeconds": seconds}

    def _cluster(self) -> KubeClient:
        return KubeClient(self.options.context, self.options.namespace)

    def check(self, job: ClusterJob, files: Mapping[str, str]) -> list[str]:
        """Let the API server check the objects, and compare the GPUs with those of the nodes."""
        cluster, options = self._cluster(), self.options
        documents = parse(files[self.file])
        for thing in documents:
            cluster.create(thing, dry_run=True)
        kinds = " and ".join(thing["kind"] for thing in documents)
        checked = [f"{cluster.server} accepts {kinds} in namespace {cluster.namespace} (server-side dry run)"]
        largest = cluster.largest(options.gpu_resource) if job.device == "cuda" else None
        if largest is not None and largest < job.ranks_per_node:
            raise UsageError(
                f"a pod asks for {job.ranks_per_node} {options.gpu_resource}, and the largest node has {largest}",
                hint=f"Use more nodes with fewer ranks: --gpus-per-node {max(largest, 1)}.",
            )
        return [*checked, *([f"a node has {largest} {options.gpu_resource}"] if largest is not None else [])]

    def submit(self, job: ClusterJob, folder: Path) -> str:
        """Create the objects; when one is refused, those before it are removed."""
        cluster, created = self._cluster(), list[Object]()
        try:
            for thing in [_secret(job), *load(folder / self.file)]:
                created.append({**thing, "metadata": cluster.create(thing)["metadata"]})
            for thing in created[:-1]:  # they are removed together with the job
                cluster.own(thing, created[-1])
        except BaseException:
            for thing in reversed(created):
                try:
                    cluster.delete(thing)
                except UsageError as error:  # why the submission failed is the error to report
                    say_to_user(f"{thing['kind']} {thing['metadata']['name']} was not removed: {error.message}")
            raise
        return f"{cluster.namespace}/{job.name}"

    def _main(self, record: JobRecord) -> Object:
        return load(Path(record.folder) / self.file)[-1]

    def status(self, record: JobRecord) -> Status:
        """Ask for the job's conditions, and for its pods where there are none."""
        cluster = self._cluster()
        thing = cluster.get(self._main(record))
        if thing is None:
            return Status("lost", f"not in namespace {cluster.namespace}: deleted, or removed some time after its end")
        state = self.state(thing)
        if state is not None and state.state in ENDED:
            return state
        listed = cluster.pods(f"{self.selector}={record.name}")
        return state or _state_of_pods(listed)

    def state(self, thing: Object) -> Status | None:
        """Return the state that conditions say; None while they say nothing."""
        conditions = [
            condition
            for condition in thing.get("status", {}).get("conditions", [])
            if condition.get("status") == "True"
        ]
        for condition in conditions:
            detail = ": ".join(text for text in (condition.get("reason", ""), condition.get("message", "")) if text)
            if condition["type"] in _FINISHED:
                return Status("finished", detail or condition["type"])
            if condition["type"] == "Failed":
                return Status("failed", detail or "Failed")
            if condition["type"] == "Suspended":
                return Status("queued", detail or "Suspended")
        return None

    def logs(self, record: JobRecord, *, follow: bool, rank: int | None) -> Iterator[str]:
        """Read the output of the pods: of all, each line with the number of its node, or of one rank's."""
        cluster, main = self._cluster(), self._main(record)
        ranks = int(main["metadata"].get("annotations", {}).get(pods.RANKS, 1))
        node = None if rank is None else rank // ranks
        selector = f"{self.selector}={record.name}"
        lines = self._following(cluster, selector, record) if follow else self._written(cluster, selector)
        for pod, line in lines:
            number = self.node(pod)
            if node is None or number == node:
                yield line if node is not None else f"[{number}] {line}"
        if node is not None and node not in map(self.node, cluster.pods(selector)):
            raise UsageError(f"no pod has rank {rank}: there are {ranks} per pod", hint="See: phalanx jobs show JOB")

    def node(self, pod: Object) -> int:
        """Return which node of the job a pod is."""
        return int(pod["metadata"].get("labels", {}).get(INDEX, 0))

    def _following(self, cluster: KubeClient, selector: str, record: JobRecord) -> Iterator[tuple[Object, str]]:
        return follow_pods(cluster, selector, lambda: self.status(record).state in ENDED)

    def _written(self, cluster: KubeClient, selector: str) -> Iterator[tuple[Object, str]]:
        for pod in sorted(cluster.pods(selector), key=self.node):
            if pod["status"].get("phase") != "Pending":
                yield from ((pod, line) for line in cluster.log(pod["metadata"]["name"], follow=False))

    def cancel(self, record: JobRecord) -> None:
        """Delete the objects; pods get SIGTERM and time to save."""
        cluster = self._cluster()
        for thing in reversed(load(Path(record.folder) / self.file)):
            cluster.delete(thing)
        cluster.delete({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": record.name}})


def _secret(job: ClusterJob) -> Object:
    """Return what is not shown: the secret by which ranks sign."""
    secret = {"stringData": {"secret": secrets.token_hex(32)}}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": job.name, "labels": pods.labels(job)}, **secret}


def _code(job: ClusterJob, options: PodOptions) -> Object:
    """Return the code that is shipped; refuse more than an object of Kubernetes holds."""
    _, content = archive(Path.cwd(), job.files)
    if len(content) > LARGEST_CODE:
        raise UsageError(
            f"the code in {Path.cwd()} is {len(content):,} bytes as an archive, and a ConfigMap holds {LARGEST_CODE:,}",
            hint="Data is not shipped: keep it outside, or list it in .gitignore. Or have the code in the image "
            "(deploy/Dockerfile) or on a volume (--pvc CLAIM:/workspace), and write: --ship folder",
        )
    about = {**pods.metadata(job, options), "name": f"{job.name}-code"}
    packed = {"binaryData": {"code.tar.gz": base64.encodebytes(content).decode()}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, **packed}


class Kubernetes(OnKubernetes):
    """Submits an Indexed Job, whose pods find each other by a headless Service."""

    name = "kubernetes"

    def objects(self, job: ClusterJob) -> list[Object]:
        """Return Service and Job; one node needs no Service."""
        about = pods.metadata(job, self.options)
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {key: value for key, value in about.items() if key != "annotations"},
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": pods.labels(job),
                "ports": [{"name": "rendezvous", "port": pods.PORT}],
            },
        }
        spec = job_spec(self, job, f"{job.name}-0.{job.name}")
        spec["template"]["spec"]["subdomain"] = job.name
        main = {"apiVersion": "batch/v1", "kind": "Job", "metadata": about}
        return [
            *([service] if job.nodes > 1 else []),
            {**main, "spec": {"ttlSecondsAfterFinished": _KEEP_SECONDS, **spec}},
        ]


class JobSet(OnKubernetes):
    """Submits a JobSet: its controller makes the Service, and starts all pods again when one cannot go on."""

    name = "jobset"
    file = "jobset.yaml"

    def objects(self, job: ClusterJob) -> list[Object]:
        """Return the JobSet, with the same Job in it."""
        spec = job_spec(self, job, f"{job.name}-node-0-0.{job.name}")
        return [
            {
                "apiVersion": "jobset.x-k8s.io/v1alpha2",
                "kind": "JobSet",
                "metadata": pods.metadata(job, self.options),
                "spec": {
                    "ttlSecondsAfterFinished": _KEEP_SECONDS,
                    "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": job.name},
                    "failurePolicy": {"maxRestarts": _RETRIES, "rules": [_NEVER_AGAIN]},
                    "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": spec}}],
                },
            }
        ]


def job_spec(target: OnKubernetes, job: ClusterJob, host: str) -> Object:
    """Return the spec of an Indexed Job: one pod per node, and what its exit codes mean."""
    text = pods.script(job, target.options, node="$JOB_COMPLETION_INDEX", host=host)
    codes = {"containerName": "train", "operator": "In"}
    return {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimitPerIndex": _RETRIES,
        "maxFailedIndexes": 0,
        **target.limit(job),
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {**codes, "values": [EXIT_USAGE]}},
                {"action": "Ignore", "onExitCodes": {**codes, "values": [EXIT_PREEMPTED]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": pods.pod_template(job, target.options, text),
    }


def _state_of_pods(listed: list[Object]) -> Status:
    """Return the state that pods say: running when one runs; else why the first that waits does."""
    nodes = tuple(dict.fromkeys(pod["spec"]["nodeName"] for pod in listed if pod["spec"].get("nodeName")))
    phases = [pod["status"].get("phase") for pod in listed]
    reason = next((text for pod in listed if (text := _waiting(pod))), "")
    counts = ", ".join(f"{phases.count(phase)} {phase}" for phase in dict.fromkeys(phases))
    detail = "; ".join(text for text in (counts and f"pods: {counts}", reason) if text)
    return Status("running" if "Running" in phases else "queued", detail or "no pods yet", nodes)


def _waiting(pod: Object) -> str:
    """Return why a pod does not run: its image, or no node for it."""
    for entry in pod["status"].get("containerStatuses", []):
        if (waiting := entry.get("state", {}).get("waiting")) and waiting.get("message"):
            return f"{waiting.get('reason')}: {waiting['message']}"
    for entry in pod["status"].get("conditions", []):
        if entry.get("status") == "False" and entry.get("message") and pod["status"].get("phase") == "Pending":
            return f"{entry.get('reason')}: {entry['message']}"
    return ""
