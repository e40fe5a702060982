"""The README's proofs: each command that it quotes is run, and prints what the README says of it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
from command import ROOT, Answer, clean_environment, phalanx

README = (ROOT / "README.md").read_text()
PROMISES = README[README.index("## Five promises") : README.index("| | Phalanx |")]
NUMBER = r"(\d+(?:\.\d+)?(?:e-\d+)?)"


def numbers(pattern: str, text: str) -> list[float]:
    """Return the numbers that stand for each # of a pattern."""
    found = re.search(re.escape(pattern).replace(r"\#", NUMBER), text)
    assert found is not None, f"{pattern!r} is not in:\n{text[-3000:]}"
    return [float(each) for each in found.groups()]


def digits_of_a_layout(answer: Answer) -> None:
    claimed = numbers("within # in float64, # in float32", PROMISES)
    found = numbers("(largest difference # in float64, # in float32)", answer.out)
    assert all(0 < ours < limit for ours, limit in zip(found, claimed, strict=True)), (found, claimed)
    assert len(re.findall(r"^  5 +[\d.]+", answer.out, re.MULTILINE)) == 2  # "after five steps", in both precisions


def equal_bits_after_a_resume(answer: Answer) -> None:
    assert "it ends with the same bits when it is stopped and resumed (no difference at all)" in answer.out


def a_replaced_rank(answer: Answer) -> None:
    assert re.search(r"kill:step=20,rank=1 +20 +\S+ s +\S+ s +0 +in place, 2 ranks", answer.out)  # no step is lost
    assert "weights: bit-identical to those of the quiet run" in answer.out


def a_plan(answer: Answer) -> None:
    for word in ("layout    FSDP64", "memory per GPU", "step      ", "tokens/s per GPU", "GPU hours, $"):
        assert word in answer.out


def errors_of_the_planner(answer: Answer) -> None:
    mean, fitted, other, unfitted = numbers(
        "within #% on average of the # published ones that they were fitted to, and #% of the # that they were not",
        PROMISES,
    )
    rows = re.findall(r"^([a-z0-9+, -]+?) +(\d+) rows +mean ([\d.]+)% +worst", answer.out, re.MULTILINE)
    groups = {name: (int(count), float(error)) for name, count, error in rows}
    others = groups["ibm + meta, not fitted"]
    assert (others[0], round(others[1])) == (unfitted, other)
    of_fit = [groups[name] for name in ("megatron + recomputation", "mpt", "nemo", "nemo fp8")]
    assert sum(count for count, _ in of_fit) == fitted
    assert sum(count * error for count, error in of_fit) / fitted <= mean


PROOFS = {
    "phalanx verify gpt --strategy fsdp": digits_of_a_layout,
    "phalanx verify gpt --resume": equal_bits_after_a_resume,
    "phalanx verify digits --fault kill:rank=1,step=20 --epochs 1": a_replaced_rank,
    "phalanx plan llama-70b --gpus 64 --gpu h100": a_plan,
    "python benchmarks/planner_accuracy.py": errors_of_the_planner,
}


def test_every_command_among_the_promises_is_run_here():
    assert set(re.findall(r"`((?:phalanx|python) [^`]+)`", PROMISES)) == set(PROOFS)


@pytest.mark.parametrize("command", PROOFS)
def test_the_proof_prints_what_the_readme_says(command, tmp_path, monkeypatch, fork_server):
    program, *words = shlex.split(command)
    if program == "phalanx":
        monkeypatch.chdir(tmp_path)
        answer = phalanx(*words)
    else:
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, env=clean_environment(), capture_output=True, text=True
        )
        answer = Answer(done.returncode, done.stdout, done.stderr)
    assert answer.code == 0, answer.text
    PROOFS[command](answer)
