"""How the model is called, what evaluation counts, and that a run restores the caller's process: one rank, in place."""

from __future__ import annotations

import collections
import functools
import os
import pickle
import re
import signal
import sys
import textwrap
from typing import TYPE_CHECKING

import programs
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from phalanx import PyTorchDDPTrainer, RunningTrainer
from phalanx.errors import CheckpointError, CommunicationError, DataError, ModelError, UsageError
from phalanx.loop.evaluate import kept_in_eval
from phalanx.loop.hooks import Callback, Hooks
from phalanx.loop.metrics import cross_entropy, find_loss
from phalanx.loop.step_info import StepInfo

if TYPE_CHECKING:
    from phalanx.observe.history import History


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def trainer(model: nn.Module, **settings) -> PyTorchDDPTrainer:
    return PyTorchDDPTrainer(model, num_workers=1, device="cpu", progress=False, **{"batch_size": 4, **settings})


class Masked(nn.Module):
    """Its second argument is optional and no target."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        assert mask is None, "targets were passed as the mask"
        return self.layer(x)


def test_targets_are_not_passed_as_an_optional_argument():
    data = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    model = Masked()
    trainer(model, max_steps=1).fit(data)
    found = trainer(model).evaluate(data)
    right = (model(data.tensors[0]).argmax(1) == data.tensors[1]).double().mean().item()
    assert found["accuracy"] == pytest.approx(right)
    assert "loss" in found


@pytest.mark.parametrize("name", ["labels", "target", "y"])
def test_an_optional_argument_named_as_a_target_gets_the_target(name):
    namespace: dict = {"nn": nn}
    exec(
        textwrap.dedent(f"""
        class Own(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(3, 2)
            def forward(self, x, {name}=None):
                scores = self.layer(x)
                return scores if {name} is None else nn.functional.cross_entropy(scores, {name})
        """),
        namespace,
    )
    data = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    assert trainer(namespace["Own"](), max_steps=2).fit(data).status == "finished"


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (
            lambda output, target: nn.functional.cross_entropy(output, target, reduction="none"),
            r"tensor of shape \[4\]",
        ),
        (lambda output, target: None, "no loss was found"),
        (lambda output, target: 1.0, "the loss is a float"),
    ],
)
def test_a_loss_that_is_not_a_number_is_explained(loss_fn, message):
    data = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    with pytest.raises(ModelError, match=message):
        trainer(nn.Linear(3, 2), loss_fn=loss_fn, max_steps=1).fit(data)


def test_a_bare_tensor_is_not_a_data_set():
    with pytest.raises(DataError, match="TensorDataset"):
        trainer(nn.Linear(3, 2)).fit(torch.randn(8, 3))


@pytest.mark.parametrize("name", ["mse", "l1", "smooth_l1", "huber", "bce", "bce_with_logits"])
def test_a_named_loss_compares_one_output_with_one_target(name):
    output, target = torch.rand(16, 1), torch.rand(16)
    loss_fn = find_loss(name)
    assert loss_fn(output, target) == loss_fn(output[:, 0], target) == loss_fn(output, target[:, None])
    if name in ("mse", "l1", "smooth_l1", "huber"):
        with pytest.raises(ModelError, match=re.escape("the outputs are [16, 1] and the targets [1, 16]")):
            loss_fn(output, target[None])
    assert pickle.loads(pickle.dumps(loss_fn))(output, target) == loss_fn(output, target)


@pytest.mark.parametrize(
    ("loss_fn", "own"),
    [
        (nn.MSELoss(), "mse"),
        (nn.SmoothL1Loss(), "smooth_l1"),
        (F.l1_loss, "l1"),
        (functools.partial(F.huber_loss, delta=2.0), "huber"),
        (nn.PoissonNLLLoss(), ""),
    ],
)
def test_a_loss_of_torch_that_would_broadcast_is_refused_before_the_first_step(loss_fn, own):
    model = nn.Linear(3, 1)
    before = model.weight.detach().clone()
    trained = trainer(model, batch_size=4, loss_fn=loss_fn)
    inputs, targets = torch.rand(8, 3), torch.rand(8)
    with pytest.raises(ModelError) as caught:
        trained.fit((inputs, targets))
    assert "the outputs are [4, 1] and the targets [4]" in str(caught.value)
    assert "output.squeeze(-1)" in caught.value.hint
    assert (f"Or loss_fn='{own}'" in caught.value.hint) is bool(own)
    assert torch.equal(model.weight, before)
    trained.fit((inputs, targets[:, None]))
    with pytest.raises(ModelError, match=re.escape("the targets [8]")):  # whatever the first data were
        trainer(model, batch_size=8, loss_fn=loss_fn).evaluate((inputs, targets))


def test_a_named_loss_trains_as_without_a_name():
    found = []
    for loss_fn in (None, "mse"):
        torch.manual_seed(0)
        model, inputs = nn.Linear(1, 1), torch.linspace(0, 1, 32)[:, None]
        trainer(model, batch_size=8, loss_fn=loss_fn, epochs=2).fit((inputs, inputs[:, 0]))
        found.append(model.weight.item())
    assert found[0] == found[1]


@pytest.mark.parametrize("returned", ["good", None, {"a": 1.0}, ("a", 3)])
def test_a_metric_that_is_not_a_number_is_named(returned):
    trained = trainer(nn.Linear(2, 1), batch_size=4, metrics={"mine": lambda o, t: returned})
    with pytest.raises(ModelError, match=r"the metric 'mine' returned a .*, which is not a number"):
        trained.evaluate((torch.rand(8, 2), torch.rand(8)))


@pytest.mark.parametrize("data", [[1, 2, 3], (1.0, 2.0)])
def test_numbers_are_not_batches(data):
    with pytest.raises(UsageError, match=rf"fit\(\) got a {type(data).__name__} of numbers"):
        trainer(nn.Linear(2, 1), batch_size=4).fit(data)


@pytest.mark.parametrize("convert", [lambda inputs: inputs, lambda inputs: inputs.numpy()])
def test_inputs_alone_can_be_predicted(convert):
    model, inputs = nn.Linear(2, 1), torch.rand(10, 2)
    trained = trainer(model, batch_size=4)
    torch.testing.assert_close(trained.predict(convert(inputs)), model(inputs).detach())


def uneven_tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 7, (9, 6), generator=generator)
    labels = tokens.clone()
    labels[torch.rand(9, 6, generator=generator) < torch.linspace(0, 0.9, 9)[:, None]] = -100
    return TensorDataset(tokens, labels)


@pytest.mark.parametrize("batch_size", [1, 2, 4, 9])
def test_evaluation_by_tokens_does_not_depend_on_the_batch(batch_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    tokens, labels = uneven_tokens().tensors
    scores = model(tokens)
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()).item()
    counted = labels != -100
    accuracy = (scores.argmax(-1) == labels)[counted].double().mean().item()
    found = trainer(model, batch_size=batch_size, loss_weighting="tokens").evaluate(uneven_tokens())
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["accuracy"] == pytest.approx(accuracy)


class Named(nn.Module):
    Pair = collections.namedtuple("Pair", ["double", "sum"])

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> Named.Pair:
        return self.Pair(2 * x * self.weight, {"sum": x.sum(1)})


def test_predict_keeps_named_tuples_and_takes_any_mapping():
    x = torch.arange(12.0).view(6, 2)
    found = trainer(Named()).predict(TensorDataset(x, torch.zeros(6)))
    assert torch.equal(found.double, 2 * x)
    assert torch.equal(found.sum["sum"], x.sum(1))

    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs * self.weight

    batches = [collections.UserDict(inputs=x[:4], labels=torch.zeros(4)), collections.UserDict(inputs=x[4:], labels=0)]
    assert torch.equal(trainer(Keyword(), batch_size=None).predict(batches), x)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"twice": 2 * x * self.weight, "penalty": x.sum()}


def test_predict_takes_batches_of_different_lengths_and_numbers():
    rows = [torch.full((length,), float(length)) for length in range(1, 5)]
    loader = DataLoader(rows, batch_size=2, collate_fn=lambda some: nn.utils.rnn.pad_sequence(some, batch_first=True))
    found = trainer(Padded(), batch_size=2).predict(loader)
    assert [row.tolist() for row in found["twice"]] == [[2, 0], [4, 4], [6, 6, 6, 0], [8, 8, 8, 8]]
    assert found["penalty"].tolist() == [5, 25]


TAGS = {
    "[batch, time]": lambda right: right,
    "flat": lambda right: right.flatten(),
    "[1]": lambda right: right.mean().reshape(1),
}


@pytest.mark.parametrize("shape", TAGS)
def test_a_metric_of_another_shape_is_refused(shape):
    tokens = torch.randint(5, (8, 6))
    tagger = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))

    def measured(metric) -> float:
        metrics = {"tags": lambda output, target: metric((output.argmax(-1) == target).float())}
        return trainer(tagger, metrics=metrics).evaluate(TensorDataset(tokens, tokens))["tags"]

    with pytest.raises(
        ModelError, match=r"metric 'tags' returned values of shape \[.*4 samples(.|\n)*\(total, count\)"
    ):
        measured(TAGS[shape])
    expected = (tagger(tokens).argmax(-1) == tokens).float().mean().item()
    for metric in (torch.mean, lambda right: right.mean(1), lambda right: (right.sum(), right.numel())):
        assert measured(metric) == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:scores")
def test_classes_are_where_torch_has_them():
    """[batch, classes, length], also where there are as many classes as positions; else the last dimension may fit."""
    data = TensorDataset(torch.randn(8, 5, 5), torch.randint(5, (8, 5)))
    scores, labels = data.tensors
    with pytest.warns(UserWarning, match=r"scores \[4, 5, 5\] for labels \[4, 5\]: the classes .* dimension 1"):
        found = trainer(nn.BatchNorm1d(5, affine=True), loss_fn="cross_entropy").evaluate(data)
    scale = 1 / (1 + 1e-5) ** 0.5
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(scores * scale, labels).item(), rel=1e-5)
    assert found["accuracy"] == pytest.approx((scores.argmax(1) == labels).double().mean().item())
    assert cross_entropy(scores[:, :3], labels[:, :3]) == nn.functional.cross_entropy(scores[:, :3].mT, labels[:, :3])


@pytest.mark.parametrize("whole", [False, True])
def test_modules_keep_their_modes(whole):
    """A part in eval mode stays so, a model in eval mode is trained; each has its own mode again afterwards."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1)))
    (model if whole else model[0]).eval()
    modes = [module.training for module in model.modules()]
    seen = []
    model[1][0].register_forward_hook(lambda layer, *_: seen.append((layer.training, model[0].training)))
    data = TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
    trainer(model, loss_fn="mse", epochs=2).fit(data, data)
    steps, evaluations = [(True, whole)] * 2, [(False, False)] * 2
    assert seen == evaluations + (steps + evaluations) * 2  # first the batches that are tried
    assert [module.training for module in model.modules()] == modes
    assert model[0].num_batches_tracked.item() == (4 if whole else 0)
    assert kept_in_eval(model) == (
        "" if whole else "modules left in eval mode: 0; call model.train() before fit() to train them"
    )


class LearnedScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(()))
        self.register_buffer("weight", torch.ones(()))
        self.seen: list[str] = []

    def _apply(self, *arguments, **options):
        self.seen.append("moved")
        return super()._apply(*arguments, **options)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean() * self.weight * torch.exp(-self.log)


