"""Recomputing and offloading activations: the same gradients, bit by bit, and less memory between the passes."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx import DistributedConfig, Formation
from phalanx.errors import ConfigError, ModelError
from phalanx.speed.offload import _is_weight, _View
from phalanx.zoo.models import build


def held_and_gradients(dropout: float = 0.0, **settings) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the bytes that forward leaves allocated for backward, and the gradients."""
    torch.manual_seed(0)
    model = build("gpt", layers=4, dropout=dropout).double()
    tokens = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(3))
    with Formation(device="cpu", **settings) as formation:
        wrapped = formation.prepare(model)
        torch.manual_seed(5)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
            loss = wrapped(tokens, tokens).loss
        formation.backward(loss)
    held = sum(event.self_cpu_memory_usage for event in watched.key_averages())
    return held, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_each_kind_gives_equal_gradients_and_holds_less(dropout):
    """With dropout too: whatever is recomputed must draw the masks of the first time."""
    plain, expected = held_and_gradients(dropout)
    held = {}
    for kind in ("full", "every 2", "selective"):
        held[kind], gradients = held_and_gradients(dropout, activation_checkpointing=kind)
        torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
    assert held["full"] < 0.25 * plain
    assert held["full"] < held["every 2"] < 0.7 * plain
    assert held["full"] < held["selective"] < 0.8 * plain


def test_offload_goes_with_each_of_them():
    _, expected = held_and_gradients()
    for kind in (False, "full", "selective"):
        _, gradients = held_and_gradients(activation_checkpointing=kind, activation_offload=True)
        torch.testing.assert_close(gradients, expected, rtol=0, atol=0)


class Counter(TorchDispatchMode):
    """Counts the operations that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = collections.Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.seen[operation._schema.name.removeprefix("aten::")] += 1
        return operation(*args, **(kwargs or {}))


def operations(kind: bool | str) -> collections.Counter:
    model = build("gpt", layers=2)
    tokens = torch.randint(256, (2, 16))
    with Formation(device="cpu", activation_checkpointing=kind) as formation:
        wrapped = formation.prepare(model)
        with Counter() as counter:
            formation.backward(wrapped(tokens, tokens).loss)
    return counter.seen


def test_selective_runs_products_once_and_the_rest_twice():
    plain, selective, full = operations(False), operations("selective"), operations("full")
    for product in ("addmm", "_scaled_dot_product_flash_attention_for_cpu"):
        assert selective[product] == plain[product] < full[product]
    assert plain["gelu"] < selective["gelu"] == full["gelu"]


def test_blocks_are_restored():
    model = build("gpt", layers=2)
    own = model.layers[0].forward
    model.layers[1].forward = own  # a user's own patch stays
    with Formation(device="cpu", activation_checkpointing="selective", activation_offload=True) as formation:
        formation.prepare(model)
        assert model.layers[0].forward != own
    assert "forward" not in model.layers[0].__dict__
    assert model.layers[1].forward == own


def test_weights_are_distinguished_from_activations():
    """The weights, their transposes and autocast's copies of them stay where they are."""
    layer, seen = nn.Linear(8, 8), []
    inputs = torch.randn(4, 8, requires_grad=True) * 2
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append((_is_weight(t), t.shape[0])), lambda _: None):
        layer(inputs)
        with torch.autocast("cpu", torch.bfloat16):
            layer(inputs)
    assert sorted(seen) == [(False, 4), (False, 4), (True, 8), (True, 8)]


def test_an_offloaded_tensor_keeps_its_strides():
    """Compiled code insists on them: attention saves three views of one product."""
    product = torch.randn(2, 8, 3, 4)
    for view in product.permute(2, 0, 1, 3).unbind(0):
        back = _View(view, view).of(product.clone().untyped_storage())
        assert torch.equal(back, view)
        assert (back.stride(), back.storage_offset()) == (view.stride(), view.storage_offset())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("selectiv", "Did you mean 'selective'"),
        ("evry 3", "Did you mean 'every 2'"),
        ("every 0", "not one of false, true, 'full', 'selective', 'every <n>'"),
        (2, "expected true or false or text"),
    ],
)
def test_unknown_values_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        DistributedConfig(activation_checkpointing=given)


@pytest.mark.parametrize("given", ["every 2", "every-2", "every  2 "])
def test_every_second_block_may_be_written_in_several_ways(given):
    assert DistributedConfig(activation_checkpointing=given).recompute == (2, False, None)


