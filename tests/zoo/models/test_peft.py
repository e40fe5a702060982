"""Adapters and the peft package: each loads what the other wrote, and the logits of Hugging Face models are equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packages import on_first_use
from torch import nn

import phalanx
from phalanx.zoo.models.lora import adapters

peft = on_first_use("peft")
transformers = on_first_use("transformers")

TOKENS = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
EXACT = {"rtol": 0, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def make(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":  # its layers are Conv1D, whose weights lie transposed
        shape = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=61, **shape))
    else:
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=61, num_key_value_heads=2, **shape))
    return model.double().eval()


@pytest.mark.parametrize("targets", [None, "*.1.mlp.*"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_peft_loads_phalanx_adapters(tmp_path, kind, targets):
    ours = phalanx.lora(make(kind), 4, alpha=6, targets=targets)
    for adapter in adapters(ours).values():
        nn.init.normal_(adapter.B)
    phalanx.save_adapter(ours, tmp_path)
    theirs = peft.PeftModel.from_pretrained(make(kind), tmp_path)
    expected = ours(TOKENS).logits
    assert (make(kind)(TOKENS).logits - expected).abs().max() > 1e-2
    torch.testing.assert_close(theirs(TOKENS).logits, expected, **EXACT)
    torch.testing.assert_close(phalanx.merge_lora(ours)(TOKENS).logits, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_phalanx_loads_what_peft_wrote(tmp_path, kind, rslora):
    """Ranks and alphas of single layers included; and what we write of it, PEFT reads again."""
    first, second = ("c_attn", "c_fc") if kind == "gpt2" else ("q_proj", "down_proj")
    config = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=[first, second],
        use_rslora=rslora,
        fan_in_fan_out=kind == "gpt2",
        rank_pattern={f"1.{'attn' if kind == 'gpt2' else 'self_attn'}.{first}": 2},
        alpha_pattern={f"0.mlp.{second}": 7},
    )
    theirs = peft.get_peft_model(make(kind), config).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = make(kind)
    phalanx.load_adapter(ours, tmp_path / "theirs")
    expected = theirs(TOKENS).logits
    torch.testing.assert_close(ours(TOKENS).logits, expected, **EXACT)
    assert {adapter.rank for adapter in adapters(ours).values()} == {2, 3}
    phalanx.save_adapter(ours, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(make(kind), tmp_path / "ours")
    torch.testing.assert_close(again(TOKENS).logits, expected, **EXACT)
