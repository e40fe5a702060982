"""The pod that every target on Kubernetes runs: one node of the job, with one launcher in it. And its options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from phalanx.config.option import option
from phalanx.errors import UsageError
from phalanx.host.job_secret import VARIABLE
from phalanx.host.remote import is_url
from phalanx.tools.submit.job import ClusterJob
from phalanx.tools.submit.job_files import shell_join, uv_lines
from phalanx.tools.submit.target import CommonOptions

PORT = 29400
"""Of the rendezvous; each pod has its own address."""
WORK = "/workspace"
SAVE_SECONDS = 120
"""How long a pod that is evicted may take to save."""
_CODE = "/tmp/code"
_NODE = "\0node"
_OWN_VOLUMES = ("shm", "tmp", "runs", "code")
RANKS = "phalanx-ranks-per-node"
"""The annotation by which `logs --rank` finds the pod of a rank."""


@dataclass(frozen=True, kw_only=True)
class PodOptions(CommonOptions):
    """Options of all targets on Kubernetes."""

    namespace: str | None = option(None, "namespace (default: that of the context)")
    context: str | None = option(None, "context of the kubeconfig (default: the current one)")
    image_pull_secret: str | None = option(None, "name of the secret by which the image is fetched")
    gpu_resource: str = option("nvidia.com/gpu", "resource by which a pod asks for GPUs")
    rdma_resource: str | None = option(None, "resource for RDMA cards: rdma/hca, or with a number: rdma/hca=8")
    cpu: str | None = option(None, "CPU cores of each pod, such as 32 or 500m")
    memory: str | None = option(None, "memory of each pod, such as 64Gi")
    shm_size: str = option("8Gi", "size of /dev/shm, which counts as the pod's memory")
    pvc: str | None = option(None, "volume claims and where ranks see them: CLAIM:/path,CLAIM:/path")
    node_selector: str | None = option(None, "labels of nodes: NAME=value,NAME=value")
    tolerations: str | None = option(None, "taints that are accepted: KEY=value:NoSchedule,KEY:NoExecute")
    priority_class: str | None = option(None, "name of a PriorityClass")
    queue: str | None = option(None, "local queue of Kueue, which then starts all pods together")
    overrides: str | None = option(None, "YAML file that is merged into the objects, by kind")


COMMENTS = {
    "spec.parallelism": "nodes: one pod for each",
    "spec.completions": "the same number",
    "backoffLimitPerIndex": "how often a pod may fail by itself; evictions and exit code 75 do not count",
    "ttlSecondsAfterFinished": "seconds after the end until the objects are removed",
    "activeDeadlineSeconds": "longest duration",
    "kueue.x-k8s.io/queue-name": "local queue of Kueue",
    "metadata.namespace": "namespace",
    "runAsUser": "must be able to read the code and to write the volumes",
    "terminationGracePeriodSeconds": "time to save when the pod is evicted",
    "nodeSelector": "labels of nodes",
    "priorityClassName": "who goes first",
    "whenUnsatisfiable": "DoNotSchedule: insist on one pod per node",
    "image": "must have phalanx in it",
    "workingDir": "where the ranks run",
    "limits.cpu": "CPU cores of the node",
    "limits.memory": "memory, /dev/shm included",
    "limits.nvidia.com/gpu": "one rank for each",
    "sizeLimit": "of /dev/shm, for data workers and ranks of one pod",
    "claimName": "must exist; ReadWriteMany for more than one pod",
    "emptyDir": "removed with the pod",
    "code.tar.gz": "a copy of this folder; its files: base64 --decode | tar --list --gzip",
    "medium": "in memory",
    "env": "variables of the ranks",
    "secretKeyRef": "ranks sign what they exchange; `phalanx submit` makes it",
}
"""Ends of paths to comments, for yaml_text.dump."""
_MEMORY = r"\d+(\.\d+)?([kMGTPE]|[KMGTPE]i)?"
_CORES = r"\d+(\.\d+)?m?"


def comments(job: ClusterJob, options: PodOptions) -> dict[str, str]:
    """Return all comments; those on what a pod asks for say where the numbers come from."""
    cpu = "CPU cores of the node" if options.cpu else f"{job.cores[1]}; --cpu gives another number"
    memory = f"{_gib_per_rank(job)}Gi for each rank; --memory gives another number, and a limit"
    memory_note = "memory, /dev/shm included"
    return {**COMMENTS, "requests.cpu": cpu, "requests.memory": memory_note if options.memory else memory}


def folder_of(job: ClusterJob, options: CommonOptions) -> str:
    """Return the folder in which ranks of a container run."""
    return options.directory or WORK


def script(
    job: ClusterJob, options: CommonOptions, *, node: str, host: str, before: str = "", extra: tuple[str, ...] = ()
) -> str:
    """Return the shell lines of one pod: wait for the name of the first pod, then become the launcher."""
    lines, more = [before] if before else [], [*extra]
    work = folder_of(job, options)
    if options.ship == "archive":
        lines.append(f"mkdir -p {_CODE} && tar -xzf /phalanx-code/code.tar.gz -C {_CODE} && cd {_CODE} || exit 1")
        more += job.kept_flags(work)
    if options.uv:
        lines += uv_lines(options, _CODE if options.ship == "archive" else work)
    if job.nodes > 1:
        lines.append(f"until getent hosts {host} >/dev/null; do sleep 1; done")
        more += ["--node-rank", _NODE, "--rdzv-endpoint", f"{host}:{PORT}"]
    command = shell_join(job.train_command("phalanx", *more), {_NODE: f'"{node}"'})
    return "\n".join([*lines, f"exec {command}"]) + "\n"


def pod_template(job: ClusterJob, options: PodOptions, text: str, container: str = "train") -> dict[str, Any]:
    """Return the template of one pod."""
    spec = {
        "imagePullSecrets": [{"name": options.image_pull_secret}] if options.image_pull_secret else None,
        "nodeSelector": _pairs("--node-selector", options.node_selector) or None,
        "tolerations": [_toleration(part) for part in _parts(options.tolerations)] or None,
        "priorityClassName": options.priority_class,
    }
    return {
        "metadata": {"labels": labels(job)},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": SAVE_SECONDS,
            **{key: value for key, value in spec.items() if value is not None},
            "topologySpreadConstraints": [_spread(job)],
            "securityContext": security(),
            "containers": [pod_container(job, options, text, container)],
            "volumes": volumes(job, options),
        },
    }


def _spread(job: ClusterJob) -> dict[str, Any]:
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels(job)},
    }


def labels(job: ClusterJob) -> dict[str, str]:
    """Return labels of all objects of a job."""
    return {"app.kubernetes.io/name": "phalanx", "app.kubernetes.io/instance": job.name}


def metadata(job: ClusterJob, options: PodOptions) -> dict[str, Any]:
    """Return the metadata of an object."""
    queue = {"kueue.x-k8s.io/queue-name": options.queue} if options.queue else {}
    namespace = {"namespace": options.namespace} if options.namespace else {}
    return {
        "name": job.name,
        **namespace,
        "labels": {**labels(job), **queue},
        "annotations": {RANKS: f"{job.ranks_per_node}"},
    }


def security() -> dict[str, Any]:
    """Return the security context of a pod: not root."""
    user = {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}
    return {"runAsNonRoot": True, **user, "seccompProfile": {"type": "RuntimeDefault"}}


def pod_container(job: ClusterJob, options: PodOptions, text: str, name: str) -> dict[str, Any]:
    """Return the container with the launcher."""
    lock = {"add": ["IPC_LOCK"]} if options.rdma_resource else {}
    return {
        "name": name,
        "image": options.image,
        "command": ["/bin/sh", "-c", text],
        "workingDir": folder_of(job, options),
        "env": variables(job),
        "resources": resources(job, options),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], **lock},
        },
        "volumeMounts": mounts(job, options),
    }


def variables(job: ClusterJob) -> list[dict[str, Any]]:
    """Return the environment of a pod; the root file system is read-only, so caches are in /tmp."""
    plain = {"HOME": "/tmp", "USER": "phalanx", **job.environment}
    secret = {"name": job.name, "key": "secret", "optional": True}
    return [
        *({"name": name, "value": value} for name, value in plain.items()),
        {"name": VARIABLE, "valueFrom": {"secretKeyRef": secret}},
    ]


def resources(job: ClusterJob, options: PodOptions) -> dict[str, Any]:
    """Return what a pod asks for; what is given is a limit, too, and without it ranks use what the node has."""
    requested = {"cpu": options.cpu, "memory": options.memory}
    limits = {key: value for key, value in requested.items() if value}
    least = {
        "cpu": f"{job.ranks_per_node * job.cores[0]}",
        "memory": f"{job.ranks_per_node * _gib_per_rank(job)}Gi",
    }
    if job.device == "cuda":
        limits[options.gpu_resource] = str(job.ranks_per_node)
    if options.rdma_resource:
        name, _, count = options.rdma_resource.partition("=")
        limits[name] = count or "1"
    return {"requests": {**least, **limits}, **({"limits": limits} if limits else {})}


def _gib_per_rank(job: ClusterJob) -> int:
    return 4 if job.device == "cuda" else 1


def check_quantities(options: PodOptions) -> None:
    """Refuse numbers that Kubernetes would not read, such as 64GB."""
    texts = {"--memory": (options.memory, _MEMORY), "--shm-size": (options.shm_size, _MEMORY)}
    for flag, (text, form) in {"--cpu": (options.cpu, _CORES), **texts}.items():
        if text is not None and not re.fullmatch(form, text):
            parts = re.match(r"(\d+(?:\.\d+)?)\s*([kmgtpe]?)", text.lower())
            number, letter = parts.groups() if parts else ("64", "g")
            unit = letter.upper() or "G"
            right = (
                f"{number} or 500m"
                if form == _CORES
                else f"{number}{unit} (powers of 1000) or {number}{unit}i (of 1024)"
            )
            raise UsageError(f"{flag} {text}: not a quantity of Kubernetes", hint=f"Write: {flag} {right}.")


def _claims(options: PodOptions) -> dict[str, str]:
    """Return claims by the path where ranks see them."""
    pairs = [part.partition(":") for part in _parts(options.pvc)]
    if wrong := [claim for claim, _, path in pairs if not claim or not path.startswith("/")]:
        raise UsageError(f"--pvc {options.pvc}: {wrong[0]!r} has no path", hint="Write: --pvc CLAIM:/workspace")
    return {path: claim for claim, _, path in pairs}


def _places(job: ClusterJob, options: PodOptions) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return volumes by the path of their mount: name and source."""
    volumes: dict[str, tuple[str, dict[str, Any]]] = {
        "/dev/shm": ("shm", {"emptyDir": {"medium": "Memory", "sizeLimit": options.shm_size}}),
        "/tmp": ("tmp", {"emptyDir": {}}),
    }
    claims = _claims(options)
    for path, claim in claims.items():
        label = claim.replace(".", "-")  # volumes have stricter names than claims
        name = f"claim-{label}" if label in _OWN_VOLUMES else label
        volumes[path] = (name, {"persistentVolumeClaim": {"claimName": claim}})
    run_folder = PurePosixPath(folder_of(job, options), job.run_dir)
    if not any(run_folder.is_relative_to(path) for path in [*claims, "/tmp"]):
        volumes[str(run_folder.parent)] = ("runs", {"emptyDir": {}})
    if options.ship == "archive":
        volumes["/phalanx-code"] = ("code", {"configMap": {"name": f"{job.name}-code"}})
    return volumes


