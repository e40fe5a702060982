"""DeepSpeed's engine in the training loop equals one process; its JSON, its checkpoints, its offload, its launcher."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from long_proofs import ALL, long_proof
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.config import DistributedConfig, read_settings, resolve, write_toml
from phalanx.errors import ConfigError, UsageError
from phalanx.loop.formation import Formation
from phalanx.loop.task import TrainTask
from phalanx.run import preflight
from phalanx.run.job import Job
from phalanx.strategies.base import local, whole
from phalanx.zoo.models.gpt import gpt

installed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install 'phalanx[deepspeed]'"
)
# Its embedding and head are one weight. A bias of attention keys has no gradient but rounding, which Adam blows up.
SHAPE = {"layers": 2, "vocab_size": 61, "seq_len": 16, "bias": False}


IMPORTED_BY_RANKS = ("deepspeed",)


def make_tokens(*, ignoring: bool) -> TensorDataset:
    tokens = torch.randint(61, (37, 9), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    if ignoring:
        targets[::3, :5] = -100  # samples differ in what they weigh
    return TensorDataset(tokens[:, :-1].contiguous(), targets)


def train(folder: Path, **settings) -> tuple[dict, list[float], float]:
    """Train a tiny gpt here; return its whole weights, the steps' gradient norms and the last validation loss."""
    torch.manual_seed(3)
    model = gpt(**SHAPE)
    model.embed.requires_grad_(not settings.pop("freeze", False))
    defaults = {"device": "cpu", "progress": False, "learning_rate": 5e-4, "log_every_n_steps": 1}
    config = DistributedConfig(**{**defaults, **settings})
    data = DataLoader(make_tokens(ignoring=config.loss_weighting == "tokens"), shuffle=True)
    result = Job("fit", TrainTask(model, data, data), config, folder).run()
    weights = {name: whole(value.detach()).clone() for name, value in model.state_dict().items()}
    return weights, [step["grad_norm"] for step in result.history.steps], result.history.epochs[-1].val["loss"]


def assert_same(ours: dict, theirs: dict, tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        difference = (ours[name] - value).abs().max().item() / max(1.0, value.abs().max().item())
        assert difference <= tolerance, f"{name} differs by {difference}"


def zero(stage: int, **more) -> dict:
    return {"deepspeed_config": {"zero_optimization": {"stage": stage}}, **more}


ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}
CASES = {
    "stage 0, samples": zero(0),
    "stage 0, tokens": zero(0, loss_weighting="tokens", accumulate=2),
    "stage 1, samples": zero(1, accumulate=4),
    "stage 1, tokens": zero(1, loss_weighting="tokens"),
    "stage 2, samples": zero(2),
    "stage 2, tokens": zero(2, loss_weighting="tokens", accumulate=4),
    "stage 3, samples": zero(3, accumulate=4),
    "stage 3, tokens": zero(3, loss_weighting="tokens", accumulate=2),
    "stage 2, offload": zero(2, offload="cpu", accumulate=2),
    "stage 3, offload": zero(3, offload="cpu", loss_weighting="tokens"),
    "stage 3, recomputed": zero(3, activation_checkpointing=True),
    "stage 2, the JSON's optimizer": {"deepspeed_config": ADAMW, "zero_stage": 2},
    "stage 1, frozen": zero(1, freeze=True, optimizer="adagrad"),
    "stage 3, frozen": zero(3, freeze=True, optimizer="sgd"),
}