def test_a_loss_that_is_a_module_is_moved_and_its_parameters_are_not_forgotten():
    data, loss = TensorDataset(torch.randn(8, 3), torch.randn(8, 1)), LearnedScale()
    with pytest.raises(UsageError, match=r"LearnedScale has parameters \(log\)(.|\n)*requires_grad_\(False\)"):
        trainer(nn.Linear(3, 1), loss_fn=loss).fit(data)
    assert trainer(nn.Linear(3, 1), loss_fn=loss).evaluate(data)["loss"] > 0
    trainer(nn.Linear(3, 1), loss_fn=loss.requires_grad_(False)).fit(data)
    assert loss.seen == ["moved", "moved"]
    assert loss.log.grad is None


class Nano(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, idx, targets=None):
        logits = self.head(self.embed(idx))
        return logits, None if targets is None else nn.functional.cross_entropy(logits.mT, targets)


def test_a_model_given_as_compiled_is_called_and_saved_like_the_model(tmp_path):
    tokens = torch.randint(20, (8, 6))
    data = TensorDataset(tokens, tokens.roll(-1, 1))
    kept = {"checkpoint_dir": str(tmp_path / "kept"), "ema_decay": 0.9}
    model = Nano()
    compiled = trainer(torch.compile(model, backend="eager"), **kept)
    compiled.fit(data, epochs=1)
    compiled.save(tmp_path / "net.safetensors")
    torch.save(compiled.model.state_dict(), tmp_path / "own.pt")
    for file in ("net.safetensors", "own.pt"):
        for other in (Nano(), torch.compile(Nano(), backend="eager")):
            trainer(other).load(tmp_path / file)
            torch.testing.assert_close(list(other.parameters()), list(model.parameters()))
    history = trainer(Nano(), **kept).fit(data, epochs=2, resume_from_checkpoint=True)
    assert len(history.epochs) == 2


