"""context parallelism beyond the matrix: weighting by samples, models of a user, checkpoints, bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from layouts import assert_same
from long_proofs import long_proof
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.config import DistributedConfig
from phalanx.errors import ModelError, UsageError
from phalanx.loop.formation import Formation
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job
from phalanx.run.weights import whole_weights
from phalanx.strategies.base import whole
from phalanx.zoo.models import InnerAttention
from phalanx.zoo.models.gpt import gpt
from phalanx.zoo.models.llama import llama

SHAPE = {"layers": 2, "vocab_size": 61, "seq_len": 16}
MODELS = {"gpt": gpt, "llama": llama}
TIME = 16


class Net(nn.Module):
    """A model of a user's own: it returns logits only, and every position sees every other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 12)
        self.place = nn.Embedding(16, 12)
        self.inner = InnerAttention(causal=False)
        self.head = nn.Linear(12, 61)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1]) if positions is None else positions
        hidden = self.embed(tokens) + self.place(positions)
        heads = hidden.unflatten(-1, (2, 6)).transpose(1, 2)
        return self.head(hidden + self.inner(heads, heads, heads).transpose(1, 2).flatten(2))


def make_tokens(samples: int, time: int = TIME, *, ignoring: bool = True) -> TensorDataset:
    """Of a third of the samples only the last labels count: they lie in one rank's slice."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(61, (samples, time + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    if ignoring:
        targets[::3, : time - 2] = -100
    return TensorDataset(tokens[:, :-1].contiguous(), targets)


def train(folder: str, name: str = "llama", *, samples: int = 32, dtype: str = "float64", time: int = TIME, **settings):
    """Train on this rank; return the whole weights, the last evaluation, and the steps' losses and gradient norms."""
    torch.manual_seed(3)
    options = settings.pop("shape", {})
    loss_fn = settings.pop("loss_fn", None)
    model = (Net() if name == "own" else MODELS[name](**{**SHAPE, **options})).to(getattr(torch, dtype))
    defaults = {"device": "cpu", "progress": False, "learning_rate": 1e-2, "log_every_n_steps": 1}
    config = DistributedConfig(**{**defaults, **settings})
    # A mean over labels depends on which samples share a micro-batch, and so on the data ranks; by tokens it does not.
    uneven = config.loss_weighting == "tokens" or config.strategy != "fsdp"
    data = DataLoader(make_tokens(samples, time, ignoring=uneven), shuffle=True)
    result = Job("fit", TrainTask(model, data, data, loss_fn=loss_fn), config, Path(folder)).run()
    weights = whole_weights(model)
    assert weights is not None
    assert result.history is not None
    steps = result.history.steps
    return weights, result.history.epochs[-1].val, [step["grad_norm"] for step in steps], [s["loss"] for s in steps]


