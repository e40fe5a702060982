"""Generation: the cache gives the tokens of a whole computation, batches those of each prompt alone."""

from __future__ import annotations

import pytest
import torch

from phalanx.errors import UsageError
from phalanx.zoo.models import build
from phalanx.zoo.models.generation import KVCache, Sampling

PROMPTS = [[5, 9, 2, 40, 77, 3], [11], [200, 4, 19]]
MODELS = {"gpt": {"layers": 3}, "llama": {"kv_heads": 2}, "moe": {"experts": 4}}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(1)
    made = build(request.param, seq_len=24, **MODELS[request.param]).double()
    for parameter in made.parameters():  # as initialised, a model repeats its last token
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    return made


def test_cached_tokens_are_those_of_whole_computations_also_beyond_the_window(model):
    prompt = torch.randint(256, (3, 5))
    found = model.generate(prompt, 40, temperature=0)
    assert torch.equal(found, model.generate(prompt, 40, temperature=0, cached=False))
    assert found.shape == (3, 45)
    assert len(found[0].unique()) > 8  # else equal tokens would prove little


def test_a_batch_of_different_lengths_is_each_prompt_alone(model):
    alone = [model.generate([prompt], 30, temperature=0)[0] for prompt in PROMPTS]
    assert model.generate(PROMPTS, 30, temperature=0) == alone
    assert model.generate(PROMPTS, 30, temperature=0, cached=False) == alone
    assert [len(row) for row in alone] == [36, 31, 33]


def too_long(model) -> None:
    with KVCache(model) as cache:
        cache.reserve(1, 1)
        cache.prefill(torch.tensor(PROMPTS[:1]), torch.tensor([6]))


def test_the_cache_leaves_the_model_as_it_was(model):
    before = model(torch.tensor(PROMPTS[:1]))
    inner = [layer.attention.inner for layer in model.layers]
    model.generate(PROMPTS, 4)
    assert [layer.attention.inner for layer in model.layers] == inner
    assert model.training
    with pytest.raises(RuntimeError):
        too_long(model)
    assert torch.equal(model(torch.tensor(PROMPTS[:1])), before)


def test_only_one_token_per_row_is_computed_in_a_step(model):
    widths: list[tuple[int, ...]] = []
    model.layers[0].attention.register_forward_pre_hook(lambda _, given: widths.append(tuple(given[0].shape[:2])))
    model.generate(PROMPTS, 5)
    assert widths == [(3, 6), (3, 1), (3, 1), (3, 1), (3, 1)]


def test_rows_end_at_their_own_end_tokens(model):
    free = model.generate(PROMPTS, 17, temperature=0)
    end = free[0][8]
    expected = []
    for prompt, row in zip(PROMPTS, free, strict=True):
        stop = next((place + 1 for place in range(len(prompt), len(row)) if row[place] == end), len(row))
        expected.append(row[:stop])
    assert model.generate(PROMPTS, 17, temperature=0, end_tokens=[end]) == expected


def test_generation_stops_when_all_rows_have_ended(model):
    prompt = torch.tensor(PROMPTS[:1])
    first = model.generate(prompt, 1, temperature=0)[0, -1].item()
    found = model.generate(prompt, 40, temperature=0, end_tokens=[first])
    assert found.shape[1] < 6 + 40
    assert set(found[0, 6:].tolist()) == {first}
    assert model.generate(PROMPTS[:1], 40, temperature=0, end_tokens=[first]) == [[*PROMPTS[0], first]]


def test_prompts_of_the_window_and_beyond_are_continued_as_before(model):
    prompt = torch.randint(256, (2, 24))
    for length in (23, 24):
        cached, whole = (model.generate(prompt[:, :length], 3, temperature=0, cached=way) for way in (True, False))
        assert torch.equal(cached, whole)
    longer = torch.cat([torch.zeros(2, 9, dtype=torch.long), prompt], dim=1)
    assert torch.equal(
        model.generate(longer, 4, temperature=0)[:, -4:], model.generate(prompt, 4, temperature=0)[:, -4:]
    )


def test_the_head_sees_the_last_token_of_a_prompt_only(model):
    seen = []
    model.head.register_forward_hook(lambda _, given, logits: seen.append(logits.shape[1]))
    model.generate(PROMPTS, 1)
    assert seen == [1]


LOGITS = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log()


def test_top_p_keeps_the_likeliest_tokens_that_reach_it():
    drawn = {int(Sampling(top_p=0.45).draw(LOGITS)) for _ in range(50)}
    assert drawn == {0}
    drawn = {int(Sampling(top_p=0.8).draw(LOGITS.flip(-1))) for _ in range(200)}
    assert drawn == {1, 2, 3}


def test_top_k_and_temperature():
    assert {int(Sampling(top_k=1).draw(LOGITS)) for _ in range(50)} == {0}
    assert {int(Sampling(temperature=0.01).draw(LOGITS)) for _ in range(50)} == {0}
    counts = torch.stack([Sampling().draw(LOGITS) for _ in range(2000)]).flatten().bincount() / 2000
    torch.testing.assert_close(counts, LOGITS.exp()[0], atol=0.05, rtol=0)


def test_a_temperature_near_zero_takes_the_likeliest_token():
    logits = torch.tensor([[5.0, 90.0, -40.0]])
    assert [int(Sampling(temperature=heat).draw(logits)) for heat in (0, 1e-45, 1e-30, 1e-5)] == [1] * 4


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}])
def test_wrong_values_are_named(wrong):
    with pytest.raises(UsageError, match=f"{next(iter(wrong))} = "):
        Sampling(**wrong)


@pytest.mark.parametrize("prompts", [[], [[1], []]])
def test_a_prompt_needs_a_token(prompts):
    with pytest.raises(UsageError, match="no token"):
        build("gpt").generate(prompts, 1)


def test_a_seed_gives_the_same_texts_again():
    model = build("gpt")
    seeded = [model.generate(PROMPTS, 20, top_p=0.9, generator=torch.Generator().manual_seed(4)) for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert seeded[0] != model.generate(PROMPTS, 20, top_p=0.9, generator=torch.Generator().manual_seed(5))
