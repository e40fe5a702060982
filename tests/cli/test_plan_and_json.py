"""`--dry-run` shows what would run and starts nothing; `--json` prints one JSON value and nothing else."""

from __future__ import annotations

import json
import re

import pytest
import torch
from command import files_under, finish, phalanx, start, write_script
from torch import nn

from phalanx.cli import main
from phalanx.config import DistributedConfig
from phalanx.recipes import load_recipe, recipe_names
from phalanx.tools.plan.auto import estimate_memory
from phalanx.world.mesh import Mesh


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def plan(*words: object) -> dict:
    answer = phalanx("train", *words, "--dry-run", "--json")
    assert answer.code == 0, answer.text
    return json.loads(answer.out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("loss.name=nonsense", "unknown loss 'nonsense'"),
        ("loss.name=cross_entropi", "unknown loss 'cross_entropi'. Did you mean 'cross_entropy'"),
        ("metrics.top5=phalanx.loop.metrics:top5_acuracy", "top5_accuracy"),
    ],
)
def test_a_dry_run_refuses_what_the_ranks_would_refuse(change, message):
    answer = phalanx("train", "digits", "--device", "cpu", "--set", change, "--dry-run")
    assert answer.code == 2
    assert message in answer.text


def test_a_dry_run_says_what_would_run_and_writes_nothing(tmp_path):
    answer = phalanx("train", "digits", "--device", "cpu", "--epochs", 2, "--dry-run")
    assert answer.code == 0
    assert "2 ranks on cpu" in answer.out
    assert "64 samples (32 per rank x 2 data ranks)" in answer.out
    assert "46 (23 per epoch of 1,437 samples)" in answer.out
    assert "99,178 parameters" in answer.out
    assert "at the peak, with activations and buffers" in answer.out
    assert ["epochs", "2", "flag"] in [line.split() for line in answer.out.splitlines()]
    assert files_under(tmp_path) == set()


def test_a_dry_run_names_a_batch_above_the_data_and_very_many_epochs():
    words = ("train", "digits", "--device", "cpu", "--dry-run")
    large = phalanx(*words, "--gradient-accumulation-steps", 1000).out
    assert re.search(r"the global batch of [\d,]+ is larger than the data of 1,\d+ samples", large), large
    assert re.search(r"these are 2,000 epochs", phalanx(*words, "--epochs", 2000).out)
    assert not re.search("larger than the data|these are", phalanx(*words).out)


def test_a_dry_run_reports_an_error_of_the_model_or_the_data_without_our_frames(tmp_path):
    net = "class Net(torch.nn.Linear):\n    def __init__(self, size=2):\n        super().__init__(size, 2)\n"
    write_script(
        tmp_path / "raising.py", f"import torch\n\n{net}\ndef load(rows=4):\n    raise OSError(f'no {{rows}} rows')\n"
    )
    words = ("train", "--device", "cpu", "--num-workers", 1, "--model", "raising:Net", "--dry-run")
    wrong = phalanx(*words, "--data", "digits", "--set", "model.size=abc")
    lost = phalanx(*words, "--data", "raising:load")
    assert (wrong.code, lost.code) == (1, 1)
    assert "phalanx: TypeError: " in wrong.err
    assert 'raising.py", line 5, in __init__' in wrong.err
    assert "phalanx: OSError: no 4 rows" in lost.err
    assert "phalanx/cli" not in wrong.err + lost.err


def test_a_dry_run_plans_for_gpus_that_are_not_here(monkeypatch):
    monkeypatch.setattr("phalanx.cli.train.count_gpus", lambda: 0)
    answer = phalanx("train", "llama", "--num-gpus", 8, "--dry-run")
    assert answer.code == 0
    assert "8 ranks on cuda" in answer.out
    assert "a run needs 8 GPUs on a node; this one has 0" in answer.out
    assert ["compile", "True", "recipe", "llama"] in [line.split() for line in answer.out.splitlines()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--num-nodes", 2, "--num-workers", 2), "2 nodes need a rendezvous"),
        (("--name", "../../evil"), "a name has no '/'"),
    ],
)
def test_a_dry_run_refuses_what_train_refuses(words, message):
    for dry in ((), ("--dry-run",)):
        answer = phalanx("train", "digits", "--device", "cpu", *words, *dry)
        assert answer.code == 2
        assert message in answer.err


