"""Hugging Face layouts of models with an encoder: BERT with the heads of its tasks, and T5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.zoo.models.bert import Bert, BertConfig
from phalanx.zoo.models.hf.mapping import ConfigName, HFMapping, TensorRule, needed, read, require, transposed, written
from phalanx.zoo.models.t5 import T5, T5Config
from phalanx.zoo.t5_tokens import T5_END, T5_PAD

_ARCHITECTURES = {
    "mlm": "BertForMaskedLM",
    "classify": "BertForSequenceClassification",
    "regress": "BertForSequenceClassification",
    "qa": "BertForQuestionAnswering",
}


_BERT_NAMES = (
    ConfigName("vocab_size", "vocab_size"),
    ConfigName("seq_len", "max_position_embeddings", 512),
    ConfigName("segments", "type_vocab_size", 2),
    ConfigName("layers", "num_hidden_layers"),
    ConfigName("heads", "num_attention_heads"),
    ConfigName("hidden", "hidden_size"),
    ConfigName("ffn_hidden", "intermediate_size"),
    ConfigName("dropout", "hidden_dropout_prob", 0.1),
    ConfigName("norm_eps", "layer_norm_eps", 1e-12),
)


def _bert_to_hf(config: BertConfig) -> dict[str, Any]:
    labels: dict[str, dict[str, Any]] = {
        "classify": {"num_labels": config.classes},
        "regress": {"num_labels": 1, "problem_type": "regression"},
    }
    return {
        **written(config, _BERT_NAMES),
        "hidden_act": "gelu",
        "attention_probs_dropout_prob": config.dropout,
        "tie_word_embeddings": True,
        **labels.get(config.task, {}),
    }


def _bert_from_hf(config: Mapping[str, Any]) -> BertConfig:
    require(
        config,
        {
            "hidden_act": ("gelu",),
            "position_embedding_type": ("absolute",),
            "is_decoder": (False,),
            "tie_word_embeddings": (True,),
        },
    )
    named = (config.get("architectures") or ["BertForMaskedLM"])[0]
    task = next((task for task, name in _ARCHITECTURES.items() if name == named), "mlm")
    classes = config.get("num_labels") or len(config.get("id2label") or ()) or 2
    if task == "classify" and classes == 1:  # which transformers trains by the squared error
        return BertConfig(task="regress", **read(config, _BERT_NAMES))
    return BertConfig(task=task, classes=classes, **read(config, _BERT_NAMES))


_LAYER = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.project": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed.expand": "intermediate.dense",
    "feed.project": "output.dense",
    "feed_norm": "output.LayerNorm",
}
_HEADS = {
    "mlm": {
        "head.transform": "cls.predictions.transform.dense",
        "head.norm": "cls.predictions.transform.LayerNorm",
    },
    "classify": {"head.pool": "bert.pooler.dense", "head.output": "classifier"},
    "regress": {"head.pool": "bert.pooler.dense", "head.output": "classifier"},
    "qa": {"head": "qa_outputs"},
}


def _bert_rules(config: BertConfig) -> list[TensorRule]:
    pairs = {f"layers.#.{ours}": f"bert.encoder.layer.#.{theirs}" for ours, theirs in _LAYER.items()}
    pairs |= {"embed.norm": "bert.embeddings.LayerNorm", **_HEADS[config.task]}
    rules = [
        TensorRule("embed.tokens.weight", "bert.embeddings.word_embeddings.weight"),
        TensorRule("embed.positions.weight", "bert.embeddings.position_embeddings.weight"),
        TensorRule("embed.segments.weight", "bert.embeddings.token_type_embeddings.weight"),
    ]
    for ours, theirs in pairs.items():
        rules += [TensorRule(f"{ours}.{part}", f"{theirs}.{part}") for part in ("weight", "bias")]
    if config.task == "mlm":
        rules.append(TensorRule("head.output.bias", "cls.predictions.bias"))
    return rules


BERT = HFMapping(
    model_type="bert",
    architecture=lambda config: _ARCHITECTURES[config.task],
    model=Bert,
    config_to_hf=_bert_to_hf,
    config_from_hf=_bert_from_hf,
    rules=_bert_rules,
    prefix="bert.",
    # What files of masked language models have besides: tied tensors, and the head of next sentences.
    ignored=(".position_ids", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias", "pooler.dense.weight",
             "pooler.dense.bias", "cls.seq_relationship.weight", "cls.seq_relationship.bias"),
    tied=(".position_ids", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"),
    trained_as="transformers",
)  # fmt: skip


_T5_NAMES = (
    ConfigName("vocab_size", "vocab_size"),
    ConfigName("seq_len", "n_positions", 512),
    ConfigName("layers", "num_layers"),
    ConfigName("heads", "num_heads"),
    ConfigName("head_dim", "d_kv"),
    ConfigName("hidden", "d_model"),
    ConfigName("ffn_hidden", "d_ff"),
    ConfigName("activation", "feed_forward_proj", "relu"),
    ConfigName("buckets", "relative_attention_num_buckets", 32),
    ConfigName("max_distance", "relative_attention_max_distance", 128),
    ConfigName("dropout", "dropout_rate", 0.1),
    ConfigName("norm_eps", "layer_norm_epsilon", 1e-6),
)


def _t5_to_hf(config: T5Config) -> dict[str, Any]:
    return {
        **written(config, _T5_NAMES),
        "num_decoder_layers": config.layers,
        "tie_word_embeddings": config.tie_weights,
        "is_encoder_decoder": True,
        "pad_token_id": T5_PAD,
        "decoder_start_token_id": T5_PAD,
        "eos_token_id": T5_END,
    }


def _t5_from_hf(config: Mapping[str, Any]) -> T5Config:
    layers = needed(config, "num_layers")
    # Newer versions of transformers write that weights are tied where they are not; only tied ones scale the output.
    tied = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True))
    require(
        config,
        {
            "feed_forward_proj": ("relu", "gated-gelu"),
            "num_decoder_layers": (layers, None),
            "decoder_start_token_id": (T5_PAD,),
            "pad_token_id": (T5_PAD,),
        },
    )
    return T5Config(**read(config, _T5_NAMES), tie_weights=tied)


_T5_ATTENTION = {"query": "q", "key": "k", "value": "v", "project": "o"}


def _t5_rules(config: T5Config) -> list[TensorRule]:
    gated = config.activation == "gated-gelu"
    feed = {"expand": "wi_0", "up": "wi_1", "project": "wo"} if gated else {"expand": "wi", "project": "wo"}
    sublayers = {
        "encoder": [("attention", "SelfAttention", _T5_ATTENTION), ("feed", "DenseReluDense", feed)],
        "decoder": [
            ("attention", "SelfAttention", _T5_ATTENTION),
            ("cross", "EncDecAttention", _T5_ATTENTION),
            ("feed", "DenseReluDense", feed),
        ],
    }
    rules = [TensorRule("embed.weight", "shared.weight"), TensorRule("head.weight", "lm_head.weight")]
    for stack, parts in sublayers.items():
        table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        rules.append(TensorRule(f"{stack}.bias.weight", table, transposed, transposed))
        rules.append(TensorRule(f"{stack}.norm.weight", f"{stack}.final_layer_norm.weight"))
        for number, (ours, theirs, names) in enumerate(parts):
            prefix = f"{stack}.block.#.layer.{number}"
            rules.append(TensorRule(f"{stack}.layers.#.{ours}_norm.weight", f"{prefix}.layer_norm.weight"))
            rules += [
                TensorRule(f"{stack}.layers.#.{ours}.{name}.weight", f"{prefix}.{theirs}.{other}.weight")
                for name, other in names.items()
            ]
    return rules


T5_LAYOUT = HFMapping(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    model=T5,
    config_to_hf=_t5_to_hf,
    config_from_hf=_t5_from_hf,
    rules=_t5_rules,
    prefix="",
    ignored=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
)
