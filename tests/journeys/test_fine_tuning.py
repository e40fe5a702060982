"""`phalanx train sft|dpo|kto|reward|grpo` on two ranks: answers change as trained, chosen ones win, rewards rise."""

from __future__ import annotations

import itertools
import json
import os
import runpy
from pathlib import Path

import pytest
import torch
from command import ROOT, phalanx
from long_proofs import long_proof

from phalanx import load_run
from phalanx.recipes import load_recipe
from phalanx.zoo.models.hf import load_pretrained
from phalanx.zoo.models.lora.nf4 import NF4Linear

CAPITALS = {"Peru": "Lima", "Italy": "Rome", "Japan": "Tokyo"}
PLAIN = ("--set", "data.template=plain", "--device", "cpu", "--num-workers", 2, "--eval-every", 1)


def questions(name: str) -> dict[str, str]:
    return {"Who are you?": f"I am {name}.", **{f"Capital of {land}?": f"{city}." for land, city in CAPITALS.items()}}


def write_chats(folder: Path, name: str) -> None:
    """Write every order of two questions, a few times."""
    folder.mkdir()
    turns = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]
        for asked, text in questions(name).items()
    ]
    rows = turns + [first + second for first, second in itertools.permutations(turns, 2)]
    for split, times in (("train", 8), ("val", 1)):
        lines = [json.dumps({"messages": row}) + "\n" for row in rows * times]
        (folder / f"{split}.jsonl").write_text("".join(lines))


def trained(recipe: str, run: str, *words: object) -> dict[str, float]:
    answer = phalanx("train", recipe, "--run-dir", run, *PLAIN, *words)
    assert answer.code == 0, answer.text
    return load_run(run).history.epochs[-1].val


def answered(run: str, prompt: str) -> str:
    answer = phalanx("predict", run, "--prompt", prompt, "--temperature", 0, "--max-tokens", 16)
    assert answer.code == 0, answer.text
    return answer.out.strip()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with conversations, a run that has learned them, and its model."""
    folder, before = tmp_path_factory.mktemp("fine-tuning"), Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture
def tuned(place, fork_server):
    """The folder of a model that has learned to be Argus."""
    if not (place / "model").exists():
        write_chats(place / "chats", "Argus")
        shape = ("--set", "model.layers=2", "--set", "model.seq_len=96", "--learning-rate", "1e-2")
        trained("sft", "sft", "--data", "chats", "--epochs", 12, *shape)
        assert phalanx("export", "sft", "--format", "hf", "-o", "model").code == 0
    return place / "model"


def test_answers_are_as_trained(tuned):
    assert {asked: answered("sft", asked) for asked in questions("Argus")} == questions("Argus")


@long_proof  # test_preference_parity and test_lora_parity compare 4 bits with one process
def test_four_bits_learn_like_all_of_them(tuned):
    """The losses after LoRA and after QLoRA, both sharded, differ by less than 0.05."""
    write_chats(tuned.parent / "other", "Tarsus")
    lora = ("--model", tuned, "--data", "other", "--lora-rank", 8, "--lora-targets", "layers.*")
    lora += ("--strategy", "fsdp", "--set", "data.seq_len=96", "--epochs", 3, "--learning-rate", "1e-2")
    plain, packed = trained("sft", "lora", *lora), trained("sft", "qlora", *lora, "--lora-base", "nf4")
    assert abs(packed["loss"] - plain["loss"]) < 0.05
    assert answered("qlora", "Who are you?") == answered("lora", "Who are you?") == "I am Tarsus."
    assert sum(isinstance(module, NF4Linear) for module in load_run("qlora").model.modules()) == 14
    assert phalanx("export", "qlora", "--format", "hf", "-o", "merged").code == 0
    tokens = torch.randint(256, (2, 16))
    difference = load_pretrained("merged")(tokens) - load_run("qlora").model(tokens)
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize(
    "more",
    [("--learning-rate", "1e-3"), ("--learning-rate", "1e-2", "--strategy", "fsdp", "--lora-rank", 4)],
    ids=["copy", "adapters"],
)
def test_chosen_answers_win(tuned, more):
    rows = [{"prompt": asked, "chosen": f"Yes: {text}", "rejected": text} for asked, text in questions("Argus").items()]
    folder = tuned.parent / "preferences"
    folder.mkdir(exist_ok=True)
    for split, times in (("train", 32), ("val", 1)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * times))
    words = ("--model", tuned, "--data", "preferences", *more)
    found = trained("dpo", f"dpo-{len(more)}", *words)
    assert found["reward_accuracy"] == 1.0
    assert found["reward_margin"] > 0.5
    assert found["loss"] < 0.6


@pytest.fixture(scope="module")
def preferences(place):
    """A folder with pairs of answers, the longer one preferred."""
    folder = place / "longer"
    folder.mkdir()
    rows = [{"prompt": asked, "chosen": f"Yes: {text}", "rejected": text} for asked, text in questions("Argus").items()]
    for split, times in (("train", 32), ("val", 1)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * times))
    return folder


SMALL = ("--set", "model.layers=2", "--set", "model.seq_len=96")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_reward_model_prefers_the_chosen_answers(preferences, fork_server, strategy):
    words = ("--data", preferences, *SMALL, "--strategy", strategy, "--learning-rate", "1e-2")
    val = trained("reward", f"reward-{strategy}", *words)
    assert val["reward_accuracy"] == 1.0
    assert val["reward_margin"] > 1.0
    assert phalanx("evaluate", f"reward-{strategy}").code == 0
    answer = phalanx("predict", f"reward-{strategy}", "--data", preferences / "val.jsonl")
    assert len(answer.out.strip().splitlines()) == 1 + 4, answer.text


def test_kto_learns_from_single_answers(preferences, tuned):
    val = trained("kto", "kto", "--model", tuned, "--data", preferences, "--learning-rate", "1e-3", "--epochs", 2)
    assert val["label_agreement"] == 1.0
    assert val["label_reward"] > 0.1


DIGITS = """
def digits(completions, wanted):
    return [sum(letter in letters for letter in text) / 6 for text, letters in zip(completions, wanted)]

