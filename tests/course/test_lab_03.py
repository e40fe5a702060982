"""Lab 03: wrong systems are called by their name, and the solution trains on under faults."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import programs
import pytest
from grader.exercise import grade
from grader.fake_rank import alive
from grader.ranks import Order, run_ranks
from long_proofs import ALL, long_proof
from wrong import COURSE, LISTED, Wrong, exercise

LAB = COURSE / "module-202" / "labs" / "lab-03-fault-tolerant"
KILL = "            process.kill()  # not terminate(): a stopped process would not get it\n"
COUNT = 'failures = 0 if generation.end == "scaled" else 1 if step > reached else failures + 1'
DIGEST_OK = 'return (int(place.name.removeprefix("step-")), contents) if good and complete else None'
MANIFEST = '            _write(place / "whole", "\\n".join(files).encode())\n            self._remove_old()\n'
MOST = "    if 2 * count <= ranks:\n        return list(range(ranks))\n"
BYTES = "        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())\n"
SETTINGS = " or ranks[generation.rank or 0].returncode == WRONG_SETTINGS"
GATHERED = "dist.all_gather_object(digests, digest.hexdigest())"
WHOLE = "dist.all_gather_object(digests, state['b'].numpy().tobytes().hex() + digest.hexdigest())"
SCALE = "            if self.least <= (places := self.slots()) and min(places, self.most) != world:\n"

WRONG = (
    Wrong(
        "lab-03-checkpoint",
        "digests not compared",
        ((DIGEST_OK, DIGEST_OK.replace("good and ", "")),),
        says="of step 10",
    ),
    Wrong(
        "lab-03-checkpoint",
        "old one removed first",
        (
            (MANIFEST, "".join(reversed(MANIFEST.splitlines(True)))),
            ("for place in whole[self.keep :]:", "for place in whole[self.keep - 1 :]:"),
        ),
        says="at its file operation",
        fast=True,
    ),
    Wrong(
        "lab-03-checkpoint",
        "state of rank 0 only",
        (("for part in parts for number, state in part", "for part in parts[:1] for number, state in part"),),
        says="part 1 is missing",
    ),
    Wrong(
        "lab-03-checkpoint",
        "every rank decides alone",
        (("        dist.broadcast_object_list(found, src=0)\n", ""),),
        says="load() on rank 1 returned None",
    ),
    Wrong(
        "lab-03-checkpoint",
        "a list instead of a tuple",
        (
            (
                "        dist.broadcast_object_list(found, src=0)\n",
                "        dist.broadcast_object_list(found, src=0)\n        return found\n",
            ),
        ),
        says="it should be a tuple of step",
    ),
    Wrong(
        "lab-03-checkpoint",
        "oldest first",
        (('.glob("step-*"), reverse=True)', '.glob("step-*"))'),),
        says="load() returned step 5",
    ),
    Wrong(
        "lab-03-failures",
        "the others are left alone",
        ((KILL, "            pass\n"), ("        process.wait()\n", "        process.poll()\n")),
        says="was alive: end all processes",
        fast=True,
    ),
    Wrong(
        "lab-03-failures",
        "the first silent rank is blamed",
        ((' and not text.endswith("wait")', ""),),
        says="the one whose last beat is not `wait` is the one that hangs",
    ),
    Wrong(
        "lab-03-failures",
        "all failures are counted",
        ((COUNT, "failures += 1"),),
        says="count failures without progress",
    ),
    Wrong("lab-03-failures", "never gives up", ((COUNT, "failures = 0"),), says="did not raise RuntimeError"),
    Wrong(
        "lab-03-failures",
        "wrong settings are tried again",
        ((SETTINGS, ""),),
        says="code 2, which means wrong settings",
    ),
    Wrong(
        "lab-03-failures",
        "the exit code is not named",
        (('f"ended with code {codes[first]}"', '"ended"'),),
        says="exit code 41",
    ),
    Wrong(
        "lab-03-elastic",
        "as many ranks as before",
        (
            (
                "return min(places, self.most)",
                "return self.history[0].world if self.history else min(places, self.most)",
            ),
            (SCALE, "            if False:\n"),
        ),
        says="you started 3 ranks again",
    ),
    Wrong(
        "lab-03-elastic",
        "growth is not seen",
        ((SCALE, "            if False:\n"),),
        says="ask slots() while they run",
        fast=True,
    ),
    Wrong(
        "lab-03-elastic",
        "killed without grace",
        (("process.send_signal(signal.SIGTERM)", "process.kill()"),),
        says="so steps were computed twice",
    ),
    Wrong(
        "lab-03-elastic",
        "more than allowed",
        (
            ("return min(places, self.most)", "return places"),
            (SCALE, SCALE.replace("min(places, self.most)", "places")),
        ),
        says="start at most 4",
    ),
    Wrong(
        "lab-03-elastic",
        "fewer than allowed",
        (("while (places := self.slots()) < self.least:", "while (places := self.slots()) < 1:"),),
        says="1 place, least=2",
    ),
    Wrong(
        "lab-03-consistency",
        "values added",
        ((BYTES, '        digest.update(f"{tensor.double().sum():.2f}".encode())\n'),),
        says="has one bit of one weight",
        fast=True,
    ),
    Wrong(
        "lab-03-consistency",
        "names left out",
        (('f"{name} {tensor.dtype}', 'f"{tensor.dtype}'),),
        says="has a name exchanged",
    ),
    Wrong(
        "lab-03-consistency",
        "order of the dict",
        (("for name in sorted(state):", "for name in state:"),),
        says="has another order of the names",
    ),
    Wrong("lab-03-consistency", "two ranks, one believed", ((MOST, ""),), says="so [0, 1] is right"),
    Wrong("lab-03-consistency", "whole state sent", ((GATHERED, WHOLE),), says="send a digest of it"),
)
# The system as a whole: what only shows in a run of worker.py.
SYSTEM = (
    Wrong(
        "lab-03-consistency",
        "states of the parts mixed up",
        (
            ("{number: state for part in parts for", "{number: state for part in reversed(parts) for"),
            ('parts[0]["shared"], own', 'parts[0]["shared"], dict(zip(own, reversed(list(own.values()))))'),
        ),
        says="a lost place end with",
    ),
)


@pytest.mark.parametrize(
    "wrong",
    (*WRONG, *SYSTEM) if ALL else [each for each in WRONG if each.fast],
    ids=lambda each: f"{each.exercise}-{each.mistake}".replace(" ", "-"),
)
def test_a_wrong_system_is_called_by_its_name(wrong, tmp_path):
    file = tmp_path / "system.py"
    file.write_text(wrong.source(LISTED[wrong.exercise].solution.read_text()))
    result = grade(exercise(wrong.exercise), file)
    assert not result.passed, f"passed with seed {result.seed}"
    assert wrong.says in result.message, f"{result.message} (seed {result.seed})"


def started_by(module, folder):
    """Leave a process in a session of its own behind, as a supervisor may do."""
    words = ["sh", "-c", "sleep 987; sleep 987"]
    return subprocess.Popen(words, start_new_session=True, cwd=folder).pid


def test_nothing_that_an_answer_started_stays_behind(tmp_path):
    (tmp_path / "system.py").write_text("")
    pid = run_ranks(Order(tmp_path / "system.py", started_by, 0, (str(tmp_path),), programs=True), tmp_path)[0].value
    assert not alive(pid)


def test_an_answer_may_not_read_the_solution(tmp_path):
    source = (LAB / "starter" / "system.py").read_text()
    (tmp_path / "system.py").write_text(f"{source}\nopen({str(LAB / 'solution' / 'system.py')!r}).read()\n")
    assert "is not for answers" in grade(exercise("lab-03-checkpoint"), tmp_path / "system.py").message


@long_proof
def test_the_solution_trains_on_under_all_faults(tmp_path):
    shutil.copy(LAB / "solution" / "system.py", tmp_path)
    shutil.copy(LAB / "starter" / "worker.py", tmp_path)

    def run(name, ranks):
        words = [sys.executable, "system.py", f"--folder={name}", f"--ranks={ranks}"]
        done = programs.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
        return done.stdout, json.loads((tmp_path / name / "result.json").read_text())

    _, quiet = run("quiet", 1)
    faults = [("kill", 1, 7), ("kill-saving", 0, 11), ("flip", 2, 16), ("stop", 1, 22)]
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "faults.json").write_text(
        json.dumps([{"kind": kind, "rank": rank, "step": step} for kind, rank, step in faults])
    )
    printed, result = run("faults", 3)
    assert result == quiet
    story = [line for line in printed.splitlines() if line.startswith("generation")]
    ends = ["died (rank 1)", "died (rank 0)", "died (rank 2)", "hung (rank 1)", "done"]
    assert story == [f"generation {number}: 3 ranks, {end}" for number, end in enumerate(ends)]
