"""T5: equal logits and files with transformers, padding that is not seen, buckets of distances, writing, training."""

from __future__ import annotations

import pytest
import torch

from phalanx.errors import ModelError
from phalanx.zoo.models import build, load_pretrained, save_pretrained
from phalanx.zoo.models.t5 import PRESETS, distance_buckets

SHAPES = {
    "first": {"activation": "relu", "tie_weights": True},
    "later": {"activation": "gated-gelu", "tie_weights": False, "head_dim": 24},
}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path):
    """Tensors on the meta device make torch import its compiler, which sets the first variable for good."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a progress bar would leave its thread behind


def made(**options) -> torch.nn.Module:
    """Return a model none of whose parameters, norms and tables included, has a value that hides a mistake."""
    torch.manual_seed(0)
    model = build("t5", dropout=0.1, **options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return texts, the second with padding, and answers, the second with labels that do not count."""
    torch.manual_seed(1)
    tokens, targets = torch.randint(2, 384, (2, 200)), torch.randint(2, 384, (2, 150))
    tokens[1, 120:] = 0
    targets[1, 100:] = -100
    return tokens, targets


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_transformers_and_phalanx_load_each_others_files(shape, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours, (tokens, targets) = made(**SHAPES[shape]), batch()
    save_pretrained(ours, tmp_path / "ours")
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "ours").eval().double()
    expected = theirs(input_ids=tokens, attention_mask=(tokens != 0).long(), labels=targets)
    loss, logits = ours.double()(tokens, targets)
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-6)  # theirs computes softmax in float32
    torch.testing.assert_close(loss.double(), expected.loss, rtol=1e-6, atol=0)
    theirs.float().save_pretrained(tmp_path / "theirs")
    back = load_pretrained(tmp_path / "theirs")
    assert back.config == ours.config
    mine, again = made(**SHAPES[shape]).state_dict(), back.state_dict()
    assert mine.keys() == again.keys()
    assert all(torch.equal(mine[name], again[name]) for name in mine)


@torch.no_grad()
def test_padding_is_not_seen():
    model, (tokens, targets) = made().double(), batch()
    alone = model(tokens[1:, :120], targets[1:, :100]).logits
    torch.testing.assert_close(model(tokens, targets).logits[1:, :100], alone, rtol=0, atol=1e-10)


def test_distances_have_buckets_of_their_own_when_small_and_shared_ones_when_large():
    distances = torch.arange(200)[None, :] - torch.arange(200)[:, None]
    seen = distance_buckets(distances, 32, 128, both_sides=True)
    assert seen[100, 93:108].tolist() == [7, 6, 5, 4, 3, 2, 1, 0, 17, 18, 19, 20, 21, 22, 23]
    assert seen[0, 128:].unique().tolist() == [31]
    past = distance_buckets(distances, 32, 128, both_sides=False)
    assert past[20, 20:].unique().tolist() == [0]
    assert past[15, :16].tolist() == list(range(15, -1, -1))
    assert past[199, 0] == 31


@torch.no_grad()
def test_what_is_written_is_what_the_targets_teach():
    model = made().double()
    tokens, _ = batch()
    written = model.write(tokens[:, :20], 8)
    targets = written.masked_fill(written == 0, -100)
    assert torch.equal(model(tokens[:, :20], targets).logits.argmax(-1)[targets >= 0], targets[targets >= 0])


@torch.no_grad()
def test_writing_encodes_once_and_stops_when_all_rows_have_ended():
    model = made().double()
    encoded, decoded = [], []
    model.encoder.register_forward_hook(lambda *_: encoded.append(1))
    model.decoder.register_forward_hook(lambda *_: decoded.append(1))
    tokens, _ = batch()
    assert model.write(tokens[:, :20], 5).shape == (2, 5)
    assert (len(encoded), len(decoded)) == (1, 5)
    model.head.weight.zero_()  # all scores are 0, and the first of equal ones is drawn: padding, without end
    assert model.write(tokens[:, :20], 20).shape == (2, 20)
    model.head.forward = lambda hidden: torch.nn.functional.one_hot(torch.ones(hidden.shape[:2]).long(), 384).double()
    written = model.train().write(tokens[:, :20], 100)
    assert written.tolist() == [[1, 0, 0, 0, 0, 0, 0, 0]] * 2
    assert model.training
    assert not model.memory._forward_hooks


@pytest.mark.parametrize("decodes", [False, True])
def test_the_bias_of_a_distance_is_that_of_its_bucket_and_no_large_table_is_kept(decodes):
    stack = (made().decoder if decodes else made().encoder).double()
    time = 7
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda held: kept.append(held.numel()) or held, lambda held: held):
        bias = stack._bias_of_distances(time, torch.device("cpu"))
    distances = torch.arange(time)[None, :] - torch.arange(time)[:, None]
    buckets = distance_buckets(distances, 32, 128, both_sides=not decodes)
    expected = stack.bias.weight[:, buckets]
    assert torch.equal(bias, expected)
    assert max(kept) <= (2 * time - 1) * 32
    given = torch.randn_like(bias)
    ours, theirs = (torch.autograd.grad((found * given).sum(), stack.bias.weight)[0] for found in (bias, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_text_alone_and_an_unknown_activation_are_refused():
    with pytest.raises(ModelError, match="a T5 needs what is to be written"):
        build("t5")(torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(ModelError, match=r"activation 'rellu' of a T5.*Did you mean 'relu'"):
        build("t5", activation="rellu")


def test_the_sizes_are_those_of_the_published_models():
    with torch.device("meta"):
        models = {name: build("t5", preset=name) for name in PRESETS}
    sizes = {name: model.num_parameters() for name, model in models.items()}
    assert sizes["small"] == 76_961_152  # google/t5-v1_1-small
    assert sizes["base"] == 247_577_856
    assert sizes == {name: model.config.num_parameters() for name, model in models.items()}


def test_new_weights_give_scores_near_zero_at_any_width():
    torch.manual_seed(0)
    for hidden in (64, 512):
        model = build("t5", hidden=hidden)
        tokens, targets = batch()
        loss, logits = model.eval()(tokens, targets)
        assert 0.5 < logits.std() < 2
        assert loss < 8
