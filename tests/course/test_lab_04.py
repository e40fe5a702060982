"""Lab 04: trainers that are wrong or still slow, and reports that do not agree with their runs, are called by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from grader.checks.written import check_report, section
from grader.exercise import Mistake, grade
from long_proofs import ALL, long_proof
from wrong import COURSE, LISTED, Wrong, exercise

LAB = COURSE / "module-202" / "labs" / "lab-04-profiling"
PLAN = "schedule(wait=0, warmup=warmup, active=steps, repeat=1)"
EVENT = "event.key: (event.count / steps, event.cpu_time_total / 1000 / steps)"
KEPT = "            if row not in self.decoded:\n"
ASKED = "        if (number + 1) % self.validate_every == 0:\n"
REDUCE = "            dist.all_reduce(self.flat)\n"
ADD = "                self.flat[-1] += loss.detach()\n"
ONE_BY_ONE = "            for part in self.flat.split(4096):\n                dist.all_reduce(part)\n"
PROFILE, WORK, MIXED, REPORT = (f"lab-04-{name}" for name in ("profile", "bottlenecks", "accumulation", "report"))

WRONG = (
    Wrong(
        PROFILE,
        "warm-up recorded",
        ((PLAN, PLAN.replace("warmup=warmup, active=steps", "warmup=0, active=99")),),
        says="an operation of the warm-up steps",
    ),
    Wrong(
        PROFILE,
        "sums instead of means",
        ((EVENT, EVENT.replace(" / steps,", ",")),),
        says="divide by the number of steps",
    ),
    Wrong(
        PROFILE,
        "own time only",
        ((EVENT, EVENT.replace("cpu_time_total", "self_cpu_time_total")),),
        says="count what is inside",
    ),
    Wrong(PROFILE, "microseconds", ((EVENT, EVENT.replace(" / 1000", "")),), says="write milliseconds per step"),
    Wrong(
        PROFILE,
        "the profiler's ranges",
        (('event.key.startswith("ProfilerStep")', "False"),),
        says="the profiler's own ranges",
        fast=True,
    ),
    Wrong(WORK, "decoded each time", ((KEPT, "            if True:\n"),), says="most were decoded several times"),
    Wrong(
        WORK,
        "validated in each step",
        ((ASKED, "        if self.validate() >= 0 and (number + 1) % self.validate_every == 0:\n"),),
        says="passes over the validation pictures",
    ),
    Wrong(WORK, "many collectives", ((REDUCE, ONE_BY_ONE),), says="collectives per step", fast=True),
    Wrong(
        WORK,
        "mean instead of sum",
        ((REDUCE, REDUCE + "            self.flat /= self.ranks\n"),),
        says="the loss of step 0",
    ),
    Wrong(
        WORK,
        "gradients never set to zero",
        (("        self.flat.zero_()\n", "        self.flat[-1] = 0\n"),),
        says="the loss of step",
    ),
    Wrong(WORK, "validation left out", ((ASKED, "        if False:\n"),), says="accuracies after the steps []"),
    Wrong(
        MIXED,
        "exchanged in each micro-batch",
        ((ADD, ADD + "                dist.all_reduce(torch.zeros(1))\n"),),
        says="gradients are added up first",
    ),
    Wrong(
        MIXED,
        "bf16 not used",
        (('if self.precision == "bf16":', 'if self.precision == "half":'),),
        says="it should be bfloat16",
    ),
    Wrong(
        MIXED,
        "weights in bf16",
        (
            (
                "        self.decoded: dict",
                "        self.model.to(torch.float32 if precision == 'fp32' else torch.bfloat16)\n"
                "        self.decoded: dict",
            ),
            (
                "self.flat = torch.zeros(sum(sizes) + 1)",
                "self.flat = torch.zeros(sum(sizes) + 1, dtype=next(self.model.parameters()).dtype)",
            ),
            ("= self.validate()", "= 0.5"),
        ),
        says="they should stay float32",
    ),
    Wrong(
        MIXED,
        "micro-batches weighted by their number",
        (("            dist.all_reduce(self.flat)\n", "            self.flat /= self.accumulate\n" + REDUCE),),
        says="4 micro-batches instead of 1",
    ),
)

REPORTS = (
    ("a number that was not measured", "report.md", ("| 491.7 | 38.0 |", "| 491.7 | 12.0 |"), "row step: 12 after"),
    ("the wrong line", "report.md", ("slow_trainer.py:106", "slow_trainer.py:25"), "is not where it happens"),
    ("a missing row", "report.md", ("| metrics |", "| other |"), "has no row `| metrics |"),
    (
        "a cause without words",
        "report.md",
        ("89 `gloo:all_reduce` per", "89 of them per"),
        "'all_reduce' is missing",
    ),
    ("runs of another trainer", "runs.json", ('"collectives": 1.0', '"collectives": 22.0'), "run measure.py again"),
    ("runs that are no numbers", "runs.json", ('"collectives": 1.0', '"collectives": "one"'), "should be a number"),
    ("no runs", "runs.json", None, "runs.json is missing"),
)


@pytest.mark.parametrize(
    "wrong",
    WRONG if ALL else [each for each in WRONG if each.fast],
    ids=lambda each: f"{each.exercise}-{each.mistake}".replace(" ", "-"),
)
def test_a_wrong_trainer_is_called_by_its_name(wrong, tmp_path):
    file = tmp_path / "trainer.py"
    file.write_text(wrong.source(LISTED[wrong.exercise].solution.read_text()))
    result = grade(exercise(wrong.exercise), file)
    assert not result.passed, f"passed with seed {result.seed}"
    assert wrong.says in result.message, f"{result.message} (seed {result.seed})"


@pytest.mark.parametrize(
    ("name", "edit", "says"),
    [pytest.param(*each[1:], id=each[0].replace(" ", "-")) for each in (REPORTS if ALL else REPORTS[:2])],
)
def test_a_report_that_does_not_agree_is_refused(name, edit, says, tmp_path):
    folder = shutil.copytree(LAB / "solution", tmp_path / "answer")
    if edit is None:
        (folder / name).unlink()
    else:
        text = (folder / name).read_text()
        assert text.count(edit[0]) == 1
        (folder / name).write_text(text.replace(*edit))
    result = grade(exercise(REPORT), folder / "trainer.py")
    assert not result.passed
    assert says in result.message


def test_the_baseline_may_not_be_changed(tmp_path):
    folder = shutil.copytree(LAB / "solution", tmp_path / "answer")
    (folder / "slow_trainer.py").write_text((LAB / "starter" / "slow_trainer.py").read_text() + "\nPOOL = 1\n")
    result = grade(exercise(WORK), folder / "trainer.py")
    assert "slow_trainer.py was changed" in result.message


@pytest.mark.parametrize(
    ("text", "says"),
    [("all_reduce " * 30, "15 different words"), ("{data}", "the text of another section")],
    ids=["one word repeated", "one text for two causes"],
)
def test_a_report_full_of_copied_words_is_refused(text, says, tmp_path):
    folder = shutil.copytree(LAB / "solution", tmp_path / "answer")
    report = (folder / "report.md").read_text()
    data = "Decode and all_reduce run too often: the profile has " + section(report, "data")
    for name in ("data", "exchange"):
        report = report.replace(section(report, name), data if name == "data" else text.format(data=data))
    (folder / "report.md").write_text(report)
    runs = json.loads((folder / "runs.json").read_text())
    counted = {when: {"loss": run["loss"]} for when, run in runs.items()}
    with pytest.raises(Mistake, match=says):
        check_report(folder, counted, LAB / "starter" / "slow_trainer.py", 1.5)


@long_proof
def test_the_measurement_is_that_of_the_report(tmp_path):
    for folder in ("starter", "solution"):
        shutil.copytree(LAB / folder, tmp_path, dirs_exist_ok=True)
    recorded = json.loads((tmp_path / "runs.json").read_text())
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "measure.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(words, cwd=tmp_path, env=environment, check=True, timeout=300, capture_output=True)
    measured = json.loads((tmp_path / "runs.json").read_text())
    for when in ("before", "after"):
        counts = ("decodes", "collectives", "validations")
        assert [measured[when][name] for name in counts] == [recorded[when][name] for name in counts]
        assert measured[when]["loss"] == pytest.approx(recorded[when]["loss"], rel=1e-2)
    assert measured["before"]["ms"] > 1.5 * measured["after"]["ms"]
