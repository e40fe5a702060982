"""Validation of Kubernetes objects against published schemas: core kinds, JobSet, TrainJob, PyTorchJob and MPIJob."""

from __future__ import annotations

import re
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
    """Check a job of the training operator v1 by the models of its own client; pods by the schema of Kubernetes."""
    models = pytest.importorskip("kubeflow.training.models")
    _read(models, f"KubeflowOrgV1{thing['kind']}", thing, thing["kind"])


def _read(models: Any, kind: str, value: Any, path: str) -> None:
    if inner := re.fullmatch(r"dict\(str, (.*)\)|list\[(.*)\]", kind):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            _read(models, inner[1] or inner[2], each, f"{path}.{key}")
    elif kind == "V1PodTemplateSpec":
        spec = {"restartPolicy": "OnFailure", **value["spec"]}
        whole = {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": "x"},
            "template": {**value, "spec": spec},
        }
        pytest.importorskip("kubernetes_validate").validate(whole, VERSION, strict=True)
    elif kind.startswith("Kubeflow"):
        model = getattr(models, kind)
        names = {given: name for name, given in model.attribute_map.items()}
        for key, each in value.items():
            assert key in names, f"{path}.{key} is not in the schema"
            _read(models, model.openapi_types[names[key]], each, f"{path}.{key}")
        model(**{names[key]: each for key, each in value.items()})  # required fields and limits
    else:
        plain = {"int": int, "str": str, "bool": bool}.get(kind)
        assert plain is None or type(value) is plain, f"{path}: {value!r} is not {kind}"


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
