"""The cluster of lab 01: a command that adds a node to real ones, and a job for Kubernetes whose YAML is read."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import time
from types import ModuleType
from typing import Any

from grader.exercise import Attempt, Missing, Mistake
from grader.hints import first_hint
from grader.ray_nodes import Nodes, NoRay, connect, joining, start_nodes

_JOIN_SECONDS = 40.0


def written(attempt: Attempt, *names: str) -> None:
    """Raise where Ray is not installed or a template is not filled in, before anything is started."""
    if importlib.util.find_spec("ray") is None:
        raise Missing(
            "Ray is not installed in this Python, so this exercise cannot be graded here: pip install 'phalanx[ray]'"
        )
    tree = ast.parse(attempt.answer.read_bytes())
    defined = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for name in names:
        for inner in ast.walk(defined[name]) if name in defined else ():
            if isinstance(inner, ast.Raise) and "NotImplementedError" in ast.unparse(inner):
                hint = first_hint(attempt.exercise.name)
                raise Mistake(f"{name} is not written yet ({attempt.answer.name}:{inner.lineno}). {hint}".strip())


def ready(attempt: Attempt) -> Nodes:
    """Return the two nodes."""
    try:
        nodes = start_nodes()
    except NoRay as error:
        raise Missing(str(error)) from None
    attempt.began = time.monotonic()  # Ray's start is not a part of the answer's time
    return nodes


def words_of(module: ModuleType, name: str, args: tuple[Any, ...]) -> list[str]:
    """Return the words of one of the commands."""
    return list(getattr(module, name)(*args))


def cpus_of_new_node(module: ModuleType, address: str, known: tuple[str, ...]) -> float | None:
    """Return the CPUs of a node beside those that are known; None where none comes."""
    connect(address, module)
    import ray

    deadline = time.monotonic() + _JOIN_SECONDS
    while time.monotonic() < deadline:
        new = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in known]
        if new:
            return float(new[0]["Resources"].get("CPU", 0))
        time.sleep(0.2)
    return None


def grade_cluster(attempt: Attempt) -> None:
    """The learner's job becomes a RayJob with the right pods; a node joins by the learner's command."""
    written(attempt, "submit_command", "join_command")
    draw = attempt.random
    count, gpus = draw.randrange(2, 9), draw.choice((2, 4, 8))
    image, claim = f"registry.example.com/team:{draw.randrange(100)}", f"claim-{draw.randrange(100)}"
    _check_manifest(rendered(_words(attempt, "submit_command", count, gpus, image, claim)), count, gpus, image, claim)
    nodes = ready(attempt)
    cpus = draw.choice([number for number in range(1, 6) if number != os.cpu_count()])  # not what Ray would find itself
    join = _words(attempt, "join_command", nodes.address, cpus)
    command = " ".join(join)
    if join[:2] != ["ray", "start"] or "--head" in join:
        what = "--head starts a second cluster" if "--head" in join else "the words begin with ray, start"
        raise Mistake(f"join_command returned {command!r}: a node joins by `ray start --address`; {what}")
    log = attempt.folder / "join.log"
    with joining(nodes, join, log):
        found = attempt.call(cpus_of_new_node, nodes.address, nodes.ids, variables=nodes.variables)
    if found is None:
        raise Mistake(f"{command!r} added no node to the cluster at {nodes.address}: {_last_line(log.read_text())}")
    if found != cpus:
        raise Mistake(f"{command!r} added a node with {found:g} CPUs instead of {cpus}: see --num-cpus")


def _words(attempt: Attempt, name: str, *args: Any) -> list[str]:
    words: list[str] = attempt.call(words_of, name, args)
    if len(words) < 3 or not all(isinstance(word, str) for word in words):
        raise Mistake(f"{name} returned {words!r}: it returns the words of a command, each a str")
    return words


def rendered(words: list[str]) -> list[dict[str, Any]]:
    """Return the objects that `phalanx submit ... --render` prints."""
    import yaml

    if words[:3] != ["phalanx", "submit", "ray"]:
        raise Mistake(f"submit_command returned {' '.join(words)!r}: the words begin with phalanx, submit, ray")
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", *words[1:], "--render"], capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        raise Mistake(f"{' '.join(words)!r} ends with: {_first_line(done.stderr)}")
    try:
        found = [one for one in yaml.safe_load_all(done.stdout) if isinstance(one, dict) and "kind" in one]
    except yaml.YAMLError:
        found = []
    if not found:
        raise Mistake(
            f"{' '.join(words)!r} renders a script for a cluster that runs already; Kubernetes needs an object: see"
            " --kind in `phalanx submit ray --help`"
        )
    return found


def _check_manifest(objects: list[dict[str, Any]], nodes: int, gpus: int, image: str, claim: str) -> None:
    job = objects[-1]
    if job["kind"] != "RayJob":
        raise Mistake(
            f"the object is a {job['kind']}, which stays until it is deleted; the one that starts a cluster, runs one"
            " job and removes the cluster is a RayJob"
        )
    group = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    if group["replicas"] != nodes:
        raise Mistake(
            f"the cluster has {group['replicas']} worker pods instead of {nodes}: one per node, see --num-nodes"
        )
    pod = group["template"]["spec"]
    container = pod["containers"][0]
    asked = int(container["resources"].get("limits", {}).get("nvidia.com/gpu", 0))
    if asked != gpus:
        raise Mistake(f"a worker pod asks for {asked} GPUs instead of {gpus}: see --gpus-per-node and --device")
    if container["image"] != image:
        raise Mistake(f"the pods run {container['image']} instead of {image}: see --image")
    claims = {
        volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume
    }
    if claim not in claims:
        raise Mistake(
            f"the pods mount the claims {sorted(claims)}, not {claim}: checkpoints are lost with a pod; see --pvc"
        )
    if "--max-restarts" not in job["spec"]["entrypoint"]:
        raise Mistake("the entrypoint has no --max-restarts: the first lost worker ends the job")


def _last_line(text: str) -> str:
    said = [line.strip() for line in text.splitlines() if line.strip()]
    return said[-1] if said else "it printed nothing"


def _first_line(text: str) -> str:
    said = [line.strip() for line in text.splitlines() if line.strip()]
    return said[0] if said else "it printed nothing"