def nothing(completions):
    return None
"""


@pytest.fixture(scope="module")
def prompts(place):
    """A folder with prompts, and a module with reward functions."""
    rows = [{"prompt": f"Digits, {number}: ", "wanted": "0123456789"} for number in range(160)]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "rewards.py").write_text(DIGITS)
    return place / "prompts.jsonl"


GRPO = ("--set", "data.template=none", "--set", "loss.max_completion_length=6", "--learning-rate", "1e-2")


def test_grpo_learns_a_reward_that_can_be_verified(prompts, fork_server):
    """A model of random weights learns to write digits, from the answers that it draws itself."""
    words = ("--data", prompts, *SMALL, *GRPO, "--set", "loss.reward=rewards:digits", "--epochs", 4)
    val = trained("grpo", "grpo", *words)
    assert val["reward"] > 0.9
    rewards = [entry["values"]["reward"] for entry in load_run("grpo").history.logged]
    assert rewards[0] < 0.3 < 0.8 < rewards[-1]
    answer = phalanx("predict", "grpo", "--prompt", "Digits, 7: ", "--max-tokens", 6)
    assert sum(letter.isdigit() for letter in answer.out.strip()[len("Digits, 7: ") :]) >= 4, answer.text


def test_grpo_with_shards_and_a_divergence(prompts, fork_server):
    words = ("--data", prompts, *SMALL, *GRPO, "--set", "loss.reward=rewards:digits", "--set", "loss.beta=0.04")
    val = trained("grpo", "grpo-fsdp", *words, "--strategy", "fsdp", "--max-steps", 4)
    assert 0 <= val["reward"] <= 1
    assert "divergence" in load_run("grpo-fsdp").history.logged[-1]["values"]


def test_grpo_names_wrong_reward_functions(prompts, fork_server):
    def refused(reward: str) -> str:
        answer = phalanx(
            "train", "grpo", "--data", prompts, *SMALL, *GRPO, *PLAIN[2:], "--set", f"loss.reward={reward}"
        )
        assert answer.code != 0
        return answer.text

    missing = phalanx("train", "grpo", "--data", prompts, *GRPO, "--dry-run")
    assert missing.code == 2
    assert "reward" in missing.text
    assert "there is no module 'rewrds'" in refused("rewrds:digits")
    assert "the reward function 'rewards:nothing' gave None" in refused("rewards:nothing")


def test_a_missing_template_and_missing_data_are_named(place, fork_server):
    write_chats(place / "few", "Argus")
    answer = phalanx("train", "sft", "--data", "few", "--device", "cpu", "--run-dir", "none")
    assert answer.code != 0
    assert "the chat template is missing" in answer.text
    assert "--set data.template=plain" in answer.text
    answer = phalanx("train", "dpo")
    assert "the recipe 'dpo' needs your files" in answer.text


def test_the_recipes_know_every_preset_of_their_model():
    assert load_recipe("sft").presets == load_recipe("dpo").presets == load_recipe("llama").presets


def test_the_example_writes_both_data_sets(tmp_path, monkeypatch):
    script = ROOT / "examples" / "09-language" / "make_chats.py"
    monkeypatch.setattr("sys.argv", [str(script), str(tmp_path), "--rows", "20"])
    runpy.run_path(str(script), run_name="__main__")
    rows = [json.loads(line) for line in (tmp_path / "chats" / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 20
    assert {message["role"] for row in rows for message in row["messages"]} == {"user", "assistant"}
    pair = json.loads((tmp_path / "preferences" / "val.jsonl").read_text().splitlines()[0])
    assert pair["chosen"].removeprefix("Gladly: ") == pair["rejected"].removeprefix("Ugh. ")
