"""The calls to a Kubernetes API server that targets need, through the package `kubernetes`; its errors in our words."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from phalanx.errors import UsageError

_POLL_SECONDS = 1.0
_CORE = {"Service": "service", "Secret": "secret", "ConfigMap": "config_map"}
"""Kinds of the core group, as the client's methods name them."""
Object = dict[str, Any]


class KubeClient:
    """One namespace of one cluster."""

    def __init__(self, context: str | None, namespace: str | None) -> None:
        try:
            from kubernetes import client, config
            from yaml import YAMLError
        except ModuleNotFoundError:
            raise UsageError(
                "submitting to Kubernetes needs the package kubernetes, which is not installed",
                hint="Run: pip install 'phalanx[kubernetes]'; --render needs no package but pyyaml.",
            ) from None
        settings, path = client.Configuration(), os.path.expanduser(os.environ.get("KUBECONFIG") or "~/.kube/config")
        self.namespace = namespace or "default"
        try:
            if any(map(os.path.exists, path.split(os.pathsep))):
                config.load_kube_config(config_file=path, context=context, client_configuration=settings)
                self.namespace = namespace or _namespace_of(config.list_kube_config_contexts(path), context)
            else:
                config.load_incluster_config(client_configuration=settings)
        except YAMLError as error:
            raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
        except config.ConfigException as error:
            raise UsageError(
                f"no Kubernetes cluster is configured: {error} (looked for {path}, and for a pod's service account)",
                hint="Set KUBECONFIG, or give --context NAME; --render needs no cluster.",
            ) from None
        settings.retries = 1
        self._api = client.ApiClient(settings)
        self._core, self._any = client.CoreV1Api(self._api), client.CustomObjectsApi(self._api)
        self.server: str = settings.host

    def create(self, thing: Object, *, dry_run: bool = False) -> Object:
        """Create an object; with `dry_run` the server only checks it."""
        with self._answers():
            return self._call("create", thing, body=thing, **({"dry_run": "All"} if dry_run else {}))

    def get(self, thing: Object) -> Object | None:
        """Return an object as the server has it; None where it does not exist."""
        with self._answers():
            return self._found("get", thing, name=_name(thing))

    def delete(self, thing: Object) -> None:
        """Delete an object and all that belongs to it; one that does not exist is not an error."""
        with self._answers():
            self._found("delete", thing, name=_name(thing), propagation_policy="Background")

    def own(self, thing: Object, owner: Object) -> None:
        """Let an object be removed together with another."""
        reference = {key: owner[key] for key in ("apiVersion", "kind")}
        reference |= {key: owner["metadata"][key] for key in ("name", "uid")}
        change = {"metadata": {"ownerReferences": [reference]}}
        with self._answers():
            self._call("patch", thing, name=_name(thing), body=change)

    def pods(self, selector: str) -> list[Object]:
        """Return the pods with a label, the oldest first."""
        with self._answers():
            answer = self._core.list_namespaced_pod(self.namespace, label_selector=selector)
        plain = [self._api.sanitize_for_serialization(item) for item in answer.items]
        return sorted(plain, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))

    def largest(self, resource: str) -> int | None:
        """Return how much of a resource the largest node has; None where nodes may not be listed."""
        from kubernetes.client import ApiException

        with self._answers():
            try:
                nodes = self._core.list_node().items
            except ApiException as error:
                if error.status == 403:
                    return None
                raise
        return max([int((node.status.allocatable or {}).get(resource, 0)) for node in nodes], default=0)

    def log(self, pod: str, *, follow: bool) -> Iterator[str]:
        """Return the lines of a pod's output."""
        with self._answers():
            stream = self._core.read_namespaced_pod_log(
                pod, self.namespace, follow=follow, _preload_content=False, _request_timeout=None
            )
            for line in stream:
                yield line.decode(errors="replace").rstrip("\n")

    def _found(self, verb: str, thing: Object, **more: Any) -> Object | None:
        from kubernetes.client import ApiException

        try:
            return self._call(verb, thing, **more)
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    def _call(self, verb: str, thing: Object, **more: Any) -> Object:
        """Call the client's method for a kind: one by one for the core group, the same for all others."""
        group, _, version = thing["apiVersion"].rpartition("/")
        where, kind = {"namespace": self.namespace}, "custom_object"
        if group:
            where |= {"group": group, "version": version, "plural": f"{thing['kind'].lower()}s"}
        else:
            kind = _CORE[thing["kind"]]
        answer = getattr(self._any if group else self._core, f"{verb}_namespaced_{kind}")(**where, **more)
        content: Object = self._api.sanitize_for_serialization(answer)
        return content

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """Report the server's own words."""
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        try:
            yield
        except ApiException as error:
            raise UsageError(
                f"Kubernetes: {_message(error)}", hint=f"Asked {self.server}, namespace {self.namespace}."
            ) from None
        except HTTPError as error:
            raise UsageError(f"no answer from the Kubernetes API server {self.server}: {error}") from None


def _namespace_of(contexts: tuple[list[Object], Object], name: str | None) -> str:
    used = next((context for context in contexts[0] if context["name"] == name), contexts[1])
    return str(used["context"].get("namespace", "default"))


def _name(thing: Object) -> str:
    return str(thing["metadata"]["name"])


def _message(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.status} {error.reason}"


def follow_pods(cluster: KubeClient, selector: str, has_ended: Callable[[], bool]) -> Iterator[tuple[Object, str]]:
    """Return lines of all pods of a job as they come, those of pods that replace others too, until the job ends."""
    lines: queue.Queue[tuple[Object, str] | Exception] = queue.Queue()
    threads: dict[str, threading.Thread] = {}

    def read(pod: Object) -> None:
        try:
            for line in cluster.log(_name(pod), follow=True):
                lines.put((pod, line))
        except UsageError as error:
            lines.put(error)

    while True:
        ended = has_ended()
        for pod in cluster.pods(selector):
            if pod["status"].get("phase") != "Pending" and _name(pod) not in threads:
                threads[_name(pod)] = threading.Thread(target=read, args=(pod,), daemon=True)
                threads[_name(pod)].start()
        until = time.monotonic() + _POLL_SECONDS
        while (
            (ended and any(thread.is_alive() for thread in threads.values()))
            or time.monotonic() < until
            or lines.qsize()
        ):
            try:
                item = lines.get(timeout=0.1)
            except queue.Empty:
                if ended and not any(thread.is_alive() for thread in threads.values()) and not lines.qsize():
                    return
                continue
            if isinstance(item, Exception):
                raise item
            yield item
        if ended:
            return
