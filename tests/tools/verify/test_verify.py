"""`phalanx verify`: it agrees where a layout is right, and names the module where one is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command import Answer, phalanx, write_script
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx as package
from phalanx.config import DistributedConfig
from phalanx.tools.verify.cases import prove_case

MODEL = """
    import os

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    RANK = int(os.environ["RANK"])

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.dropout = nn.Dropout(0.5)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return {output}

    def build():
        torch.manual_seed(7)
        x = torch.randn(40, 6)
        layers = [nn.Linear(6, 6), Block(), Block(), nn.Linear(6, 1)]
        model = nn.Sequential(*layers)
        {extra}
        return model, TensorDataset(x, x.sum(1, keepdim=True)), nn.functional.mse_loss
"""
RIGHT = "x + self.dropout(torch.tanh(self.inner(x)))"
SMALL = ("--num-workers", 2, "--device", "cpu", "--batch-size", 4, "--learning-rate", 0.01)


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)


def test_loops_of_ones_own_are_compared():
    answer, found = verify(RIGHT, "--own-loop", "--gradient-accumulation-steps", 2)
    assert answer.code == 0, answer.text
    assert "AGREES" in answer.text
    titles = [comparison["title"] for comparison in found["comparisons"]]
    assert [title.partition(":")[0] for title in titles] == ["float64", "float32"] * 2
    assert "unfrozen half-way" in titles[0]
    assert "two optimizers" in titles[2]
    answer, found = verify("x + torch.tanh(self.inner(x)) * (1 + RANK)", "--own-loop", steps=2)
    assert answer.code == 1
    assert "DIFFERS" in answer.text


def verify(output: str = RIGHT, *words: object, extra: str = "pass", steps: int = 4) -> tuple[Answer, dict]:
    """Verify the small model with this forward pass; return the answer and what --json printed."""
    write_script(Path("model.py"), MODEL.format(output=output, extra=extra))
    answer = phalanx("verify", "--script", "model.py", *SMALL, "--max-steps", steps, "--json", *words)
    assert answer.out, answer.text
    return answer, json.loads(answer.out)


def differences(found: dict, precision: int = 0) -> dict[str, float]:
    return found["comparisons"][precision]["worst"]


@pytest.mark.parametrize(
    "words",
    [
        ("--strategy", "fsdp", "--gradient-clipping", 0.1),
        ("--gradient-accumulation-steps", 2, "--lr-scaling", "linear", "--lr-schedule", "cosine"),
    ],
    ids=["fsdp", "ddp-accumulation"],
)
def test_a_right_layout_agrees_to_ten_digits(words):
    answer, found = verify(RIGHT, *words)
    assert answer.code == 0, answer.text
    assert "AGREES" in answer.err.splitlines()[-1]
    assert ": it gives the result of one process (largest difference " in answer.err.splitlines()[-1]
    assert "Training finished" not in answer.text
    assert found["agrees"]
    assert 0 < max(differences(found).values()) < 1e-10, "ranks add in another order, so not a bit less than rounding"
    assert max(differences(found, 1).values()) > 1e-9, "float32 rounds more"
    steps = found["comparisons"][0]["steps"]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert len({row["loss"][0] for row in steps}) == 4, "it trains"
    assert found["first_diverging_module"] is None


def test_a_layer_that_depends_on_the_rank_is_named():
    noisy = "x + torch.tanh(self.inner(x)) * (1 + self.noise * RANK)"
    answer, found = verify(noisy, extra="model[1].noise, model[2].noise = 0.0, 1e-7")
    assert answer.code == 1, answer.text
    assert found["first_diverging_module"] == "2"
    assert found["comparisons"][0]["first_diverging_measure"] == "activations"
    assert "2 (Block): its outputs of the first step differ" in answer.err
    assert found["comparisons"][1]["agrees"], "float32 rounds more than that: only float64 sees it"


def test_a_gradient_that_is_wrong_on_one_rank_is_named():
    spoil = "model[2].inner.weight.register_hook(lambda grad: grad * (1 + RANK))"
    answer, found = verify(extra=spoil)
    assert answer.code == 1, answer.text
    assert found["first_diverging_module"] == "2.inner"
    assert found["comparisons"][0]["first_diverging_measure"] == "gradients"
    assert found["comparisons"][1]["first_diverging_module"] == "2.inner"
    rows = {row["module"]: row for row in found["comparisons"][0]["modules"]}
    assert rows["1.inner"]["gradients"] < 1e-10 < rows["2.inner"]["gradients"]


def test_batch_normalisation_differs_and_is_explained():
    answer, found = verify(extra="model.insert(1, nn.BatchNorm1d(6))")
    assert answer.code == 1, answer.text
    assert found["first_diverging_module"] == "1"
    assert "depends on the layout by design" in answer.err
    assert "sync_batch_norm = true" in answer.err
    # First in the model: the gradient of a bias before a norm is zero but for rounding, which AdamW enlarges.
    answer, _ = verify(RIGHT, "--sync-batch-norm", extra="model.insert(0, nn.BatchNorm1d(6))")
    assert answer.code == 0, answer.text


def test_a_resumed_run_ends_with_the_same_bits():
    answer, found = verify(RIGHT, "--resume", "--strategy", "fsdp")
    assert answer.code == 0, answer.text
    assert set(differences(found).values()) == {0.0}
    assert len(found["comparisons"][0]["steps"]) == 4


def test_state_that_no_checkpoint_holds_is_found_by_resume():
    answer, found = verify("x + torch.tanh(self.inner(x)) / self.calls", "--resume")
    assert answer.code == 1, answer.text
    first, second, third, fourth = (row["loss_difference"] for row in found["comparisons"][0]["steps"])
    assert (first, second) == (0.0, 0.0)
    assert third > 0
    assert fourth > 0
    assert "is not equal to the last bit after step 4" in answer.err


def test_a_checkpoint_continues_at_another_layout():
    answer, found = verify(RIGHT, "--reshard", "fsdp:2", "--gradient-accumulation-steps", 2)
    assert answer.code == 0, answer.text
    assert "loaded on fsdp, 2 ranks on cpu" in answer.err
    assert max(differences(found).values()) < 1e-10


def test_a_layout_that_continues_differently_is_found_by_reshard():
    answer, _ = verify("x + torch.tanh(self.inner(x)) / self.calls", "--reshard", "ddp:1")
    assert answer.code == 1, answer.text


def test_a_run_that_loses_and_gets_ranks_ends_with_the_same_bits():
    answer, found = verify(RIGHT, "--faults", "--strategy", "ring", "--fixed-order", steps=12)
    assert answer.code == 0, answer.text
    assert "it ends with the same bits when a rank is killed and the 2 ranks become 1, then 2 again" in answer.err
    assert differences(found)["parameters"] == 0.0


def test_state_that_a_new_rank_does_not_get_is_found_by_faults():
    answer, _ = verify("x + torch.tanh(self.inner(x)) / self.calls", "--faults", steps=12)
    assert answer.code == 1, answer.text
    assert "it does not end with the same weights, within rounding, when a rank is killed" in answer.err


def test_a_reference_model_is_verified_by_name():
    answer = phalanx("verify", "gpt", "--preset", "debug", *SMALL, "--max-steps", 2, "--strategy", "fsdp")
    assert answer.code == 0, answer.text
    assert "layers.1.attention.qkv" in answer.out


def test_from_python_with_a_loader_and_its_batch_size():
    x = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=5, shuffle=True)
    verdict = package.verify(nn.Linear(5, 2), loader, num_workers=2, device="cpu", max_steps=4)
    assert verdict
    assert "global batch 10," in verdict.summary
    assert verdict.subject == "Linear"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "nothing to verify was named"),
        (("gtp",), "Did you mean 'gpt'?"),
        (("gpt", "--preset", "huge"), "unknown preset 'huge' of model 'gpt'"),
        (("digits", "--reshard", "fsdp"), "Write <strategy>:<ranks>"),
        (("digits", "--reshard", "fdsp:2"), "Did you mean 'fsdp'?"),
        (("digits", "--reshard", "ddp:3"), "a global batch of 64 samples cannot be split evenly over 3"),
        (("digits", "--resume", "--max-steps", 1), "needs at least 2 steps"),
        (("digits", "--resume", "--reshard", "ddp:1"), "cannot be combined"),
        (
            ("digits", "--faults", "--max-steps", 4),
            "4 steps\n  Give at least 8 steps (--max-steps 12).\n",
        ),
        (
            ("digits", "--faults", "--num-workers", 1),
            "--faults needs more than 1 rank and 12 steps\n  Give at least 2 ranks (--num-workers 2).\n",
        ),
        (("digits", "--out", "here"), "--out is for a run under faults, such as --faults 10"),
        (("digits", "--set", "model.dropout=0.1"), "--set is for a run under faults"),
        (("digits", "--faults", "2", "--own-loop", "--max-steps", 9), "--own-loop cannot be combined"),
        (
            ("digits", "--json", "found.json"),
            "--json takes no file: it prints on standard output\n  Write: --json > FILE",
        ),
        (("digits", "--mixed-precision", "bf16"), "verify compares in float64 and float32"),
        (("--script", "nowhere.py"), "no script at nowhere.py"),
        (("--script", "empty.py"), "defines no build()"),
    ],
)
def test_mistakes_are_reported(words, said):
    Path("empty.py").write_text("")
    answer = phalanx("verify", *words, "--device", "cpu")
    assert answer.code == 2, answer.text
    assert said in answer.err


def test_a_recipe_after_faults_is_not_a_number_of_them():
    answer = phalanx("verify", "--faults", "digits", "--max-steps", 4, "--device", "cpu")
    assert answer.err.startswith(
        "phalanx: --faults digits: expected a whole number\n  Write: phalanx verify digits ... --faults"
    )


def test_ranks_that_another_launcher_started_are_refused(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    answer = phalanx("verify", "digits")
    assert answer.code == 2, answer.text
    assert "verify starts its own ranks" in answer.err


def test_a_model_that_the_layout_cannot_take_is_reported_before_one_process_runs():
    built = "open('built-' + os.environ['WORLD_SIZE'], 'w').close()"
    write_script(Path("model.py"), MODEL.format(output=RIGHT, extra=built))
    answer = phalanx("verify", "--script", "model.py", *SMALL, "--max-steps", 4, "--tensor-parallel", 2)
    assert answer.code == 2
    assert "tensor_plan()" in answer.err
    assert [path.name for path in Path().glob("built-*")] == ["built-2"]


def test_a_proof_that_is_stopped_asks_for_no_checkpoint_dir():
    stopping = "x + self.inner(x) * (RANK == 0 and os.kill(os.getpid(), 15) is None)"
    write_script(Path("model.py"), MODEL.format(output=stopping, extra="pass"))
    answer = phalanx("verify", "--script", "model.py", *SMALL, "--max-steps", 4)
    assert answer.code == 75, answer.text
    assert "verify was stopped before it could compare" in answer.err
    assert "run the same command again" in answer.err
    assert "checkpoint" not in answer.err


def test_labels_that_come_late_are_weighed_in_every_batch():
    words = ("verify", "--case", "late-labels", *SMALL[:4], "--gradient-accumulation-steps", 2, "--max-steps", 4)
    assert "AGREES" in phalanx(*words).text
    weighed_otherwise = phalanx(*words, "--loss-weighting", "samples")
    assert weighed_otherwise.code == 1
    assert "its weights after the last one differ" in weighed_otherwise.text


def test_the_meaning_of_validation_files_is_proved(monkeypatch):
    pytest.importorskip("datasets")
    config = DistributedConfig(num_workers=1)
    assert prove_case("data-schema", config)
    monkeypatch.setattr("phalanx.zoo.data.learned_from", lambda train, name: {})
    verdict = prove_case("data-schema", config)
    assert not verdict
    read_alone = [problem.split(":")[0] for problem in verdict.problems]
    assert read_alone == ["csv", "jsonl", "parquet"], "class folders look at the training folder themselves"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--case", "late-label"), "Did you mean 'late-labels'?"),
        (("--case", "late-labels", "digits"), "'digits' cannot be combined with --case"),
        (("--case", "changed-loss", "--device", "cpu"), "changed-loss needs a GPU"),
        (("--case", "late-labels", "--device", "cpu", "--num-workers", 16), "8 samples in its first batch"),
    ],
)
def test_a_case_that_cannot_be_proved_is_refused(words, said):
    answer = phalanx("verify", *words)
    assert answer.code == 2
    assert said in answer.text
