"""Published model shapes and the overrides of the [model] config section. Imports no torch."""

import json
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from titan_sparse.models.config import DecoderConfig, RopeConfig
from titan_sparse.models.huggingface_config import config_of, is_native, read_config
from titan_sparse.models.transformers_config import AS_PUBLISHED, read_transformers_config

_FILE = Path(__file__).with_name("flavours.json")
# Qwen publishes YaRN with original_max_position_embeddings = 32768, whatever
# max_position_embeddings says.
FLAVOURS: dict[str, DecoderConfig] = {
    name: config_of(values, _FILE) for name, values in json.loads(_FILE.read_text()).items()
}


def resolve(
    flavour: str,
    vocab_size: int = 0,
    rope_scaling: Literal["flavour", "none", "llama3", "yarn"] = "flavour",
    rope_factor: float = 1.0,
    rope_original_length: int = 0,
    rope_theta: float = 0.0,
    initial_hf: str = "",
    layers: int = 0,
    implementation: Literal["auto", "native", "transformers"] = "auto",
    random_weights: bool = False,
    router_loss: float = AS_PUBLISHED,
) -> DecoderConfig:
    """The flavour's config with the overrides of the [model] section applied.

    0 (and "flavour" for rope_scaling) keeps the flavour's value. `initial_hf` is a folder of
    Hugging Face whose config.json replaces the flavour. Rope scaling may be added if it has none,
    the vocabulary may grow, and the base of the rotary frequencies may change. Everything else must
    agree with it, except `layers` with `random_weights`. The flavour "debug" is the default, so it
    is ignored then. A model that runs through transformers' own code gives a TransformersConfig,
    whose rope scaling cannot be changed.
    Raises ValueError for an unknown flavour, and an override that would have no effect or does not
    agree. config.check() refuses what is out of range.
    """
    if flavour not in FLAVOURS:
        nearest = get_close_matches(flavour, FLAVOURS, n=1, cutoff=0.0)[0]
        raise ValueError(
            f'model.flavour = "{flavour}" is unknown; write "{nearest}" or one of {list(FLAVOURS)}.'
        )
    if random_weights and not initial_hf:
        raise ValueError(
            "model.random_weights = true says something of model.initial_hf, which is not given; "
            "leave it out, as the first weights are random anyway"
        )
    theirs = choose_implementation(initial_hf, implementation)[0] == "transformers"
    if theirs:
        base = read_transformers_config(initial_hf, router_loss, layers * random_weights)
    else:
        base = read_config(initial_hf) if initial_hf else FLAVOURS[flavour]
        if random_weights:
            base = replace(base, layers=layers or base.layers)
        if router_loss != AS_PUBLISHED:
            raise ValueError(
                f"model.router_loss = {router_loss:g}, but the model has no router; leave it out"
            )
    rope = _override_rope(base.rope, rope_scaling, rope_factor, rope_original_length, rope_theta)
    resolved = replace(
        base, vocab_size=vocab_size or base.vocab_size, layers=layers or base.layers, rope=rope
    )
    if initial_hf:
        _refuse_contradictions(initial_hf, base, resolved, flavour)
    if theirs and resolved != base:
        # Numbers of parameters depend on the vocabulary.
        return read_transformers_config(
            initial_hf, router_loss, base.layers, resolved.vocab_size, rope_theta
        )
    return resolved


def choose_implementation(initial_hf: str, implementation: str) -> tuple[str, str]:
    """ "native" or "transformers", and why.

    Raises ValueError for a choice that does not fit, or a config.json that cannot be read.
    """
    if not initial_hf:
        if implementation == "transformers":
            raise ValueError(
                'model.implementation = "transformers" needs model.initial_hf, a folder of Hugging '
                "Face; write it, or leave model.implementation out"
            )
        return "native", "a flavour of ours"
    if implementation != "auto":
        return implementation, "as asked"
    if is_native(initial_hf):
        return "native", "our decoder has the family"
    return "transformers", "our decoder does not have the family"


def _refuse_contradictions(
    folder: str, published: DecoderConfig, resolved: DecoderConfig, flavour: str
) -> None:
    """Refuse a [model] section, `resolved`, that contradicts config.json, read as `published`."""
    if resolved.vocab_size < published.vocab_size:
        raise ValueError(
            f"model.vocab_size = {resolved.vocab_size} would cut the {published.vocab_size} rows of "
            f"{folder}; write {published.vocab_size} or more, or leave it out"
        )
    theta = published.rope.theta
    is_theirs = published.runs_in_transformers
    if is_theirs and not published.has_one_theta and resolved.rope.theta != theta:
        raise ValueError(
            f"model.rope_theta = {resolved.rope.theta:g}, but the layers of a "
            f"{published.model_type} do not share one; leave it out, or change rope_parameters in "
            f"{folder}/config.json"
        )
    pairs = {"model.layers": (resolved, published, "layers")}
    if is_theirs or published.rope.scaling != "none":
        scaled = replace(resolved, rope=replace(resolved.rope, theta=theta))
        pairs["model.rope_scaling and what goes with it"] = (scaled, published, "rope")
    if flavour != "debug":
        for field in fields(DecoderConfig):
            # The same shape is published with different lengths and rope scalings.
            if field.name not in ("max_positions", "rope"):
                key = f'model.flavour = "{flavour}": {field.name}'
                pairs[key] = (FLAVOURS[flavour], published, field.name)
    for key, (said, wanted, name) in pairs.items():
        if getattr(said, name) != getattr(wanted, name):
            raise ValueError(
                f"{key} = {getattr(said, name)} does not agree with {folder}/config.json, which has "
                f"{getattr(wanted, name)}; leave it out."
            )


def _override_rope(
    rope: RopeConfig, scaling: str, factor: float, original_length: int, theta: float
) -> RopeConfig:
    if scaling in ("llama3", "yarn"):
        if factor <= 1:
            raise ValueError(
                f'model.rope_factor must be above 1 with model.rope_scaling = "{scaling}", got '
                f"{factor}; write the target length divided by the training length."
            )
        rope = replace(rope, scaling=scaling, factor=factor)
    elif factor != 1:
        raise ValueError(
            f"model.rope_factor = {factor} has no effect with model.rope_scaling = "
            f'"{scaling}"; write model.rope_scaling = "yarn" or "llama3".'
        )
    elif scaling == "none":
        rope = replace(rope, scaling="none", factor=1.0)
    if original_length and rope.scaling == "none":
        raise ValueError(
            f"model.rope_original_length = {original_length} has no effect without rope scaling; "
            'write 0, or model.rope_scaling = "yarn" or "llama3".'
        )
    if theta != 0 and theta <= 1:
        raise ValueError(
            f"model.rope_theta = {theta} must be above 1; write 0 for the flavour's own."
        )
    return replace(
        rope,
        original_length=original_length or rope.original_length,
        theta=float(theta) or rope.theta,
    )
