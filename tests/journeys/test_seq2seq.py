"""The recipes of T5 learn on two CPU ranks, and `phalanx predict` writes what a text asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from command import Answer, phalanx
from long_proofs import long_proof


def trained(*words: object) -> Answer:
    answer = phalanx("train", *words, "--device", "cpu", "--run-dir", "run", "--verbosity", "quiet")
    assert answer.code == 0, answer.text
    return answer


def events(kind: str) -> list[dict[str, Any]]:
    lines = Path("run", "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_pairs_are_learned_and_written(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)
    rows = [{"input": f"{letter * count}", "target": letter.upper()} for letter in "abcdefgh" for count in range(1, 9)]
    Path("pairs").mkdir()
    Path("pairs", "rows.jsonl").write_text("\n".join(map(json.dumps, rows * 4)))
    words = ("--max-steps", 150, "--batch-size", 16, "--set", "data.seq_len=16", "--set", "data.target_len=4")
    trained("seq2seq", "--data", "pairs", *words)
    assert events("epoch")[-1]["val"]["exact_match"] > 0.9
    said = phalanx("predict", "run", "--prompt", "ccc", "--temperature", 0, "--max-tokens", 4)
    assert said.text.strip().splitlines()[-1] == "C"
    Path("other").mkdir()
    Path("other", "dev.jsonl").write_text('{"input": "ccc", "target": "C"}\n{"input": "c", "target": "x"}\n' * 3)
    measured = phalanx("evaluate", "run", "--data", "other", "--json", "--num-workers", 1)
    assert json.loads(measured.out)["metrics"]["exact_match"] == 0.5, "all six rows, though the file is named dev"
    exported = phalanx("export", "run", "--format", "hf", "-o", "folder")
    assert exported.code == 0, exported.text
    assert json.loads(Path("folder", "config.json").read_text())["architectures"] == ["T5ForConditionalGeneration"]


@long_proof
def test_hidden_spans_are_learned(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)
    trained("t5", "--max-steps", 40, "--set", "data.max_bytes=60000", "--strategy", "fsdp", "--log-every-n-steps", 5)
    losses = [event["loss"] for event in events("step")]
    assert losses[-1] < 0.8 * losses[0], losses
