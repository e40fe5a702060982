"""The production examples run at small size, each step of their run.sh, and render what they would submit."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from long_proofs import long_proof
from waiting import LIMIT_SECONDS

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("PIL.Image")


def run_step(example: str, step: str, folder: Path, **env: str) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    full = {**os.environ, "PATH": path, "SMALL": "1", "METRICS_PORT": "0", "OMP_NUM_THREADS": "1", **env}
    words = ["bash", str(ROOT / "examples" / example / "run.sh"), step]
    done = subprocess.run(words, cwd=folder, env=full, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{step}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@long_proof  # test_imagenet trains, evaluates and exports from shards, too
def test_images_from_shards_to_an_exported_model(tmp_path):
    assert "train  400     1" in run_step("08-imagenet", "pack", tmp_path)
    run_step("08-imagenet", "train", tmp_path)
    assert "finished, 12 steps" in run_step("08-imagenet", "watch", tmp_path)
    again = run_step("08-imagenet", "train", tmp_path)
    assert "nothing left to train" in again or "12 of 12" in again, again[-2000:]
    found = json.loads(run_step("08-imagenet", "evaluate", tmp_path))
    assert set(found["metrics"]) == {"accuracy", "loss", "top5"}
    run_step("08-imagenet", "export", tmp_path)
    assert (tmp_path / "runs" / "imagenet" / "model.safetensors").stat().st_size > 10_000
    assert "#SBATCH --nodes=4" in run_step("08-imagenet", "slurm", tmp_path, RENDER="1")
    job = run_step("08-imagenet", "kubernetes", tmp_path, RENDER="1")
    assert re.findall(r"claimName: (\w+)", job) == ["imagenet", "runs"]


@long_proof
def test_texts_to_a_model_that_answers(tmp_path):
    for step in ("corpus", "pretrain", "export", "chats", "tune"):
        run_step("09-language", step, tmp_path)
    found = run_step("09-language", "evaluate", tmp_path)
    tuned = json.loads(found[found.rindex('{\n  "run"') :])
    assert tuned["metrics"]["perplexity"] == pytest.approx(math.exp(tuned["metrics"]["loss"]))
    assert tuned["metrics"]["loss"] < 5.5, "ln 600 is 6.4"
    assert (tmp_path / "base" / "tokenizer.json").is_file()
    assert run_step("09-language", "ask", tmp_path).strip()


def test_jobs_of_the_language_example_are_rendered(tmp_path):
    assert "--lora-base nf4" in run_step("09-language", "slurm", tmp_path, RENDER="1", FOLDER="llama")
    assert "claimName: texts" in run_step("09-language", "kubernetes", tmp_path, RENDER="1")


def test_an_unknown_step_is_said(tmp_path):
    words = ["bash", str(ROOT / "examples" / "08-imagenet" / "run.sh"), "tarin"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 2
    assert "unknown step 'tarin'. Steps: pack, train" in done.stderr