def test_the_callers_process_is_left_as_it_was():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    data = TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2)
    model = nn.Linear(3, 2)
    torch.manual_seed(5)
    trainer(model, max_steps=1, deterministic=True, threads_per_rank=1).fit(data)
    trainer(model).evaluate(data)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("stop", [4, 6, 8, 12])
def test_a_resumed_history_is_that_of_the_whole_run(tmp_path, stop):
    """Checkpoints every two steps, four steps an epoch: some fall on an epoch's end."""
    data = DataLoader(TensorDataset(torch.randn(16, 3), torch.arange(16) % 2), shuffle=True)

    def run(folder: str, **settings) -> History:
        torch.manual_seed(1)
        return trainer(nn.Linear(3, 2), checkpoint_frequency="2 steps", **settings).fit(
            data, data, checkpoint_dir=tmp_path / folder
        )

    whole = run("whole", epochs=3)
    run("part", max_steps=stop)
    rest = run("part", epochs=3, resume_from_checkpoint=True)
    ours, theirs = ([(r.epoch, r.step, r.train_loss, r.val) for r in h.epochs] for h in (rest, whole))
    if stop % 4 == 0:
        assert ours == theirs
    else:  # the run that was cut short closed its last, partial epoch with a separate record
        assert ours[-1] == theirs[-1]
    assert rest.best_loss == pytest.approx(whole.best_loss) or stop % 4