def test_models_that_cannot_are_refused():
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for setting in ("activation_checkpointing", "activation_offload"):
        with pytest.raises(ModelError, match=f"{setting}: Sequential has no repeated blocks"):
            Formation(device="cpu", **{setting: True}).prepare(plain)
    with pytest.raises(ModelError, match="'every 3': GPT has 2 blocks only"):
        Formation(device="cpu", activation_checkpointing="every 3").prepare(build("gpt", layers=2))


class Stateful(nn.Module):
    """A block whose buffers change in every forward pass: statistics, and the vectors of spectral_norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)
        self.average = nn.BatchNorm1d(8, momentum=None)
        self.rows = nn.InstanceNorm1d(8, track_running_stats=True)
        self.sync = nn.SyncBatchNorm(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1  # bound anew, not written in place
        x = self.sync(self.average(self.norm(self.layer(x))).relu())
        return self.rows(x.unsqueeze(-1).expand(-1, -1, 3)).mean(-1) + x


def state_after_training(model: nn.Module, batches: list[torch.Tensor], **settings) -> dict[str, torch.Tensor]:
    """Take a step per batch, the first with the second block's norm frozen, and return weights and buffers."""
    with Formation(device="cpu", **settings) as formation:
        wrapped, optimizer = formation.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in batches:
            formation.backward(wrapped(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return x + self.norm(self.layer(x)).relu()


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_compiled_block_that_is_recomputed_counts_each_batch_once(kind):
    batches, found = list(torch.randn(2, 6, 8)), []
    for settings in ({}, {"activation_checkpointing": kind}):
        torch.manual_seed(0)
        model = nn.Sequential(Normed(), Normed())
        state_after_training(torch.compile(model, backend="aot_eager"), batches, **settings)
        found.append(model.state_dict())
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("kind", ["full", "selective", "every 2"])
def test_a_recomputed_block_changes_its_buffers_once(kind):
    batches = list(torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1)))
    found = []
    for settings in ({}, {"activation_checkpointing": kind}):
        torch.manual_seed(0)
        model = nn.Sequential(Stateful(), Stateful(), Stateful())
        model[1].norm.eval()
        state_after_training(model, batches[:1], **settings)
        model[1].norm.train()  # its statistics first change in a later pass
        found.append(state_after_training(model, batches[1:], **settings))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert [int(found[1][f"{block}.norm.num_batches_tracked"]) for block in range(3)] == [3, 2, 3]
    assert int(found[1]["2.calls"]) == 3


class Crossed(nn.Module):
    """A block with keywords that a cross-attention block, or torch's own function, has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, *, context, memory, forward, debug):
        return x + self.layer(x) * context * memory * forward * debug


class Crossing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Crossed(), Crossed()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x, context=x.cos(), memory=x.sin(), forward=2.0, debug=x)
        return x


@pytest.mark.parametrize("settings", [{"activation_checkpointing": True}, {"activation_offload": True}])
def test_blocks_may_have_keywords_of_any_name(settings):
    inputs, found = torch.randn(4, 8), []
    for chosen in ({}, settings):
        torch.manual_seed(0)
        found.append(state_after_training(Crossing(), [inputs], **chosen))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def cached_models() -> dict[str, object]:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama = transformers.LlamaConfig(vocab_size=16, num_key_value_heads=2, **sizes)
    t5 = transformers.T5Config(
        vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, decoder_start_token_id=0, dropout_rate=0.0
    )
    return {"llama": transformers.LlamaForCausalLM(llama), "t5": transformers.T5ForConditionalGeneration(t5)}


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_models_with_a_key_value_cache_are_recomputed_without_it(name, kind):
    model = cached_models()[name].train()
    caches = [each.config.use_cache for each in model.modules() if hasattr(each, "config")]
    tokens = torch.randint(16, (2, 6))
    expected = torch.autograd.grad(model(input_ids=tokens, labels=tokens).loss, list(model.parameters()))
    with Formation(device="cpu", activation_checkpointing=kind) as formation:
        wrapped = formation.prepare(model)
        formation.backward(wrapped(input_ids=tokens, labels=tokens).loss)
    torch.testing.assert_close([p.grad for p in model.parameters()], list(expected))
    assert [each.config.use_cache for each in model.modules() if hasattr(each, "config")] == caches
