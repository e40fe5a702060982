"""Wrong arguments in Python: each message names what was given, what is allowed and what to write."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Callback, DistributedConfig, DistributedTuner, Formation, Trainer
from phalanx.config.option import limited
from phalanx.errors import DataError, ModelError, PhalanxError, UsageError
from phalanx.loop.metrics import LOSSES, find_loss
from phalanx.recipes.imports import call_with
from phalanx.zoo.data import load


def refused(call, kind: type[PhalanxError] = UsageError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def numbers(width: int = 4, *, labels: bool = True) -> DataLoader:
    torch.manual_seed(0)
    target = torch.arange(12) % 2 if labels else torch.randn(12, 2)
    return DataLoader(TensorDataset(torch.randn(12, width), target), batch_size=4)


def test_a_trainer_without_a_model_says_what_to_write():
    assert "Trainer needs a model\n  Write: Trainer(model, num_workers=2)" in refused(Trainer)


def test_the_class_of_a_model_is_not_a_model():
    message = refused(lambda: Trainer(nn.Linear))
    assert "model = Linear is the class, not a model" in message
    assert "Trainer(Linear(...)" in message


def test_an_optimizer_as_second_argument_is_taken_and_a_dict_is_refused():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert Trainer(model, optimizer).optimizer is optimizer
    assert "Name it: loss_fn=..., optimizer=..." in refused(lambda: Trainer(model, {"lr": 1}))


@pytest.mark.parametrize(
    ("name", "function"),
    [("mse", F.mse_loss), ("MSELoss", F.mse_loss), ("mae", F.l1_loss), ("smooth-l1", F.smooth_l1_loss)],
)
def test_usual_losses_have_names(name, function):
    loss_fn = find_loss(name)
    output, target = torch.randn(4, 1), torch.randn(4)
    torch.testing.assert_close(loss_fn(output, target), function(output.squeeze(-1), target))


def test_every_named_loss_gives_one_number():
    scores, labels = torch.randn(5, 3), torch.arange(5) % 3
    for name, loss in LOSSES.items():
        given = torch.rand(5, 3) if name == "bce" else scores
        target = labels if name in ("cross_entropy", "nll") else torch.rand(5, 3)
        assert loss(given, target).ndim == 0
    assert LOSSES["cross_entropy"](torch.randn(2, 7, 3), torch.zeros(2, 7, dtype=torch.long)).ndim == 0


def test_a_named_loss_trains_and_others_are_refused_before_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(nn.Linear(4, 2), loss_fn="mse", device="cpu", progress=False)
    assert trainer.fit(numbers(labels=False)).status == "finished"
    message = refused(lambda: Trainer(nn.Linear(4, 2), loss_fn="msee"))
    assert "unknown loss 'msee'. Did you mean 'mse'?" in message
    assert "Write: loss_fn=MSELoss()" in refused(lambda: Trainer(nn.Linear(4, 2), loss_fn=nn.MSELoss))
    assert "loss_fn = 3 is an int" in refused(lambda: Trainer(nn.Linear(4, 2), loss_fn=3))


def test_the_class_of_a_callback_is_refused_before_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(nn.Linear(4, 2), callbacks=[Callback], device="cpu")
    assert "Callback is the class, not a callback\n  Write: callbacks=[Callback()]" in refused(
        lambda: trainer.fit(numbers())
    )
    assert "expected a list" in refused(lambda: Trainer(nn.Linear(4, 2), callbacks=Callback()))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["predict", "evaluate"])
def test_a_number_is_not_data(method):
    trainer = Trainer(nn.Linear(4, 2), num_workers=2, device="cpu")
    message = refused(lambda: getattr(trainer, method)(3))
    assert f"{method}(3): data is an int" in message
    assert "Give a torch DataLoader" in message


def test_prepare_names_what_it_got():
    with Formation(device="cpu") as formation:
        message = refused(lambda: formation.prepare(3))
        assert "prepare() got 3, an int" in message
        assert "formation.prepare(model, optimizer, data)" in message
        assert "prepare() got the class Linear" in refused(lambda: formation.prepare(nn.Linear))


def test_a_batch_of_the_wrong_shape_is_named_with_the_layer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    trainer = Trainer(model, loss_fn="cross_entropy", device="cpu", progress=False)
    for call in (trainer.fit, trainer.evaluate, trainer.predict):
        with pytest.raises(ModelError) as caught:
            call(numbers(width=5))
        message = str(caught.value)
        assert "a batch of list of (float32 [4, 5], int64 [4]) does not fit" in message
        assert "the layer '0' Linear(in_features=4, out_features=8, bias=True) got float32 [4, 5]" in message
        assert "mat1 and mat2" in message
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_outputs_and_targets_that_do_not_fit_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 3)), batch_size=4)
    trainer = Trainer(nn.Linear(4, 2), loss_fn=nn.L1Loss(), device="cpu", progress=False)
    with pytest.warns(UserWarning, match="target size"):
        message = refused(lambda: trainer.fit(data), ModelError)
    assert "the loss got an output float32 [4, 2] and a target float32 [4, 3]" in message


WIDE = torch.randn(8, 4)


@pytest.mark.parametrize(
    ("model", "inputs", "targets", "words"),
    [
        (
            nn.Linear(4, 3),
            WIDE,
            torch.arange(8),
            r"labels of a batch are 0 to 7, and the model's 3 .* 0 to 2(.|\n)*8 outputs",
        ),
        (nn.Linear(4, 3), WIDE, torch.arange(8) % 3 - 1, r"labels of a batch are -1 to 1, (.|\n)*from 0; -100 is"),
        (nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), WIDE[:1], torch.zeros(1).long(), "drop_last=True"),
        (nn.Linear(4, 3), WIDE.long(), torch.zeros(8).long(), r"got int64 \[8, 4\](.|\n)*inputs\.float\(\)"),
        (nn.Conv2d(1, 3, 2), torch.ones(8, 1, 4, 4).byte(), torch.zeros(8, 3, 3).long(), r"inputs\.float\(\)"),
        (nn.Embedding(3, 3), torch.arange(8), torch.zeros(8).long(), r"Embedding\(3, 3\) got int64 \[8\]"),
    ],
)
def test_usual_mistakes_of_data_say_what_to_write(model, inputs, targets, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(model, loss_fn="cross_entropy", device="cpu", progress=False, batch_size=len(inputs))
    with pytest.raises(ModelError, match=words):
        trainer.fit(TensorDataset(inputs, targets))


def test_arrays_without_a_data_set_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(nn.Linear(4, 3), device="cpu", progress=False)
    with pytest.raises(DataError, match=r"an array of shape \[8, 4\] is not a(.|\n)*Give a pair, \(inputs, targets\)"):
        trainer.fit(WIDE.numpy(), torch.zeros(8).numpy())


def test_other_errors_of_a_model_stay_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Broken(nn.Linear):
        def forward(self, x):
            raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        Trainer(Broken(4, 2), device="cpu", progress=False).fit(numbers())


class Scaled(nn.Module):
    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.scale, self.out = nn.Parameter(scale), nn.Linear(4, 2)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Scaled(torch.ones(())), ["'fsdp' cannot shard scale", "self.scale = nn.Parameter(torch.ones(1))"]),
        (
            Scaled(torch.ones(1, dtype=torch.bfloat16)),
            ["shards scale (torch.bfloat16) and out.weight (torch.float32) together", "model.float()"],
        ),
    ],
)
def test_parameters_that_cannot_be_sharded_are_named_before_the_start(model, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(model, num_workers=2, strategy="fsdp", device="cpu")
    message = refused(lambda: trainer.fit(numbers()), ModelError)
    assert all(word in message for word in words)
    assert not list(tmp_path.iterdir())


def test_parametrized_modules_are_named_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)))
    message = refused(lambda: Trainer(model, num_workers=2, device="cpu").fit(numbers()))
    assert "weight_norm, spectral_norm or another parametrization are not" in message
    assert "phalanx train --script train.py --num-workers 2" in message
    assert "https://" not in message


def test_a_data_set_without_options_says_so():
    assert "data set 'digits' takes no options; got 'size'" in refused(lambda: load("digits", size=3))


def test_a_tuple_in_a_search_space_is_answered_in_python():
    message = refused(lambda: DistributedTuner(lambda c: 0.0, search_space={"lr": (1, 2)}))
    assert "lr: a tuple does not say how to draw from it" in message
    assert "phalanx.tune.uniform(1, 2) for a range, or phalanx.tune.choice([1, 2])" in message
    assert "{ choice" not in message
    message = refused(lambda: DistributedTuner(lambda c: 0.0, search_space={"opt": ["sgd", "adam"]}))
    assert "write phalanx.tune.choice(['sgd', 'adam'])" in message


@pytest.mark.parametrize("kind", [lambda: Trainer(nn.Linear(4, 2)), Formation])
def test_a_backend_of_the_command_line_for_keras_models_is_refused_for_torchs(kind, monkeypatch):
    monkeypatch.setenv("PHALANX_BACKEND", "tensorflow")
    assert "backend = 'tensorflow' trains Keras models" in refused(kind)


@pytest.mark.parametrize(("backend", "strategy"), [("pytorch-fsdp", "fsdp"), ("horovod", "horovod"), ("ray", "ddp")])
def test_a_trainer_follows_the_backend_of_the_command_line_or_says_what_it_uses(backend, strategy, monkeypatch, capsys):
    monkeypatch.setenv("PHALANX_BACKEND", backend)
    assert Trainer(nn.Linear(4, 2)).config.resolved_strategy == strategy
    assert capsys.readouterr().err == ""
    Trainer(nn.Linear(4, 2), DistributedConfig(strategy="ring"))
    said = f"phalanx: backend = '{backend}' is not used by Trainer, whose own settings in the script have "
    said += "backend = 'pytorch-ddp': it trains with ring.\n"
    assert capsys.readouterr().err == (said if strategy != "ddp" else "")  # Ray says only what starts the ranks


def test_what_a_function_declares_of_its_arguments_is_checked_in_every_call():
    @limited(size={"minimum": 1}, kind={"choices": ("small", "large")}, rate={"above": 0, "maximum": 1})
    def make(root: str, size: int = 2, kind: str = "small", *, rate: float = 0.5) -> tuple[object, ...]:
        return root, size, kind, rate

    assert make("here", np.int64(3), rate=1) == ("here", 3, "small", 1)
    assert call_with(make, {"root": "here"}, "data set 'x'") == ("here", 2, "small", 0.5)
    with pytest.raises(UsageError, match=r"size = 0: must be 1 or more\n  kind = 'big': not one of 'small', 'large'"):
        make("here", 0, "big")
    with pytest.raises(UsageError, match=r"rate = 1\.5: must be 1 or less"):
        call_with(make, {"root": "here", "rate": 1.5}, "data set 'x'")
    with pytest.raises(UsageError, match="data set 'x' needs the option root"):
        call_with(make, {}, "data set 'x'")


def test_lazy_modules_are_given_their_shapes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    said = r"lazy modules without shapes: 0\.weight, 0\.bias, 1\.weight and 3 more"
    data = (torch.randn(32, 3), torch.randint(0, 4, (32,)))
    with pytest.raises(UsageError, match=said) as refused:
        Trainer(model, loss_fn="cross_entropy", optimizer="sgd", num_workers=1, epochs=1).fit(data)
    assert "model(inputs)" in refused.value.hint
    with Formation() as formation, pytest.raises(UsageError, match=said):
        formation.prepare(model)
    model(data[0])
    Trainer(model, loss_fn="cross_entropy", optimizer="sgd", num_workers=1, epochs=1, batch_size=8).fit(data)