SCRIPT = """
import os, signal, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from phalanx import PyTorchDDPTrainer, RunningTrainer

def stop(info):
    if info.step == 3:
        os.kill(os.getpid(), signal.SIGUSR1)

data = TensorDataset(torch.randn(64, 3), torch.arange(64) % 2)
PyTorchDDPTrainer(nn.Linear(3, 2), num_workers={ranks}, device="cpu", batch_size=4, epochs=50, hooks=[stop],
                  checkpoint_dir="ckpt", progress=False).fit(data)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plain_script_that_is_preempted_exits_with_75(tmp_path, ranks):
    (tmp_path / "train.py").write_text(SCRIPT.format(ranks=ranks))
    done = programs.run([sys.executable, "train.py"], capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 75, done.stderr
    assert f"stopped by {signal.SIGUSR1.name} after step" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "ckpt").glob("step-*"))


class NanoStyle(nn.Module):
    """Calls, returns and ignores as nanoGPT does: (logits, loss), targets of -1, the last position without targets."""

    def __init__(self, *, loss_first: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 11)
        self.loss_first = loss_first

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None):
        logits = self.table(idx)
        if targets is None:
            return logits[:, [-1]], None
        loss = nn.functional.cross_entropy(logits.view(-1, 11), targets.view(-1), ignore_index=-1)
        return (loss, logits) if self.loss_first else (logits, loss)


@pytest.mark.parametrize("loss_first", [False, True])
def test_a_loss_is_found_on_either_side_of_a_tuple(loss_first):
    tokens = torch.randint(11, (8, 6), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -1
    data = TensorDataset(tokens, targets)
    model = NanoStyle(loss_first=loss_first)
    assert trainer(model, max_steps=2).fit(data).status == "finished"
    found = trainer(model).evaluate(data)
    hits = (model.table(tokens).argmax(-1) == targets)[targets >= 0].double().mean().item()
    assert found["accuracy"] == pytest.approx(hits)
    assert trainer(model).predict(data).shape == (8, 1, 11)


def test_the_error_shows_what_the_model_was_called_with_and_returned():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x, y):
            return self.layer(x), self.layer(x).sum(), x.sum()

    data = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    words = r"returned: tuple of \(float32 \[4, 2\], float32 \[\], float32 \[\]\)\. .* model\(float32 \[4, 3\], int64"
    with pytest.raises(ModelError, match=words):
        trainer(Two(), max_steps=1).fit(data)


@pytest.mark.parametrize("convert", [torch.Tensor.clone, torch.Tensor.numpy])
def test_a_pair_of_tensors_or_arrays_is_a_data_set(convert):
    inputs, targets = torch.randn(12, 3), torch.arange(12) % 2
    model, own = nn.Linear(3, 2), trainer(nn.Linear(3, 2), epochs=1, batch_size=4)
    own.model.load_state_dict(model.state_dict())
    history = own.fit((convert(inputs), convert(targets)))
    assert history.epochs[0].step == 3
    expected = trainer(model, epochs=1, batch_size=4)
    expected.fit(TensorDataset(inputs, targets))
    torch.testing.assert_close(own.model.weight, model.weight)


def test_fit_says_where_callbacks_and_losses_belong():
    with pytest.raises(
        UsageError, match=r"'callbacks' is an argument of the trainer itself: Trainer\(model, callbacks="
    ):
        trainer(nn.Linear(3, 2)).fit((torch.randn(12, 3), torch.arange(12) % 2), callbacks=[])


def test_a_list_of_two_tensors_and_a_misspelt_argument_are_answered():
    with pytest.raises(ModelError, match=r"A batch is float32 \[12, 3\] without a target: give TensorDataset"):
        trainer(nn.Linear(3, 2), max_steps=1).fit([torch.randn(12, 3), torch.arange(12) % 2])
    with pytest.raises(UsageError, match=r"unknown setting 'callback'. 'callbacks' is an argument of the trainer"):
        trainer(nn.Linear(3, 2), callback=[])


def test_weights_that_are_not_there_are_answered_with_the_nearest_file(tmp_path):
    (tmp_path / "net.pt").touch()
    with pytest.raises(CheckpointError, match=r"neither a file nor a checkpoint directory\n  Did you mean '.*net.pt'?"):
        trainer(nn.Linear(3, 2)).load(tmp_path / "nett.pt")


def test_a_penalty_next_to_scores_is_not_the_loss():
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x), self.layer.weight.square().sum()

    data = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    with pytest.raises(ModelError, match="none is obvious for an output tuple"):
        trainer(Penalised(), max_steps=1).fit(data)


class CausalStyle(nn.Module):
    """Shifts the labels itself, or not, as Hugging Face's causal and masked language models do."""

    def __init__(self, shift: int, extra: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 11)
        self.shift, self.extra = shift, extra

    def forward(self, input_ids, labels=None):
        logits = self.table(input_ids)
        kept = logits[:, : -self.shift] if self.shift else logits
        loss = nn.functional.cross_entropy(kept.flatten(0, 1), labels[:, self.shift :].flatten())
        return {"loss": loss + self.extra, "logits": logits}


