"""GPT and Llama as wholes and as pipeline stages, their plans, and the mixture of experts."""

from __future__ import annotations

import copy
import fnmatch
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from phalanx.errors import ModelError, UsageError
from phalanx.strategies.tensor_parallel import STYLES
from phalanx.zoo.models import LMOutput, build
from phalanx.zoo.models.attention import InnerAttention, RopeScaling, rotary_table, rotate


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny layers run faster on one thread, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["gpt", "llama"])
def decoder(request):
    torch.manual_seed(0)
    return build(request.param, layers=4, tie_weights=False)


def tokens(time: int = 16) -> torch.Tensor:
    return torch.randint(256, (2, time))


@pytest.mark.parametrize("name", ["llama", "moe"])
def test_it_starts_near_the_uniform_loss_is_causal_and_learns(name):
    torch.manual_seed(0)
    model, text = build(name), tokens(33)
    first = model(text[:, :-1], text[:, 1:])
    assert isinstance(first, LMOutput)
    assert first.loss.item() == pytest.approx(math.log(256), rel=0.05)
    changed = text.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 256
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10], after[:, 10])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(15):
        optimizer.zero_grad()
        loss = model(text[:, :-1], text[:, 1:]).loss
        loss.backward()
        optimizer.step()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert loss.item() < first.loss.item() - 1


@pytest.mark.parametrize("name", ["gpt", "llama", "moe", "vit", "resnet", "convnet", "mlp"])
def test_a_start_on_the_meta_device_gives_the_same_weights(name):
    with torch.device("meta"):
        model = build(name)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(7)
    torch.manual_seed(3)
    model.init_weights()
    torch.manual_seed(0)
    reference = build(name)
    torch.manual_seed(3)
    reference.init_weights()
    mine, theirs = model.state_dict(), reference.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_a_tied_llama_stays_tied_through_the_meta_device():
    with torch.device("meta"):
        model = build("llama", tie_weights=True)
    model.to_empty(device="cpu").init_weights()
    assert model.head.weight is model.embed.weight


def test_stages_in_a_row_compute_what_the_whole_does(decoder):
    text = tokens()
    first, last = copy.deepcopy(decoder), copy.deepcopy(decoder)
    first.norm = first.head = None
    last.embed = None
    for number in range(4):
        (last if number < 1 else first).layers[number] = None
    whole, hidden = decoder(text, text), first(text)
    assert hidden.shape == (2, 16, decoder.config.hidden)
    torch.testing.assert_close(last(hidden, text).loss, whole.loss, rtol=0, atol=0)
    assert "layers.3.attention.project.weight" in last.state_dict()
    assert first.state_dict().keys() | last.state_dict().keys() == decoder.state_dict().keys()
    assert first.num_parameters() + last.num_parameters() == decoder.num_parameters()
    last.init_weights()


def test_positions_place_a_slice_of_a_longer_sequence(decoder):
    """Without attention across the cut (one block of each slice sees itself only) only the positions matter."""
    text = tokens(32)
    there = decoder(text[:, 16:], positions=torch.arange(16, 32))
    here = decoder(text[:, 16:])
    if decoder.config.__class__.__name__ == "LlamaConfig":  # rotary positions are relative
        torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)
        spread = decoder(text[:, 16:], positions=2 * torch.arange(16))
        assert not torch.allclose(spread, here, atol=1e-4)
    else:
        assert not torch.allclose(there, here, atol=1e-4)
    with pytest.raises(ModelError, match="65 tokens is longer than seq_len=64"):
        decoder(tokens(65))


def test_a_stage_that_holds_a_slice_of_the_sequence_knows_the_length():
    model = build("llama")
    model.embed = None
    model.sequence_shards = 4
    assert len(model.positions(torch.zeros(1, 8, 48))) == 32


def test_float64_is_kept_to_the_loss(decoder):
    double, text = copy.deepcopy(decoder).double(), tokens()
    logits = double(text)
    loss = double(text, text).loss
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), text.flatten()), rtol=1e-14, atol=0)
    assert decoder.bfloat16()(text, text).loss.dtype == torch.float32


