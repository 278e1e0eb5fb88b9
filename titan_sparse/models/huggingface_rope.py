"""The rotary embedding in config.json of Hugging Face <-> RopeConfig. Imports no torch."""

import json
import math
from typing import Any

from titan_sparse.models.config import RopeConfig, Scaling

_DEFAULT_THETA = 10_000.0
"""Of transformers, where config.json gives none."""
_ORIGINAL = "original_max_position_embeddings"

# rope_type of config.json -> RopeConfig.scaling.
_SCALINGS: dict[str, Scaling] = {"default": "none", "llama3": "llama3", "yarn": "yarn"}

# RopeConfig.scaling -> the keys that config.json may give for it.
_KEYS = {
    "none": {"rope_theta"},
    "llama3": {"rope_theta", "factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "rope_theta",
        "factor",
        _ORIGINAL,
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "truncate",
    },
}

# Keys that transformers takes as absent where they are null; the betas where they are 0 too.
_BETAS = ("beta_fast", "beta_slow")
_NULLABLE = (*_BETAS, "attention_factor")


def read_rope(values: dict[str, Any]) -> RopeConfig:
    """The rotary embedding of a config.json whose top-level values have their types.

    transformers 4 writes rope_theta and rope_scaling, transformers 5 one table rope_parameters with
    both. What both lack is as in transformers. Raises ValueError, one line, that names the key.
    """
    table = _table(values)
    rope_type = table.pop("rope_type")
    if not isinstance(rope_type, str) or rope_type not in _SCALINGS:
        raise ValueError(
            f"rope_type = {json.dumps(rope_type)} is unknown; "
            'only "default", "llama3" and "yarn" can be trained'
        )
    scaling = _SCALINGS[rope_type]
    if table.pop("partial_rotary_factor", 1) != 1:
        raise ValueError("partial_rotary_factor other than 1 cannot be trained")
    unknown = set(table) - _KEYS[scaling]
    if unknown:
        raise ValueError(f'rope scaling "{rope_type}" with {min(unknown)} cannot be trained')

    if scaling == "none":
        _check_numbers(table)
        original_length = values.get(_ORIGINAL) or values["max_position_embeddings"]
        return RopeConfig(float(table["rope_theta"]), "none", 1.0, original_length)
    table.setdefault(_ORIGINAL, values["max_position_embeddings"])
    # Here the top level beats the table, unlike rope_theta.
    if _ORIGINAL in values:
        table[_ORIGINAL] = values[_ORIGINAL]
    needed = {"llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
    for key in needed[scaling]:
        if key not in table:
            raise ValueError(f'rope scaling "{rope_type}" needs {key}')
    _check_numbers(table)
    return _read_llama3(table) if scaling == "llama3" else _read_yarn(table)


def write_rope(rope: RopeConfig) -> dict[str, Any] | None:
    """The table rope_scaling of config.json, None without scaling; rope_theta stands beside it."""
    if rope.scaling == "none":
        return None
    table = {
        "rope_type": rope.scaling,
        "factor": rope.factor,
        _ORIGINAL: rope.original_length,
    }
    if rope.scaling == "llama3":
        table["low_freq_factor"] = rope.low_frequency_factor
        table["high_freq_factor"] = rope.high_frequency_factor
    else:
        table["beta_fast"] = rope.beta_fast
        table["beta_slow"] = rope.beta_slow
    return table


def _table(values: dict[str, Any]) -> dict[str, Any]:
    """The table that transformers reads, with rope_type and rope_theta filled in."""
    defaults = {"rope_theta": values.get("rope_theta", _DEFAULT_THETA)}
    tables = []
    for key in ("rope_scaling", "rope_parameters"):
        given = values.get(key)
        if given:
            table = {"rope_type": given.get("type", "default")} | defaults | given
            table.pop("type", None)
            tables.append(table)
    if not tables:
        return {"rope_type": "default"} | defaults
    if len(tables) == 2 and tables[0] != tables[1]:
        first, second = tables
        keys = [key for key in first | second if first.get(key) != second.get(key)]
        raise ValueError(
            f"rope_scaling and rope_parameters disagree on {min(keys, default='a null')}; "
            "transformers reads rope_scaling only: remove one of them"
        )
    return tables[0]


def _check_numbers(table: dict[str, Any]) -> None:
    for key, value in table.items():
        if key == "truncate":
            if value is not True:
                raise ValueError(
                    f'rope scaling "yarn" with truncate = {json.dumps(value)} cannot be trained'
                )
            continue
        if value is None and key in _NULLABLE:
            continue
        is_number = type(value) is int or (type(value) is float and key != _ORIGINAL)
        is_unset = value == 0 and key in _BETAS
        if is_number and (0 < value < 2**31 or is_unset):
            continue
        kind = "a positive integer" if key == _ORIGINAL else "a positive number"
        raise ValueError(f"{key} = {json.dumps(value)} of the rotary embedding is not {kind}")


def _read_llama3(table: dict[str, Any]) -> RopeConfig:
    low, high = float(table["low_freq_factor"]), float(table["high_freq_factor"])
    if low >= high:
        raise ValueError(
            f'rope scaling "llama3" with low_freq_factor = {low} cannot be trained; '
            f"write one below high_freq_factor = {high}"
        )
    return RopeConfig(
        float(table["rope_theta"]),
        "llama3",
        float(table["factor"]),
        table[_ORIGINAL],
        low_frequency_factor=low,
        high_frequency_factor=high,
    )


def _read_yarn(table: dict[str, Any]) -> RopeConfig:
    factor = float(table["factor"])
    theta = float(table["rope_theta"])
    if factor < 1:
        raise ValueError(
            f'rope scaling "yarn" with factor = {factor} cannot be trained; write 1 or more'
        )
    if theta <= 1:
        raise ValueError(f'rope scaling "yarn" needs a rope_theta above 1, not {theta}')
    # The decoder multiplies cos and sin by this (models/rope.py), and by nothing else.
    attention_factor = 0.1 * math.log(factor) + 1
    given = table.get("attention_factor")
    if given is not None and not math.isclose(given, attention_factor, rel_tol=1e-6):
        raise ValueError(
            f'rope scaling "yarn" with factor = {factor} and attention_factor = {given} cannot be '
            f"trained, only {attention_factor:.6g}"
        )
    return RopeConfig(
        theta,
        "yarn",
        factor,
        table[_ORIGINAL],
        # transformers too writes these for null and 0.
        beta_fast=float(table.get("beta_fast") or 32),
        beta_slow=float(table.get("beta_slow") or 1),
    )