@pytest.mark.parametrize(("shift", "extra"), [(0, 0.0), (1, 0.0), (1, 0.5)])
def test_accuracy_compares_what_the_models_own_loss_compares_or_is_left_out(shift, extra):
    tokens = torch.randint(11, (8, 6), generator=torch.Generator().manual_seed(0))
    labels = tokens.masked_fill(torch.arange(6) == 2, -100)
    model = CausalStyle(shift, extra)
    found = trainer(model).evaluate([{"input_ids": tokens, "labels": labels}])
    if extra:
        assert set(found) == {"loss"}
        return
    guesses = model.table(tokens).argmax(-1)[:, : 6 - shift]
    wanted = labels[:, shift:]
    assert found["accuracy"] == pytest.approx((guesses == wanted)[wanted >= 0].double().mean().item())


def test_accuracy_of_a_hugging_face_causal_model_is_that_of_the_next_token():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_head=1, n_embd=16, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.randint(32, (8, 12), generator=torch.Generator().manual_seed(0))
    found = trainer(model).evaluate([{"input_ids": tokens, "labels": tokens}])
    hits = (model(tokens).logits[:, :-1].argmax(-1) == tokens[:, 1:]).double().mean().item()
    assert found["accuracy"] == pytest.approx(hits)


def test_functions_and_callbacks_that_a_lost_rank_broke_off_are_called_once_each():
    """After a recovery the step is complete, and what follows it goes on with what was broken off."""
    called: list[str] = []
    breaks = {"second", "own"}

    def note(name: str) -> None:
        if name in breaks:
            breaks.remove(name)
            raise CommunicationError("a rank was lost")
        called.append(name)

    class Own(Callback):
        def on_step_end(self, trainer, info):
            note("own")

    names = ("first", "second", "third")
    hooks = Hooks([*(lambda info, name=name: note(name) for name in names), Own(), (lambda info: note("rare"), 2)])
    for _ in range(2):
        with pytest.raises(CommunicationError):
            hooks.after_step(StepInfo(7, 0, 1, 0.1, torch.zeros(())))
    hooks.after_step(StepInfo(7, 0, 1, 0.1, torch.zeros(())))
    assert called == ["first", "second", "third", "own"]
    assert hooks.called == {}
    hooks.after_step(StepInfo(8, 0, 1, 0.1, torch.zeros(())))
    assert called[4:] == ["first", "second", "third", "rare", "own"]


def test_callbacks_get_all_that_the_reference_describes():
    promised = [name for name in vars(RunningTrainer) if not name.startswith("_")]
    seen: dict[str, object] = {}

    class Look(Callback):
        def on_epoch_end(self, trainer, epoch, metrics):
            seen.update({name: getattr(trainer, name) for name in promised})
            seen["state"] = (trainer.step, trainer.epoch, trainer.global_batch, trainer.total_steps, trainer.max_epochs)
            trainer.request_stop("the callback has seen enough")

    data = TensorDataset(torch.randn(8, 3), torch.randn(8, 2))
    history = trainer(nn.Linear(3, 2), callbacks=[Look()], epochs=3).fit(data)
    assert set(promised) < set(seen)
    assert {"formation", "model", "optimizer", "history", "log", "evaluate"} < set(promised)
    assert seen["state"] == (2, 1, 4, 6, 3)
    assert history.reason == "the callback has seen enough"
