"""Weights of a model of transformers, counted from its config.json. Imports no torch."""

from typing import Any, NamedTuple

from titan_sparse.models.transformers_families import Experts, Family


class Counts(NamedTuple):
    """Elements. of_token: those of `matrices` that one token is multiplied by."""

    matrices: int
    of_token: int
    vectors: int


def parameters_of_layers(values: dict[str, Any], family: Family) -> Counts:
    """All layers together.

    values: of config.json, with the family's defaults, after read_transformers_config() has checked
    them.
    """
    layers = values["num_hidden_layers"]
    dense_layers = len(dense_layers_of(values, family))
    attention = _attention(values, family)
    dense = _dense_mlp(values)
    routed = _experts(values, family.experts) if family.experts else Counts(0, 0, 0)
    norms = family.norms * values["hidden_size"]
    counts = []
    for of_attention, of_dense, of_routed in zip(attention, dense, routed, strict=True):
        mlps = dense_layers * of_dense + (layers - dense_layers) * of_routed
        counts.append(layers * of_attention + mlps)
    matrices, of_token, vectors = counts
    return Counts(matrices, of_token, vectors + layers * norms)


def dense_layers_of(values: dict[str, Any], family: Family) -> list[int]:
    """The layers whose MLP is no mixture of experts."""
    layers = values["num_hidden_layers"]
    if family.experts is None:
        return list(range(layers))
    every = values.get("decoder_sparse_step", 1)
    without = values.get("mlp_only_layers") or []
    return [layer for layer in range(layers) if layer in without or (layer + 1) % every]


def head_dim_of(values: dict[str, Any]) -> int:
    """As config.json says, else what fits."""
    return values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]


def kv_heads_of(values: dict[str, Any]) -> int:
    """As config.json says, else as many as query heads."""
    return values.get("num_key_value_heads") or values["num_attention_heads"]


def _attention(values: dict[str, Any], family: Family) -> Counts:
    hidden_size = values["hidden_size"]
    head_dim = head_dim_of(values)
    query_size = values["num_attention_heads"] * head_dim
    kv_size = kv_heads_of(values) * head_dim
    matrices = 2 * hidden_size * (query_size + kv_size)
    vectors = 0
    if family.qkv_bias or values.get("attention_bias"):
        vectors += query_size + 2 * kv_size
    if values.get("attention_bias") and not family.qkv_bias:
        vectors += hidden_size
    if family.qk_norm == "head":
        vectors += 2 * head_dim
    if family.qk_norm == "row":
        vectors += query_size + kv_size
    if family.sinks:
        vectors += values["num_attention_heads"]
    return Counts(matrices, matrices, vectors)


def _dense_mlp(values: dict[str, Any]) -> Counts:
    hidden_size = values["hidden_size"]
    size = values["intermediate_size"]
    matrices = 3 * hidden_size * size
    vectors = 2 * size + hidden_size if values.get("mlp_bias") else 0
    return Counts(matrices, matrices, vectors)


def _experts(values: dict[str, Any], experts: Experts) -> Counts:
    hidden_size = values["hidden_size"]
    count = values["num_local_experts"]
    size = values[experts.size]
    of_expert = 3 * hidden_size * size
    router = count * hidden_size
    vectors = 0
    if experts.bias:
        vectors = count * (2 * size + hidden_size + 1)
    return Counts(
        matrices=count * of_expert + router,
        of_token=values["num_experts_per_tok"] * of_expert + router,
        vectors=vectors,
    )