def lost_with_pod(job: ClusterJob, options: CommonOptions, objects: Any) -> str:
    """Return the folder of the checkpoints where it is not on a volume that outlives a pod; empty where it is."""
    checkpoints = job.kept_flags(folder_of(job, options))[-1]
    mounted, sources = dict[str, str](), dict[str, Any]()
    waiting = [objects]
    while waiting:  # pods are at different places in the objects, and overrides add volumes
        node = waiting.pop()
        waiting += node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
        if isinstance(node, dict):
            mounted |= {mount["mountPath"]: mount["name"] for mount in node.get("volumeMounts") or []}
            sources |= {volume["name"]: volume for volume in node.get("volumes") or []}
    places = [path for path in mounted if PurePosixPath(checkpoints).is_relative_to(path)]
    source = sources.get(mounted[max(places, key=len)], {}) if places else {"emptyDir": {}}
    return "" if is_url(checkpoints) or "emptyDir" not in source else checkpoints


def volumes(job: ClusterJob, options: PodOptions) -> list[dict[str, Any]]:
    """Return the volumes of a pod; a claim that is seen at two paths is one."""
    return list({name: {"name": name, **source} for name, source in _places(job, options).values()}.values())


def mounts(job: ClusterJob, options: PodOptions) -> list[dict[str, Any]]:
    """Return where a container sees the volumes."""
    return [{"name": name, "mountPath": path} for path, (name, _) in _places(job, options).items()]


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _pairs(flag: str, text: str | None) -> Mapping[str, str]:
    pairs = [part.partition("=") for part in _parts(text)]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise UsageError(f"{flag} {text}: {wrong[0]!r} is not NAME=value", hint=f"Write: {flag} pool=gpu")
    return {name: value for name, _, value in pairs}


def _toleration(text: str) -> dict[str, str]:
    rest, _, effect = text.partition(":")
    key, equals, value = rest.partition("=")
    if effect not in ("", "NoSchedule", "PreferNoSchedule", "NoExecute") or not key:
        raise UsageError(f"--tolerations {text}: expected KEY=value:NoSchedule, PreferNoSchedule or NoExecute")
    toleration = {"key": key, **({"operator": "Equal", "value": value} if equals else {"operator": "Exists"})}
    return {**toleration, **({"effect": effect} if effect else {})}