def run_cases(folder: str, cases: dict, ranks: int) -> dict:
    """Run all cases in one process: importing DeepSpeed takes longer than all of them."""
    found = {}
    for name, case in cases.items():
        settings = {"gradient_clipping": 0.5, "epochs": 1, "batch_size": 8, **case}
        accumulation = settings.pop("accumulate", 1)
        batch_size = 8 // (ranks * accumulation)
        split = {"batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        found[name] = train(Path(folder), **{**settings, **split})
    return found


def alone(case: dict) -> dict:
    plain = {name: value for name, value in case.items() if name not in ("deepspeed_config", "zero_stage", "offload")}
    return {**plain, "accumulate": 1}


SOME = (
    "stage 0, tokens",
    "stage 1, samples",
    "stage 2, tokens",
    "stage 3, samples",
    "stage 2, offload",
    "stage 3, frozen",
)


@installed
def test_every_stage_equals_one_process(ranks, tmp_path):
    """37 samples in global batches of 8 are 5 steps with a ragged end; clipping by one norm."""
    cases = CASES if ALL else {name: CASES[name] for name in SOME}
    single = {name: alone(case) for name, case in cases.items()}
    expected = ranks(run_cases, str(tmp_path / "one"), single, 1, world_size=1)[0]
    for found in ranks(run_cases, str(tmp_path / "two"), cases, 2, world_size=2):
        for name, (weights, norms, loss) in found.items():
            theirs, their_norms, their_loss = expected[name]
            assert_same(weights, theirs, 1e-5)
            assert loss == pytest.approx(their_loss, rel=1e-5)
            if norms:  # the main rank's history
                assert len(norms) == 5
                assert max(norms) > 0.5, "clipping must matter"
                assert norms == pytest.approx(their_norms, rel=1e-5)


def save_and_resume(folder: str) -> dict:
    """For every stage: four steps at once, and two and two; then on from a checkpoint of another layout."""
    place, found = Path(folder), {}
    for stage in (0, 1, 2, 3):
        common = zero(stage, batch_size=4)
        run, ckpt = place / f"run{stage}", {"checkpoint_dir": str(place / f"ckpt{stage}")}
        straight = train(run, max_steps=4, **common)[0]
        train(run, max_steps=2, **common, **ckpt)
        resumed = train(run, max_steps=4, resume_from_checkpoint=True, **common, **ckpt)[0]
        found[stage] = straight, resumed
    moved = {"resume_from_checkpoint": str(place / "one-rank"), "max_steps": 4, "batch_size": 4}
    for stage in (1, 3):
        found[f"from one rank to stage {stage}"] = found[0][0], train(place / "moved", **zero(stage), **moved)[0]
    return found


def save_halfway(folder: str) -> None:
    place = Path(folder)
    train(place / "first", max_steps=2, batch_size=8, checkpoint_dir=str(place / "one-rank"))


def finish_on_one_rank(folder: str) -> dict:
    place = Path(folder)
    halfway = {stage: sorted((place / f"ckpt{stage}").glob("step-*"))[0] for stage in (0, 1, 2, 3)}
    common = {"batch_size": 8, "max_steps": 4}
    return {
        stage: train(place / "last", resume_from_checkpoint=str(path), **common)[0] for stage, path in halfway.items()
    }


@installed
def test_checkpoints_resume_by_bits_and_load_at_any_layout(ranks, tmp_path):
    ranks(save_halfway, str(tmp_path), world_size=1)
    found = ranks(save_and_resume, str(tmp_path), world_size=2)
    for results in found:
        for name, (expected, ours) in results.items():
            assert_same(ours, expected, 0.0 if name in (0, 1, 2, 3) else 1e-5)
    expected = found[0][0][0]
    for weights in ranks(finish_on_one_rank, str(tmp_path), world_size=1)[0].values():
        assert_same(weights, expected, 1e-5)


def own_loop(stage: int | None, **settings) -> tuple[dict, float, float]:
    """Two steps of two micro-batches without a prepared loader; how much of the weights a rank holds meanwhile."""
    torch.manual_seed(3)
    model = gpt(**SHAPE)
    total = sum(parameter.numel() for parameter in model.parameters())
    engine = {} if stage is None else {"strategy": "deepspeed", "zero_stage": stage}
    with Formation(device="cpu", gradient_accumulation_steps=2, **engine, **settings) as formation:
        prepared, optimizer = formation.prepare(model, torch.optim.AdamW(model.parameters(), lr=5e-4))
        tokens, targets = make_tokens(ignoring=False).tensors
        mine = torch.arange(32) % formation.world_size == formation.rank
        batches = zip(tokens[:32][mine].chunk(4), targets[:32][mine].chunk(4), strict=True)
        for inputs, labels in batches:
            formation.backward(nn.functional.cross_entropy(prepared(inputs).flatten(0, 1), labels.flatten()))
            optimizer.step()
            optimizer.zero_grad()
        held = sum(local(parameter).numel() for parameter in model.parameters()) / total
        with torch.no_grad():
            loss = nn.functional.cross_entropy(prepared(tokens).flatten(0, 1), targets.flatten()).item()
    return dict(model.state_dict()), held, loss


@long_proof
@installed
def test_a_custom_loop(ranks):
    expected, _, loss = ranks(own_loop, None, world_size=1)[0]
    both = ranks(lambda: [own_loop(stage) for stage in (2, 3)], world_size=2)
    for results in both:
        for weights, _, ours in results:
            assert_same(weights, expected, 1e-5)
            assert ours == pytest.approx(loss, rel=1e-5)
    assert [round(held, 2) for _, held, _ in both[0]] == [1.0, 0.5]


def passes_and_epochs_left_early(stage: int | None) -> None:
    """Leave an epoch between two micro-batches: they are dropped. Two passes add up, or are refused."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    expected = torch.ones(4, requires_grad=True)
    (data @ expected).square().mean().backward()
    settings = {"batch_size": 4, "gradient_accumulation_steps": 2, "zero_stage": stage}
    with Formation(device="cpu", strategy="deepspeed", **settings) as f:
        wrapped, optimizer, loader = f.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(data))
        for leave in (True, False):
            for (x,) in loader:
                f.backward(wrapped(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if leave:
                    break
        weights = f.strategy.state(wrapped, [])["model"]["weight"].flatten()
        torch.testing.assert_close(weights, (expected - 0.1 * expected.grad).detach())
        for (x,) in loader:
            f.backward(wrapped(x).mean())
            if stage is None:
                f.backward(wrapped(x).mean())
                continue
            with pytest.raises(UsageError, match=r"twice for one micro-batch.*\n.*first \+ second"):
                f.backward(wrapped(x).mean())
            break


@installed
@pytest.mark.parametrize("stage", [None, 1, 2, 3])
def test_dropped_micro_batches_and_several_passes(ranks, stage):
    ranks(lambda: passes_and_epochs_left_early(stage), world_size=1)


def one_rank_and_bf16(folder: str) -> dict:
    common = {"batch_size": 8, "max_steps": 4, "gradient_clipping": 0.5}
    plain = train(Path(folder), **common)[0]
    offloaded = train(Path(folder), **common, **zero(2, offload="cpu"))[0]
    place = {"checkpoint_dir": str(Path(folder) / "bf16")}
    low = {stage: train(Path(folder), **common, **zero(stage, mixed_precision="bf16"))[0] for stage in (1, 3)}
    train(Path(folder), **{**common, "max_steps": 2}, **place, **zero(3, mixed_precision="bf16"))
    resumed = train(Path(folder), **common, **place, **zero(3, mixed_precision="bf16"), resume_from_checkpoint=True)[0]
    return {"plain": plain, "offloaded": offloaded, 1: low[1], 3: low[3], "resumed": resumed}


@installed
def test_one_rank_and_bf16(ranks, tmp_path):
    """One rank has an engine too: offload is for those with one GPU. bf16 steps on fp32 masters, which are saved."""
    found = ranks(one_rank_and_bf16, str(tmp_path), world_size=1)[0]
    assert_same(found["offloaded"], found["plain"], 1e-5)
    for stage in (1, 3):
        assert {tensor.dtype for tensor in found[stage].values()} == {torch.float32}
        assert_same(found[stage], found["plain"], 5e-3)
        moved = max((found[stage][name] - found["plain"][name]).abs().max().item() for name in found["plain"])
        assert moved > 1e-7, "bf16 must have rounded something"
    assert_same(found["resumed"], found[3], 0.0)


def refuse(name: str) -> None:
    config = DistributedConfig(device="cpu", **zero(2))
    model = nn.Linear(2, 2)
    if name == "float64":
        Formation(config).prepare(model.double())
    elif name == "two models":
        Formation(config).prepare(model, nn.Linear(2, 2))
    elif name == "no optimizer":
        Formation(config).prepare(model)(torch.ones(1, 2))
        formation = Formation(config)
        formation.backward(formation.prepare(model)(torch.ones(1, 2)).sum())
    elif name == "an unknown key":
        bad = DistributedConfig(device="cpu", deepspeed_config={"zero_optimization": {"reduce_bukket_size": 5}})
        Formation(bad).prepare(model, torch.optim.AdamW(model.parameters()))
    elif name == "two rates":
        both = DistributedConfig(device="cpu", learning_rate=1e-3, deepspeed_config=ADAMW, zero_stage=1)
        Formation(both).prepare(model, torch.optim.AdamW(model.parameters(), lr=0.5))


REFUSED = {
    "float64": "keeps weights in float32, and weight is torch.float64",
    "two models": "trains one model",
    "no optimizer": "needs the optimizer before the first backward",
    "an unknown key": r"DeepSpeed refuses its settings: (.|\n)*reduce_bukket_size",
    "two rates": "the optimizer has lr = 0.5, but deepspeed_config says optimizer.params.lr = 0.001",
}


def refusals() -> dict[str, str]:
    """Return the message for each unsupported setting."""
    found = {}
    for name in REFUSED:
        with pytest.raises(UsageError) as caught:
            refuse(name)
        found[name] = str(caught.value)
    return found


@installed
def test_unsupported_settings_are_refused(ranks):
    for name, said in ranks(refusals, world_size=1)[0].items():
        assert re.search(REFUSED[name], said), name


def test_without_deepspeed_the_extra_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"not installed\n.*phalanx\[deepspeed\]"):
        preflight.check_before_start(DistributedConfig(deepspeed_config={}))


JSON = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}},
}


def test_the_json_sets_the_config_and_the_config_fills_auto(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(JSON))
    config = DistributedConfig(deepspeed_config=path, weight_decay=0.1)
    assert config == DistributedConfig(deepspeed_config=JSON, weight_decay=0.1)
    built = SimpleNamespace(_param_dict=json.loads(path.read_text()))  # as deepspeed.DeepSpeedConfig keeps it
    assert config == DistributedConfig(deepspeed_config=built, weight_decay=0.1)
    assert config.resolved_strategy == "deepspeed"
    assert (config.batch_size, config.gradient_clipping, config.mixed_precision) == (4, 1.0, "bf16")
    assert (config.zero_stage, config.offload, config.learning_rate, config.optimizer) == (2, "cpu", 3e-4, "adamw")
    assert (config.lr_schedule, config.warmup) == ("linear", 10)
    origins = resolve({"deepspeed_config": path, "weight_decay": 0.1}, environ={}).origins
    assert {name for name, origin in origins.items() if origin == "deepspeed_config"} >= {"batch_size", "zero_stage"}
    assert [origins[name] for name in ("weight_decay", "deepspeed_config", "epochs")] == ["argument"] * 2 + ["default"]
    (tmp_path / "run.toml").write_text(write_toml(config))
    assert DistributedConfig(**read_settings(tmp_path / "run.toml")) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 8}, r"batch_size = 8, but deepspeed_config says train_micro_batch_size_per_gpu = 4"),
        ({"zero_stage": 3}, r"zero_stage = 3, but deepspeed_config says zero_optimization.stage = 2"),
        ({"mixed_precision": "fp16"}, r"mixed_precision = 'fp16', but deepspeed_config says bf16.enabled = true"),
        ({"optimizer": "sgd"}, r"optimizer = 'sgd', but deepspeed_config says optimizer.type = \"Adam\""),
        ({"strategy": "fsdp"}, r"strategy = 'fsdp', but deepspeed_config asks for DeepSpeed"),
        ({"backend": "pytorch-fsdp"}, r"backend = 'pytorch-fsdp', but deepspeed_config asks"),
        ({"tensor_parallel": 2}, r"tensor_parallel = 2 does not go with strategy = 'deepspeed'"),
        ({"deepspeed_config": "{nonsense"}, "not valid JSON"),
        ({"deepspeed_config": "no/such.json"}, "no/such.json cannot be read: No such file"),
        ({"deepspeed_config": [1]}, "expected a path, JSON text, a dict or a DeepSpeedConfig"),
        ({"deepspeed_config": {"scheduler": {"type": "OneCycle"}}}, "scheduler 'OneCycle' is not one of WarmupLR"),
        ({"deepspeed_config": {"scheduler": {"type": "WarmupLR"}}}, 'add "warmup_type": "linear"'),
        ({"deepspeed_config": {"tensor_parallel": {"autotp_size": 2}}}, "tensor_parallel cannot be used here"),
        ({"deepspeed_config": {"gradient_cliping": 1}}, "unknown 'gradient_cliping'. Did you mean 'gradient_clipping'"),
        ({"deepspeed_config": {"zero_optimization": {"stage": 9}}}, "zero_stage = 9: not one of"),
        (
            {"deepspeed_config": {"zero_optimization": {"stage": "x"}}},
            "deepspeed_config: zero_optimization.stage = \"x\" becomes zero_stage = 'x': expected one of",
        ),
        ({"deepspeed_config": {"optimizer": "Adam"}}, 'deepspeed_config: optimizer = "Adam": expected an object'),
        ({"deepspeed_config": {"scheduler": "WarmupLR"}}, "scheduler = .*: expected an object"),
        ({"deepspeed_config": {"scheduler": {"type": "WarmupLR", "params": 3}}}, "params = 3: expected an object"),
        ({"deepspeed_config": {"train_batch_size": "x"}}, 'train_batch_size = "x": expected a whole number'),
        ({"deepspeed_config": {}, "offload": "nvme", "zero_stage": 3}, "nvme_path = '<folder"),
        ({"deepspeed_config": None, "offload": "nvme"}, "offload = 'nvme' is DeepSpeed's"),
        (
            {"deepspeed_config": {}, "offload": "nvme"},
            "zero_stage = 3 and nvme_path = .*; they are unset and unset",
        ),
        ({"deepspeed_config": {}, "offload": "cpu"}, "offload = 'cpu' needs DeepSpeed's ZeRO"),
        ({"deepspeed_config": {"bf16": {"enabled": False}}, "mixed_precision": "bf16"}, "bf16.enabled = false"),
    ],
)
def test_contradictions_are_shown_with_both_values(settings, message):
    with pytest.raises(ConfigError, match=message):
        DistributedConfig(**{"deepspeed_config": JSON, **settings})


def test_a_mistake_in_the_json_names_its_file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": "x"}}')
    with pytest.raises(ConfigError) as caught:
        DistributedConfig(deepspeed_config=path)
    [problem] = caught.value.problems
    assert problem.startswith(f'deepspeed_config ({path}): zero_optimization.stage = "x"')


RECIPE = {"batch_size": 16, "gradient_clipping": 2.0, "lr_schedule": "cosine", "warmup": 20, "max_steps": 7}


def test_the_json_overrides_a_recipe_but_not_the_user():
    resolved = resolve({"deepspeed_config": JSON}, recipe=RECIPE, recipe_name="r", environ={})
    config, origins = resolved.config, resolved.origins
    assert (config.batch_size, config.gradient_clipping, config.lr_schedule, config.warmup) == (4, 1.0, "linear", 10)
    assert (config.max_steps, origins["max_steps"], origins["warmup"]) == (7, "recipe r", "deepspeed_config")
    with pytest.raises(ConfigError, match=r"gradient_clipping = 2.0, but deepspeed_config says"):
        resolve({"deepspeed_config": JSON, "gradient_clipping": 2.0}, recipe=RECIPE, recipe_name="r", environ={})
    with pytest.raises(ConfigError, match="batch_size = 16, but deepspeed_config says"):
        resolve({"deepspeed_config": JSON}, recipe=RECIPE, environ={"PHALANX_BATCH_SIZE": "16"})


def test_a_train_batch_size_overrides_that_of_a_recipe():
    from phalanx.world.mesh import plan_mesh

    config = resolve({"deepspeed_config": {"train_batch_size": 24}}, recipe=RECIPE, environ={}).config
    assert config.batch_size is None
    plan_mesh(config, 2, 2)


@pytest.mark.parametrize("wish", [{"strategy": "deepspeed"}, {"backend": "deepspeed"}, {"deepspeed_config": {}}])
def test_a_missing_deepspeed_is_reported_before_contradictions(monkeypatch, wish):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        resolve({**wish, "tensor_parallel": 2}, environ={})
    missing, contradiction = caught.value.problems
    assert "not installed. Run: pip install 'phalanx[deepspeed]'" in missing
    assert contradiction.startswith("tensor_parallel = 2 does not go")
    with pytest.raises(ConfigError, match="1 mistake:\n  - epochs"):
        resolve({"epochs": 0}, environ={})


def test_a_train_batch_size_is_divided_or_refused():
    from phalanx.world.mesh import plan_mesh

    given = {"train_batch_size": 32, "gradient_accumulation_steps": 2}
    plan_mesh(DistributedConfig(deepspeed_config=given), 4, 4)
    with pytest.raises(UsageError, match=r"train_batch_size = 32, which does not divide by .* = 2 x 3 ranks = 6"):
        plan_mesh(DistributedConfig(deepspeed_config=given), 3, 3)
    with pytest.raises(UsageError, match=r"batch_size = 8 x gradient_accumulation_steps = 2 x 4 ranks = 64"):
        plan_mesh(DistributedConfig(deepspeed_config=given, batch_size=8), 4, 4)


@long_proof
@installed
def test_a_plain_process_gets_the_whole_weights(tmp_path, monkeypatch, fork_server):
    """`fit` starts the ranks; stage 3 leaves each with parts. Then evaluation, which needs no engine, agrees."""
    from phalanx import PyTorchDDPTrainer

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(3)
    model = gpt(**SHAPE)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = {"device": "cpu", "progress": False, "batch_size": 4, "max_steps": 3, "learning_rate": 5e-4}
    trainer = PyTorchDDPTrainer(model, num_workers=2, strategy="deepspeed", zero_stage=3, **settings)
    data = make_tokens(ignoring=False)
    history = trainer.fit(data, data)
    after = model.state_dict()
    assert {name: value.shape for name, value in after.items()} == {n: value.shape for n, value in before.items()}
    assert any((after[name] - value).abs().max() > 1e-4 for name, value in before.items())
    with torch.no_grad():
        outputs = model(data.tensors[0])
    loss = nn.functional.cross_entropy(outputs.flatten(0, 1), data.tensors[1].flatten()).item()
    assert loss == pytest.approx(history.epochs[-1].val["loss"], rel=1e-5)


def test_the_launchers_variables_and_arguments_are_understood(capsys):
    from phalanx.cli import main
    from phalanx.world.env import read_rank_env

    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
    found = read_rank_env(env)
    assert found is not None
    assert (found.rank, found.local_rank, found.local_world_size, found.node_rank) == (3, 1, 2, 1)
    assert main(["--local_rank=1", "--version"]) == 0
    assert capsys.readouterr().out.startswith("phalanx ")