@pytest.mark.parametrize("words", ["a100 --zero-stage 3", "h200 --zero-stage 2", "b200 --zero-stage 0"])
def test_a_plan_and_a_dry_run_of_it_count_the_same_states(words):
    found = json.loads(phalanx("plan", *f"llama-7b --gpus 8 --json --gpu {words}".split()).out)
    settings = {name.replace("_", "-"): value for name, value in found["settings"].items()}
    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    memory = plan("llama", "--preset", "7b", *flags)["estimate"]["memory"]
    planned = found["best"]["estimate"]["memory_gib"]["all"]
    for ours, theirs in (("weights", "parameters"), ("gradients", "gradients"), ("optimizer", "optimizer")):
        assert memory[ours] / 2**30 == pytest.approx(planned[theirs], rel=1e-3)


def test_a_dry_run_checks_where_a_pipeline_is_cut(capsys):
    words = ["train", "gpt", "--num-workers", "2", "--pipeline-parallel", "2", "--device", "cpu", "--dry-run"]
    assert main([*words, "--pipeline-cuts", "mesured"]) == 2
    shown = capsys.readouterr().err
    assert "unknown unit in pipeline_cuts 'mesured'. Did you mean 'measured'? Allowed: head, layers.0, " in shown
    assert main([*words, "--pipeline-cuts", "layers.0,layers.1"]) == 2
    assert "makes 3 stages, and the pipeline has 2" in capsys.readouterr().err
    assert main([*words, "--pipeline-cuts", "layers.1"]) == 0
    assert main([*words, "--pipeline-cuts", "measured"]) == 0


def test_a_plan_of_own_data_without_a_batch_size_has_the_size_that_the_run_would_take(tmp_path):
    body = "return torch.utils.data.TensorDataset(torch.zeros(70, 1))"
    write_script(tmp_path / "mine.py", f"import torch\n\ndef load():\n    {body}\n")
    answer = phalanx("train", "--model", "convnet", "--data", "mine:load", "--device", "cpu", "--dry-run")
    assert "32 samples (32 per rank x 1 data ranks)" in answer.out, answer.text


@pytest.mark.parametrize("name", [name for name in recipe_names() if not load_recipe(name).needs_data])
def test_every_recipe_has_a_plan(name):
    estimate = plan(name, "--device", "cpu")["estimate"]
    assert estimate["steps"] > 0
    assert estimate["memory"]["weights"] == 4 * estimate["parameters"]


def test_a_large_model_is_planned_without_its_memory():
    big = plan("llama", "--preset", "70b", "--device", "cpu", "--num-workers", 8, "--strategy", "fsdp")
    assert big["mesh"]["dp_shard"] == 8
    assert big["estimate"]["parameters"] > 60e9
    assert big["estimate"]["memory"]["total"] == pytest.approx(16 * big["estimate"]["parameters"] / 8, rel=1e-6)
    assert big["estimate"]["memory"]["peak"] > big["estimate"]["memory"]["total"]


def test_auto_shards_a_model_whose_copies_do_not_fit():
    big = plan("llama", "--preset", "7b", "--device", "cpu", "--num-workers", 8)
    assert big["strategy"] == "fsdp"
    assert big["mesh"]["dp_shard"] == 8
    assert "because ddp would need" in big["estimate"]["note"]
    assert plan("digits", "--device", "cpu", "--num-workers", 2)["strategy"] == "ddp"


def test_a_plan_names_mistakes_and_what_a_script_does_not_say(tmp_path):
    answer = phalanx("train", "digits", "--resume-from-checkpoint", "absent", "--dry-run")
    assert answer.code == 2
    write_script(tmp_path / "own.py", "raise SystemExit('it ran')")
    answer = phalanx("train", "--script", "own.py", "--num-workers", 2, "--device", "cpu", "--dry-run")
    assert "the script decides them when it runs" in answer.out
    assert "it ran" not in answer.text
    assert files_under(tmp_path) == {"own.py"}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "rmsprop", "adagrad", "adam"])