LAYOUTS = {
    "context 2": (2, {"context_parallel": 2}),
    "context 2 x fsdp 2": (4, {"context_parallel": 2, "strategy": "fsdp"}),
    "context 2 x pipeline 2": (4, {"context_parallel": 2, "pipeline_parallel": 2}),
    "context 2 x tensor 2": (4, {"context_parallel": 2, "tensor_parallel": 2, "activation_checkpointing": True}),
}
CASES = [
    pytest.param("gpt", "context 2 x tensor 2", "samples", 1, "float64", marks=long_proof),
    ("llama", "context 2", "samples", 1, "float64"),
    ("llama", "context 2 x fsdp 2", "samples", 1, "float64"),
    ("gpt", "context 2 x pipeline 2", "samples", 1, "float64"),
    ("own", "context 2 x fsdp 2", "tokens", 2, "float64"),
]
ONE: dict[tuple, tuple] = {}


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.parametrize(("name", "layout", "weighting", "accumulation", "dtype"), CASES)
def test_every_layout_equals_one_process(ranks, tmp_path, name, layout, weighting, accumulation, dtype):
    """37 samples in global batches of 8 are 5 steps with a ragged end; clipping by one norm of all parameters."""
    world_size, settings = LAYOUTS[layout]
    copies = 2 if "fsdp" in layout else 1
    micro = 8 // (accumulation * copies)
    common = {"loss_weighting": weighting, "gradient_clipping": 0.1, "epochs": 1, "samples": 37, "dtype": dtype}
    if dtype == "float32":
        common["optimizer"] = "sgd"  # Adam divides rounding errors by gradients that are hardly larger
    if name == "own":
        common["loss_fn"] = cross_entropy
    if copies > 1:
        common["strategy"] = "fsdp"
    key = (name, weighting, micro, copies, dtype)
    if key not in ONE:
        one = {"batch_size": micro, "gradient_accumulation_steps": 8 // micro, **common}
        ONE[key] = ranks(lambda: train(str(tmp_path), name, **one), world_size=1)[0]
    weights, metrics, norms, losses = ONE[key]

    def run():
        split = {"batch_size": micro, "gradient_accumulation_steps": accumulation, **settings}
        return train(str(tmp_path / "split"), name, **{**common, **split})

    tolerance = 1e-10 if dtype == "float64" else 1e-5
    assert len(norms) == 5
    assert min(norms) > 0.1
    for rank, (ours, measured, our_norms, our_losses) in enumerate(ranks(run, world_size=world_size)):
        assert_same(ours, weights, tolerance)
        assert measured == pytest.approx(metrics, rel=tolerance)
        if rank == 0:
            assert our_norms == pytest.approx(norms, rel=tolerance)
            assert our_losses == pytest.approx(losses, rel=tolerance)


@pytest.mark.parametrize(
    ("first", "second"), [((2, 2), (1, 1)), ((1, 1), (2, 2)), pytest.param((4, 4), (4, 2), marks=long_proof)]
)
def test_checkpoints_load_at_another_layout(ranks, tmp_path, first, second):
    """Saved mid-run on one layout and finished on another: as if it had never moved. The gpt's weights are tied."""
    place = {"checkpoint_dir": str(tmp_path / "ckpt")}

    def run(layout, **settings):
        world_size, degree = layout
        split = {"context_parallel": degree, "batch_size": 8 * degree // world_size, "loss_weighting": "tokens"}
        return ranks(lambda: train(str(tmp_path / "run"), "gpt", **split, **settings), world_size=world_size)[0][0]

    expected = run((1, 1), max_steps=4)
    run(first, max_steps=2, **place)
    assert_same(run(second, max_steps=4, resume_from_checkpoint=True, **place), expected, 1e-10)


def calls_of_a_loop() -> tuple[dict, torch.Tensor, torch.Tensor]:
    """A second run on the same model, after which it still takes and gives whole sequences."""
    torch.manual_seed(3)
    model = gpt(**SHAPE).double()
    tokens, targets = make_tokens(4).tensors
    for _ in range(2):
        with Formation(device="cpu", context_parallel=2, batch_size=4) as formation:
            wrapped = formation.prepare(model)
            optimizer = formation.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
            assert formation.unwrap(wrapped) is model
            formation.backward(wrapped(tokens, targets).loss)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return {name: whole(value).clone() for name, value in model.state_dict().items()}, *model(tokens, targets)


def test_a_second_run_on_the_same_model(ranks):
    torch.manual_seed(3)
    model = gpt(**SHAPE).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, targets = make_tokens(4).tensors
    for _ in range(2):
        model(tokens, targets).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss, logits = model(tokens, targets)
    for weights, our_loss, our_logits in ranks(calls_of_a_loop, world_size=2):
        assert_same(weights, model.state_dict(), 1e-12)
        assert our_loss.item() == pytest.approx(loss.item(), rel=1e-12)
        assert (our_logits - logits).abs().max() < 1e-12


def test_predictions_are_of_whole_sequences(ranks):
    def run() -> torch.Tensor | None:
        torch.manual_seed(3)
        config = DistributedConfig(device="cpu", progress=False, context_parallel=2, batch_size=2)
        data = TensorDataset(make_tokens(7).tensors[0])
        return Job("predict", TrainTask(llama(**SHAPE).double(), None, data), config).run().predictions

    torch.manual_seed(3)
    expected = llama(**SHAPE).double()(make_tokens(7).tensors[0])
    found = ranks(run, world_size=4)[0]
    assert (found - expected).abs().max() < 1e-12


class Pooling(Net):
    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(tokens, positions).mean(1)


class NoAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(hidden)


REFUSED = {
    "takes no `positions`": (UsageError, lambda: nn.Linear(2, 2), torch.zeros(2, 8, 2)),
    "found none that it knows": (UsageError, NoAttention, torch.zeros(2, 8, 4)),
    "neither one number": (ModelError, Pooling, torch.zeros(2, 8, dtype=torch.int64)),
    r"10 tokens.*= 4 equal chunks\n.*of 8 tokens.*to 12": (ModelError, Net, torch.zeros(2, 10, dtype=torch.int64)),
    r"2 tokens.*\n.*Pad them to 4": (ModelError, Net, torch.zeros(2, 2, dtype=torch.int64)),
    "32 tokens is longer than seq_len=16": (ModelError, lambda: gpt(**SHAPE), torch.zeros(2, 32, dtype=torch.int64)),
    r"dropout = 0\.2": (ModelError, lambda: gpt(**SHAPE, dropout=0.2), torch.zeros(2, 8, dtype=torch.int64)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_models_and_inputs_that_cannot_be_cut_are_refused(ranks, message):
    kind, build, inputs = REFUSED[message]

    def run():
        with Formation(device="cpu", context_parallel=2) as formation:
            formation.prepare(build())(inputs)

    with pytest.raises(kind, match=message):
        ranks(run, world_size=2)
