"""tensor parallelism beyond the matrix: plans of a user, checkpoints across layouts, bad plans and degrees."""

from __future__ import annotations

import functools
from importlib import import_module

import pytest
import torch
from layouts import SHAPE, assert_same, make_tokens, train
from long_proofs import long_proof
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import IterableDataset, TensorDataset

from phalanx import model as contract
from phalanx import torch_compat
from phalanx.config import DistributedConfig
from phalanx.errors import ModelError, UsageError
from phalanx.loop.formation import Formation
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job
from phalanx.strategies.base import local, whole
from phalanx.strategies.tensor_overlap import Overlap
from phalanx.strategies.tensor_parallel import STYLES
from phalanx.zoo.models.gpt import gpt
from phalanx.zoo.models.llama import llama


class Net(nn.Module):
    """A model of a user's own, with a plan of words and of torch's styles; ranks hold equal activations."""

    def __init__(self, dropout: float = 0.0, plan: dict | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 12)
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(12, 61)
        self.plan = plan

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(hidden + self.dropout(self.down(torch.tanh(self.up(hidden)))))

    def tensor_plan(self) -> dict:
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return self.plan or {"embed": "whole", **styles, "head": "whole"}


def test_a_plan_of_the_user_with_torch_styles(ranks, tmp_path):
    """Ranks hold equal activations here, so dropout must be equal too: then each rank's own `embed` stays equal."""
    common = {"name": "own", "epochs": 1, "batch_size": 8, "gradient_clipping": 0.5, "optimizer": "sgd"}

    def run(dropout: float, **settings):
        torch.manual_seed(3)
        model = Net(dropout).double()
        weights, _, _ = train(str(tmp_path / "own"), model=model, **common, **settings)
        return weights, local(model.embed.weight.detach()).clone()

    expected, _ = ranks(lambda: run(0.0), world_size=1)[0]
    for weights, _ in ranks(lambda: run(0.0, tensor_parallel=2), world_size=2):
        assert_same(weights, expected, 1e-10)
    (_, first), (_, second) = ranks(lambda: run(0.2, tensor_parallel=2), world_size=2)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("name", "apart", "world_size", "strategy"),
    [
        ("llama", False, 2, "ddp"),
        ("gpt", True, 2, "ddp"),
        pytest.param("gpt", False, 2, "ddp", marks=long_proof),
        pytest.param("gpt", True, 4, "fsdp", marks=long_proof),
        pytest.param("llama", False, 4, "fsdp", marks=long_proof),
    ],
)
def test_compiled_layers_are_one_graph_and_give_the_same_numbers(ranks, tmp_path, name, apart, world_size, strategy):
    """`apart`: biases are added after the products, as where these overlap with their communication."""
    common = {"name": name, "batch_size": 16 // world_size, "max_steps": 3, "optimizer": "sgd"}

    def run():
        torch.compile = functools.partial(torch.compile, backend="aot_eager")  # this process ends with the test
        Overlap.begin = lambda *_, **__: apart
        before = torch_compat.compiled_graphs()
        split = {"tensor_parallel": 2, "strategy": strategy, "compile": True}
        return train(str(tmp_path / "run"), **common, **split)[0], torch_compat.compiled_graphs() - before

    expected = ranks(lambda: train(str(tmp_path / "one"), **{**common, "batch_size": 8})[0], world_size=1)[0]
    for weights, graphs in ranks(run, world_size=world_size):
        assert_same(weights, expected, 1e-10)
        assert graphs == 1, "one for the blocks, which are alike, in all steps"


def overlap_on_cpus() -> None:
    """Let Inductor join products with communication on CPUs too: torch has a plain version of what it calls then."""
    memory, config = import_module("torch.distributed._symmetric_memory"), import_module("torch._inductor.config")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        torch.library.impl(memory.lib, name, "CPU")(getattr(memory, f"_{name}_fallback"))
    torch.distributed.is_nccl_available = lambda: True
    memory._is_test_mode = config._micro_pipeline_tp = config.force_disable_caches = True
    Overlap.begin = lambda *_, **__: True


@long_proof
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_products_that_are_joined_with_their_communication_give_the_same_numbers(ranks, tmp_path, name):
    common = {"name": name, "batch_size": 8, "max_steps": 3, "optimizer": "sgd"}

    def run():
        overlap_on_cpus()
        passes, joined = import_module("torch._inductor.fx_passes.post_grad"), []
        real = passes.micro_pipeline_tp_pass

        def count(graph):
            real(graph)
            joined.append(sum("symm_mem.fused" in str(node.target) for node in graph.nodes))

        passes.micro_pipeline_tp_pass = count
        return train(str(tmp_path / "run"), **common, tensor_parallel=2, compile=True)[0], joined

    expected = ranks(lambda: train(str(tmp_path / "one"), **common)[0], world_size=1)[0]
    for weights, joined in ranks(run, world_size=2):
        assert_same(weights, expected, 1e-10)
        assert joined == {"gpt": [4, 4], "llama": [4, 2]}[name], "in forward and backward of a layer"


def test_stop_and_resume_gives_the_same_bits(ranks, tmp_path):
    """With dropout, whose slices differ from rank to rank."""
    common = {"name": "gpt", "tensor_parallel": 2, "batch_size": 4, "shape": {"dropout": 0.2}}
    place = {"checkpoint_dir": str(tmp_path / "ckpt")}
    whole_run = ranks(lambda: train(str(tmp_path / "a"), max_steps=4, **common), world_size=4)
    ranks(lambda: train(str(tmp_path / "b"), max_steps=2, **common, **place), world_size=4)
    rest = ranks(
        lambda: train(str(tmp_path / "c"), max_steps=4, resume_from_checkpoint=True, **common, **place), world_size=4
    )
    for ours, theirs in zip(rest, whole_run, strict=True):
        assert_same(ours[0], theirs[0], 0.0)


@pytest.mark.parametrize(
    ("first", "second", "optimizer"),
    [
        ((4, 2, "fsdp"), (1, 1, "ddp"), "adamw"),
        pytest.param((4, 2, "fsdp"), (4, 1, "fsdp"), "adamw", marks=long_proof),
        ((1, 1, "ddp"), (2, 2, "ddp"), "adamw"),
        ((1, 1, "ddp"), (2, 2, "ddp"), "sgd"),  # fused for whole parameters only
    ],
)
def test_checkpoints_load_at_another_layout(ranks, tmp_path, first, second, optimizer):
    """Saved mid-run on one layout and finished on another: as if it had never moved. The gpt's weights are tied."""
    place = {"checkpoint_dir": str(tmp_path / "ckpt")}

    def run(layout, **settings):
        world_size, degree, strategy = layout
        split = {"strategy": strategy, "tensor_parallel": degree, "batch_size": 8 * degree // world_size}
        split["optimizer"] = optimizer
        return ranks(lambda: train(str(tmp_path / "run"), "gpt", **split, **settings), world_size=world_size)[0][0]

    expected = run((1, 1, "ddp"), max_steps=4)
    run(first, max_steps=2, **place)
    assert_same(run(second, max_steps=4, resume_from_checkpoint=True, **place), expected, 1e-10)


def predict_and_stream() -> tuple[list[int], torch.Tensor, list[float]]:
    """What each sample gives once, and the weights of a stream's batches, which ranks agree on."""
    torch.manual_seed(3)
    model = llama(**SHAPE).double()
    config = DistributedConfig(device="cpu", progress=False, tensor_parallel=2, batch_size=2)
    tokens = make_tokens(7, 8, ignoring=False).tensors[0]
    found = Job("predict", TrainTask(model, None, TensorDataset(tokens)), config).run().predictions
    formation = Formation(config)
    loader = formation.prepare_loader(Stream(tokens))
    scales = [formation.gradients.current.scale for _ in loader]
    formation.close()
    return [] if found is None else list(found.shape), found, scales


class Stream(IterableDataset):
    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __iter__(self):
        return iter(self.tokens)


def test_samples_shared_by_ranks_count_once(ranks):
    torch.manual_seed(3)
    expected = llama(**SHAPE).double()(make_tokens(7, 8, ignoring=False).tensors[0])
    results = ranks(predict_and_stream, world_size=4)
    assert results[0][0] == list(expected.shape)
    assert (results[0][1] - expected).abs().max() < 1e-12
    # The mean over ranks of a batch's factors is 1, and 7 samples in global batches of 4 make two of them.
    assert sum(sum(scales) for _, _, scales in results) / 4 == pytest.approx(2.0)


def test_a_model_built_on_the_meta_device_gets_its_parts(ranks):
    def build(**settings):
        with torch.device("meta"):
            model = gpt(**SHAPE)
        with Formation(device="cpu", tensor_parallel=2, **settings) as formation:
            formation.prepare(model)
        held = sum(local(parameter).numel() for parameter in model.parameters())
        return held, all(bool(torch.isfinite(whole(p.detach())).all()) for p in model.parameters())

    total = gpt(**SHAPE).num_parameters()
    for world_size in (2, 4):
        parts = ranks(lambda: build(strategy="fsdp"), world_size=world_size)
        assert all(finite for _, finite in parts)
        assert max(held for held, _ in parts) < 1.1 * total / world_size


def test_frozen_parameters_stay_frozen(ranks):
    def build():
        model = llama(**SHAPE)
        model.norm.requires_grad_(False)
        model.head.requires_grad_(False)
        with Formation(device="cpu", tensor_parallel=2) as formation:
            formation.prepare(model)
        return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]

    assert ranks(build, world_size=2)[0] == ["norm.weight", "head.weight"]


def test_the_words_of_a_plan_are_those_of_the_models():
    words = {word for name, word in vars(contract).items() if name.isupper() and isinstance(word, str)}
    assert set(STYLES) == words


BAD_PLANS = {
    "Did you mean 'colwise'": {"up": "colwize"},
    "names 'upp'": {"upp": "colwise"},
    "does not name embed.weight": {"up": "colwise", "down": "whole", "head": "whole"},
    "down.in_features = 20": {"embed": "whole", "up": "whole", "down": "rowwise", "head": "whole"},
}


@pytest.mark.parametrize("message", BAD_PLANS)
def test_bad_plans_are_refused(ranks, message):
    degree = 3 if "=" in message else 2

    def build():
        with Formation(device="cpu", tensor_parallel=degree) as formation:
            formation.prepare(Net(plan=BAD_PLANS[message]))

    with pytest.raises(UsageError, match=message):
        ranks(build, world_size=degree)


def test_bad_degrees_are_refused(ranks, tmp_path):
    def run(**settings):
        return train(str(tmp_path), batch_size=4, max_steps=1, **settings)

    with pytest.raises(UsageError, match=r"kv_heads = 2.*\n.*can be: 1, 2"):
        ranks(lambda: run(tensor_parallel=4), world_size=4)
    with pytest.raises(UsageError, match="no tensor_plan"):
        ranks(lambda: run(name="own", model=nn.Linear(2, 2), tensor_parallel=2), world_size=2)
    with pytest.raises(ModelError, match="9 tokens cannot be cut into tensor_parallel = 2"):
        ranks(lambda: run(tensor_parallel=2, time=9), world_size=2)
