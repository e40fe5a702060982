"""The verbs of the command line, in the groups of its help, and how one is run."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

GROUPS = {
    "train": {
        "train": "train a recipe, a script or a module on N ranks",
        "resume": "continue a run from its last checkpoint",
        "tune": "search for the best hyperparameters, many trials at once",
        "init": "write a small project (model, data, recipe, test) that trains at once",
        "data": "pack images into shards, tokenize texts into shards, draw a set of images",
        "config": "show every setting, its value and where it comes from",
    },
    "watch": {
        "top": "show the ranks of a run while it trains: speed, waiting, memory, the slowest",
        "ui": "show runs as a web page or one file: curves compared, ranks, time, events, settings",
        "report": "show where the time of a run went, or of its profiled steps",
        "stacks": "print where every rank of a run is, with equal stacks grouped",
    },
    "use trained models": {
        "runs": "list, show, compare, name, tag, follow, stop, scale and remove runs",
        "evaluate": "measure a trained model on data",
        "predict": "write a trained model's outputs for data, or continue a text",
        "serve": "serve a language model over an OpenAI-compatible HTTP API",
        "export": "write a trained model as safetensors, Hugging Face folder, ONNX or TorchScript",
        "ckpt": "list, inspect, check, compare, reshard, prune and copy checkpoints, in folders and at URLs",
    },
    "clusters": {
        "submit": "submit a run to Slurm, Kubernetes, Kubeflow, Ray, docker-compose or hosts over ssh",
        "jobs": "list, show, follow and end submitted jobs",
    },
    "choose, prove and learn": {
        "plan": "recommend a parallel layout, with predicted speed, memory and cost",
        "strategies": "list how ranks can share the work, and when to use each way",
        "verify": "prove that a layout gives the result of one process, or that a run survives faults",
        "doctor": "check GPUs, network, memory, limits and versions of machines, and print a fix for each finding",
        "bench": "measure collectives, links and this machine",
        "learn": "build distributed training yourself: graded exercises on real ranks, hints, animations",
    },
}
VERBS = {verb: text for group in GROUPS.values() for verb, text in group.items()}


def run_verb(verb: str, words: Sequence[str]) -> int:
    """Run the verb's module with the words that follow it; return the exit code."""
    import phalanx.cli.parsers  # noqa: F401 - an unknown flag is looked for among those of the other verbs

    result: int = import_module(f"phalanx.cli.{verb.replace('-', '_')}").run(words)
    return result
