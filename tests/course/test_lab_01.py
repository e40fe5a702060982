"""Lab 01 on two real nodes of Ray: our answer passes, and wrong answers are called by their names."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter

import programs
import pytest
from command import ROOT, clean_environment
from grader.exercise import grade
from long_proofs import long_proof
from packages import require
from wrong import COURSE, LISTED, Wrong, exercise

pytestmark = pytest.mark.timeout(3000)  # Ray starts slowly on a busy machine
require("ray", "Ray is not installed: pip install 'phalanx[ray]'")

NAMES = [name for name in LISTED if name.startswith("lab-01-")]
SOLUTION = LISTED["lab-01-train"].solution
REPORT = "            train.report(metrics, checkpoint=checkpoint)"
WRONG = (
    Wrong("lab-01-cluster", "a cluster that stays", (('"rayjob"', '"raycluster"'),), "a RayCluster, which stays", True),
    Wrong(
        "lab-01-cluster", "a running cluster", (('"--kind", "rayjob", ', ""),), "renders a script for a cluster that"
    ),
    Wrong(
        "lab-01-cluster", "one node", (('"--num-nodes", str(nodes)', '"--num-nodes", "1"'),), "1 worker pods instead"
    ),
    Wrong(
        "lab-01-cluster", "no volume", ((', "--pvc", f"{claim}:/workspace"', ""),), "checkpoints are lost with a pod"
    ),
    Wrong("lab-01-cluster", "no restarts", (('"--max-restarts", "3", ', ""),), "the first lost worker ends the job"),
    Wrong("lab-01-cluster", "not a flag", (('"--max-restarts"', '"--max-restart"'),), "max-restarts"),
    Wrong("lab-01-cluster", "a second head", (('f"--address={head}"', '"--head"'),), "--head starts a second cluster"),
    Wrong("lab-01-cluster", "all CPUs", ((', f"--num-cpus={cpus}"]', "]"),), "CPUs instead of"),
    Wrong("lab-01-train", "all rows on each", (("batch[rank::workers]", "batch"),), "takes batch[r::n]"),
    Wrong("lab-01-train", "each alone", (("prepare_model(model)", "model"),), "each trains alone"),
    Wrong("lab-01-train", "one order", (('config["seed"] + epoch', 'config["seed"]'),), "the same order of rows"),
    Wrong("lab-01-train", "module.", (('"model": model.state', '"model": prepared.state'),), "begin with 'module.'"),
    Wrong(
        "lab-01-train",
        "only rank 0 reports",
        ((REPORT, f"            if rank == 0:\n    {REPORT}"),),
        "it is a meeting point",
    ),
    Wrong("lab-01-train", "an error", (("inputs[mine]", "inputs[mine + 99]"),), "in train_loop (ray_lab.py:"),
    Wrong("lab-01-train", "no checkpoint", (("if rank == 0:", "if rank == 99:"),), "no worker gave a checkpoint"),
    Wrong(
        "lab-01-metrics",
        "a plain mean",
        (('* each["rows"] for each in metrics) / rows', "for each in metrics) / len(metrics)"),),
        "each worker's mean counts by its rows",
        True,
    ),
    Wrong("lab-01-metrics", "the fastest", (("rows / max(seconds)", "rows / min(seconds)"),), "of the slowest one"),
    Wrong("lab-01-metrics", "overwrites", (('self._path, "a"', 'self._path, "w"'),), "1 lines after 3 reports"),
    Wrong("lab-01-metrics", "not a callback", (("MetricsLog(UserCallback)", "MetricsLog"),), "not a ray.train.UserCal"),
    Wrong("lab-01-scale", "one node", (("STRICT_SPREAD", "PACK"),), "were on one node"),
    Wrong("lab-01-scale", "no failures", (("max_failures=3", "max_failures=0"),), "was killed in epoch 2 and the run"),
    Wrong("lab-01-scale", "an error", (("inputs[mine]", "inputs[mine + 99]"),), "worker 0: IndexError in train_loop ("),
    Wrong("lab-01-scale", "from the start", (("begin = restore(model, optimizer)", "begin = 0"),), "12 steps were"),
    Wrong(
        "lab-01-scale",
        "no momentum",
        (('    optimizer.load_state_dict(state["optimizer"])\n', ""),),
        "differ from those of a quiet run",
    ),
    Wrong("lab-01-scale", "an epoch twice", (('int(state["epoch"]) + 1', 'int(state["epoch"])'),), "of a quiet run"),
    Wrong(
        "lab-01-scale", "no log", (('callbacks=[MetricsLog(f"{folder}/metrics.jsonl")],', ""),), "list MetricsLog in"
    ),
)


GRADED = [(name, "", SOLUTION.read_text()) for name in NAMES]
"""Exercise, mistake (none in ours), source."""
GRADED += [(each.exercise, each.mistake, each.source(SOLUTION.read_text())) for each in WRONG]
IN_ONE_PROCESS = """
import json, sys
from pathlib import Path
from grader.catalog import MODULE_202
from grader.exercise import grade

exercises = {each.name: each for phase in MODULE_202 if phase.name == "lab-01" for each in phase.exercises()}
for name, file in json.loads(Path(sys.argv[1]).read_text()):
    result = grade(exercises[name], Path(file))
    print(json.dumps([result.passed, f"{result.message} (seed {result.seed})"]), flush=True)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Grade all answers in one process, which starts the two nodes once and ends them."""
    folder = tmp_path_factory.mktemp("lab-01")
    order = []
    for number, (name, _, source) in enumerate(GRADED):
        file = folder / str(number) / SOLUTION.name
        file.parent.mkdir()
        file.write_text(source)
        order.append((name, str(file)))
    (folder / "order.json").write_text(json.dumps(order))
    done = programs.run(
        [sys.executable, "-c", IN_ONE_PROCESS, folder / "order.json"],
        env=clean_environment(PYTHONPATH=f"{COURSE}{os.pathsep}{ROOT}"),
        capture_output=True,
        text=True,
        timeout=120 * len(GRADED),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {(name, mistake): result for (name, mistake, _), result in zip(GRADED, found, strict=True)}


@long_proof
@pytest.mark.parametrize("name", NAMES)
def test_our_answer_passes(name, results):
    passed, message = results[name, ""]
    assert passed, message


@long_proof
@pytest.mark.parametrize("wrong", WRONG, ids=lambda each: f"{each.exercise}-{each.mistake}")
def test_a_wrong_answer_is_called_by_its_name(wrong, results):
    passed, message = results[wrong.exercise, wrong.mistake]
    assert not passed, message
    assert wrong.says in message


def test_there_are_enough_wrong_answers():
    assert min(Counter(each.exercise for each in WRONG).values()) >= 3
    for each in WRONG:
        compile(each.source(SOLUTION.read_text()), each.mistake, "exec")


def test_the_starter_has_no_points():
    starter = COURSE / LISTED["lab-01-train"].template
    assert sum(grade(exercise(name), starter).earned for name in NAMES) == 0