@pytest.mark.parametrize("name", ["gpt", "llama", "vit"])
def test_the_plan_names_linear_layers_and_norms_that_exist(name):
    model = build(name)
    plan = model.tensor_plan()
    assert set(plan.values()) <= set(STYLES)
    modules = dict(model.named_modules())
    split = set()
    for pattern, word in plan.items():
        found = [module for module in modules if fnmatch.fnmatchcase(module, pattern)]
        assert found, pattern
        if word in ("colwise", "rowwise", "head-colwise"):
            assert all(isinstance(modules[each], nn.Linear) for each in found)
        split |= set(found)
    in_layers = {n for n, module in modules.items() if isinstance(module, nn.Linear) and n.startswith("layers")}
    assert in_layers <= split
    assert all(size % 2 == 0 for size in model.tensor_divides().values())


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_slice_of_the_heads_computes_its_part_of_attention(name):
    """What tensor parallelism relies on: rows of the projections are whole heads, and partial outputs add up."""
    torch.manual_seed(0)
    attention = build(name).layers[0].attention.double()
    width = attention.project.in_features
    inputs = torch.randn(2, 8, width, dtype=torch.float64)
    extra = (rotary_table(torch.arange(8), attention.head_dim, 1e4),) if name == "llama" else ()
    whole = attention(inputs, *extra)
    parts = []
    for rank in range(2):
        part = copy.deepcopy(attention)
        for layer in ("qkv",) if name == "gpt" else ("query", "key", "value"):
            linear = getattr(part, layer)
            linear.weight = nn.Parameter(linear.weight.chunk(2)[rank])
            linear.bias = linear.bias if linear.bias is None else nn.Parameter(linear.bias.chunk(2)[rank])
        part.project.weight = nn.Parameter(part.project.weight.chunk(2, dim=1)[rank])
        part.project.bias = None
        parts.append(part(inputs, *extra))
    bias = 0 if attention.project.bias is None else attention.project.bias
    torch.testing.assert_close(parts[0] + parts[1] + bias, whole, rtol=1e-12, atol=1e-14)


def test_grouped_queries_equal_repeated_keys():
    query, key, value = (torch.randn(2, heads, 8, 4, dtype=torch.float64) for heads in (6, 2, 2))
    attention = InnerAttention(causal=True)
    repeated = attention(query, key.repeat_interleave(3, 1), value.repeat_interleave(3, 1))
    torch.testing.assert_close(attention(query, key, value), repeated)


def test_rotary_scores_depend_on_distance_only():
    query, key = torch.randn(2, 1, 1, 1, 8)

    def score(at: int, to: int) -> torch.Tensor:
        turned = [
            rotate(heads, rotary_table(torch.tensor([place]), 8, 1e4)) for heads, place in ((query, at), (key, to))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(3, 1), score(12, 10))
    assert not torch.isclose(score(3, 1), score(3, 2))


def test_rope_scaling_keeps_fast_and_stretches_slow_frequencies():
    plain, scaled = (
        rotary_table(torch.tensor([1]), 64, 1e4, scaling)
        for scaling in (None, RopeScaling(factor=8, original_seq_len=512))
    )
    angles = [table[1, 0, :32].asin() for table in (plain, scaled)]
    ratio = angles[0] / angles[1]
    assert ratio[1] == pytest.approx(1, rel=1e-4)
    assert ratio[-1] == pytest.approx(8, rel=1e-4)
    assert 1 < ratio[13] < 8


def test_llama_generates():
    torch.manual_seed(0)
    start = tokens(3)
    assert torch.equal(build("llama").generate(start, 4, temperature=0)[:, :3], start)


def test_impossible_shapes_are_refused():
    with pytest.raises(ModelError, match="heads=4 cannot share kv_heads=3"):
        build("llama", kv_heads=3)
    with pytest.raises(ModelError, match="multiple of 8"):
        build("llama", hidden=44)
    with pytest.raises(UsageError, match="Did you mean '70b'"):
        build("llama", preset="70B")
    with pytest.raises(UsageError, match="Did you mean 'kv_heads'"):
        build("llama", kv_head=2)