def test_the_memory_is_what_one_rank_holds(optimizer):
    from phalanx.loop.optim import build_optimizer

    model, config = nn.Linear(64, 32), DistributedConfig(optimizer=optimizer)
    made = build_optimizer(config, model.parameters(), torch.device("cpu"))
    model(torch.randn(2, 64)).sum().backward()
    made.step()
    held = [value for state in made.state.values() for value in state.values() if torch.is_tensor(value)]
    memory = estimate_memory(model, config, Mesh())
    assert memory.optimizer == sum(tensor.numel() * 4 for tensor in held if tensor.numel() > 1)
    assert memory.weights == memory.gradients == sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.parametrize(
    ("settings", "mesh", "shares"),
    [
        ({}, Mesh(dp_replicate=4), (1, 1, 1)),
        ({"strategy": "fsdp"}, Mesh(dp_shard=4), (4, 4, 4)),
        ({"zero_stage": 2}, Mesh(dp_shard=4), (1, 4, 4)),
        ({"strategy": "fsdp", "sharding": "hybrid"}, Mesh(dp_replicate=2, dp_shard=2), (2, 2, 2)),
        ({"tensor_parallel": 2}, Mesh(dp_shard=2, tp=2), (4, 4, 4)),
    ],
)
def test_sharding_divides_the_memory(settings, mesh, shares):
    model = nn.Linear(64, 64, bias=False)
    whole, memory = 64 * 64 * 4, estimate_memory(model, DistributedConfig(num_workers=4, **settings), mesh)
    weights, gradients, states = shares
    found = (memory.weights, memory.gradients, memory.optimizer)
    assert found == (whole // weights, whole // gradients, 2 * whole // states)


def test_train_prints_its_summary_as_json_and_all_else_on_standard_error(tmp_path):
    words = ("train", "digits", "--device", "cpu", "--num-workers", 2, "--epochs", 1, "--json")
    answer = finish(start(*words, cwd=tmp_path))
    assert answer.code == 0, answer.text
    summary = json.loads(answer.out)
    assert summary["status"] == "finished"
    assert summary["step"] == plan("digits", "--device", "cpu", "--epochs", 1)["estimate"]["steps"] == 23
    assert 0 < summary["metrics"]["val/accuracy"] <= 1
    assert summary["throughput"] > 0
    assert (tmp_path / summary["run_dir"] / "events.jsonl").exists()
    assert "starting 2 ranks" in answer.err


def test_a_failed_run_says_so_as_json(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)
    write_script(tmp_path / "own.py", "print('hello'); raise ValueError('broken')")
    answer = phalanx("train", "--script", "own.py", "--device", "cpu", "--json")
    assert answer.code == 1
    summary = json.loads(answer.out)
    assert summary["status"] == "failed"
    assert "broken" in summary["error"]
    assert "hello" in answer.err


def test_tune_prints_its_trials_as_json(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.toml").write_text("learning_rate = { choice = [0.001, 0.01] }\n")
    words = (
        "tune",
        "digits",
        "--space",
        "space.toml",
        "--trials",
        2,
        "--max-steps",
        2,
        "--device",
        "cpu",
        "--json",
    )
    answer = phalanx(*words)
    assert answer.code == 0, answer.text
    study = json.loads(answer.out)
    assert len(study["trials"]) == 2
    assert study["best"]["params"]["learning_rate"] in (0.001, 0.01)
    assert study["metric"] == "val/loss"


def test_strategies_and_settings_are_json_too():
    rows = json.loads(phalanx("strategies", "--json").out)
    assert {"ddp", "fsdp", "tensor"} <= {row["name"] for row in rows}
    (row,) = json.loads(phalanx("strategies", "fsdp", "--json").out)
    assert {"sharding", "shard_size", "wrap_class", "offload"} <= set(row["settings"])
    values = json.loads(phalanx("config", "show", "digits", "--json").out)
    assert values["epochs"] == {"value": 12, "origin": "recipe digits"}


def test_one_strategy_is_shown_in_detail_and_an_unknown_one_refused():
    out = phalanx("strategies", "fsdp").out
    assert out.startswith("fsdp\n  how ")
    assert "--shard-size" in out
    assert "ring" not in out
    answer = phalanx("strategies", "zero2")
    assert answer.code == 2
    assert "unknown strategy 'zero2'. Did you mean 'zero'?" in answer.err
