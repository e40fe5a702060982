"""Validation of Kubernetes objects against published schemas: core kinds, JobSet, TrainJob, PyTorchJob and MPIJob."""

from __future__ import annotations

from typing import Any

import pytest

VERSION = "1.34"


def validate(thing: dict[str, Any]) -> None:
    """Raise an error where an object does not follow the published schema of its kind; unknown fields are errors."""
    group = thing["apiVersion"].rpartition("/")[0]
    if group in ("", "batch"):
        kubernetes_validate = pytest.importorskip("kubernetes_validate")
        kubernetes_validate.validate(thing, VERSION, strict=True)
    elif group in ("jobset.x-k8s.io", "trainer.kubeflow.org"):
        models = pytest.importorskip("kubeflow_trainer_api.models")
        kind = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob"}[thing["kind"]]
        same(thing, getattr(models, kind).from_dict(thing).to_dict())
    elif group == "kubeflow.org":
        training_job(thing)
    else:
        raise ValueError(f"no schema of {group}")


def training_job(thing: dict[str, Any]) -> None:
    """Read a job of the training operator v1 with the models of its own client, and compare what they keep."""
    kubernetes = pytest.importorskip("kubernetes")
    models = pytest.importorskip("kubeflow.training.models")
    import json
    from types import SimpleNamespace

    api = kubernetes.client.ApiClient()
    for name in dir(models):
        if not hasattr(kubernetes.client.models, name):
            setattr(kubernetes.client.models, name, getattr(models, name))
    kind = f"KubeflowOrgV1{thing['kind']}"
    read = api.deserialize(json.dumps(thing), kind, "application/json") if _takes_text(api) else None
    read = read or api.deserialize(SimpleNamespace(data=json.dumps(thing)), kind)
    same(thing, api.sanitize_for_serialization(read))


def _takes_text(api: Any) -> bool:
    import inspect

    return len(inspect.signature(api.deserialize).parameters) > 2


def same(given: Any, kept: Any, path: str = "") -> None:
    """Assert that nothing was dropped: models leave out what they do not know."""
    if isinstance(given, dict):
        assert isinstance(kept, dict), path
        for key, value in given.items():
            assert key in kept or value in ({}, []), f"{path}.{key} is not in the schema"
            same(value, kept.get(key, value), f"{path}.{key}")
    elif isinstance(given, list):
        assert len(given) == len(kept), path
        for number, (mine, theirs) in enumerate(zip(given, kept, strict=True)):
            same(mine, theirs, f"{path}[{number}]")
    else:
        assert str(given) == str(kept), f"{path}: {given!r} became {kept!r}"
