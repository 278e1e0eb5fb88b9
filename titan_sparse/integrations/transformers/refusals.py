"""Refusals, by name and before anything is computed, of what attend() does not compute."""

import re
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from titan_sparse.attention.masks import Mask, MaskRanges
from titan_sparse.attention.patterns import Pattern
from titan_sparse.integrations.transformers.linear import keep_documents_apart
from titan_sparse.integrations.transformers.masks import (
    AttentionMask,
    LayerMask,
    as_layer_mask,
    has_documents,
)
from titan_sparse.token_wise_modules import calls_interface, chooses_keys, mixers, numbers_tokens

_OTHERS = 'write attn_implementation="eager"'
_REFUSED = {
    "softcap": f"capped scores, {_OTHERS}",
    "position_bias": f"a bias of scores, {_OTHERS}",
    "alibi": f"a bias of scores, {_OTHERS}",
    "indices": f"a model's own choice of keys, {_OTHERS}",
    "block_indices": f"a model's own choice of keys, {_OTHERS}",
    "sinks": f"sinks that depend on tokens, {_OTHERS}",
    "cache": 'paged caches, write attn_implementation="sdpa" for generate_batch()',
    "output_attentions": f"attention weights, write output_attentions=False, or {_OTHERS}",
}
"""Keywords of transformers' attention functions that we do not support: what they are, and what to
write."""

_ONE_RANK = "write cp_size=1, or AttentionSettings(cp=None)"

BESIDE_CACHE = (
    "masks of ours are for whole sequences, not for tokens that follow cached ones; "
    "write use_cache=False, or a 2D attention_mask"
)


def not_computed(attention_mask: Tensor) -> ValueError:
    return ValueError(
        f"attention_mask with {attention_mask.ndim} dims is not computed; write "
        "attention_mask=AttentionMask(mask) with a mask of titan_sparse.attention.masks"
    )


def check_modules(model: PreTrainedModel, name: str, ranks: int) -> None:
    """Raises ValueError for a model that would not use attend(), or would be wrong over `ranks`.

    name: its attn_implementation.
    """
    note_mixers(model)
    text = _text_part(model)
    attention = [module for module in text.modules() if calls_interface(module)]
    if not attention:
        mixer = next(mixers(text), None)
        own = "" if mixer is None else f", having {mixer} instead"
        raise ValueError(
            f'{type(model).__name__} would not use "{name}": none of its modules asks transformers '
            f"for an attention function{own}; {_OTHERS}"
        )
    for module in attention:
        if chooses_keys(module):
            raise ValueError(
                f"{type(module).__name__} makes a mask of its own from what tokens hold, which is "
                f"not computed; {_OTHERS}"
            )
    _check_ranks(attention[0], ranks)
    for path, module in text.named_modules():
        if ranks > 1 and numbers_tokens(module):
            raise ValueError(
                f"{path} ({type(module).__name__}) numbers the tokens of one rank by itself, "
                f"whatever their position_ids; {_ONE_RANK}"
            )


def note_mixers(model: PreTrainedModel) -> None:
    """Mark the model's attention if a module is not known to be token-wise."""
    text = _text_part(model)
    keep_documents_apart(text)
    mixer = next(mixers(text), None)
    for module in text.modules():
        if calls_interface(module):
            vars(module)["token_mixer"] = mixer


def _text_part(model: PreTrainedModel) -> nn.Module:
    is_text_only = model.config.get_text_config(decoder=True) is model.config
    return model if is_text_only else model.get_decoder()


def _check_ranks(attention: nn.Module, ranks: int) -> None:
    if attention.token_mixer is not None and ranks > 1:
        raise ValueError(
            f"{attention.token_mixer} is not known to treat each token by itself, and would see the "
            f"tokens of one rank only; {_ONE_RANK}"
        )


def check_mixing(module: nn.Module, ranges: MaskRanges, ranks: int) -> None:
    """Raises ValueError for documents or ranks beside a module that is not known to be token-wise.

    module: attention that note_mixers() has seen. ranges: its mask. The host waits for the device
    if there is such a module and documents may be several.
    """
    mixer = getattr(module, "token_mixer", None)
    if mixer is None:
        return
    _check_ranks(module, ranks)
    if has_documents(ranges):
        raise ValueError(
            f"{mixer} is not known to treat each token by itself, so that packed documents would "
            "see each other; write packing=False, or a row for each document"
        )


def check_arguments(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
) -> None:
    """Raises ValueError for tensors and keywords that attend() does not compute.

    module: attention. query: [B, Hq, Sq, D]. key, value: [B, Hkv, Skv, D]. kwargs:
    what transformers adds.
    """
    for name, reason in _REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            what, _, instead = reason.partition(", ")
            raise ValueError(f"{name} ({what}) is not computed; {instead}")
    # transformers gives the rate in training, and 0 elsewhere.
    dropout = kwargs.get("dropout", 0.0)
    if dropout > 0:
        raise ValueError(
            f"attention dropout of {dropout} is not computed; write "
            f"config.{_dropout_key(module, dropout)} = 0 before you make the model"
        )
    if value.shape[-1] != key.shape[-1] or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"values of {value.shape[-1]} and keys of {key.shape[-1]} dimensions (latent "
            'attention, MLA) are not computed; write attn_implementation="sdpa"'
        )


def _dropout_key(module: nn.Module, rate: float) -> str:
    """The key of the model's configuration that has the rate of attention's dropout."""
    config = getattr(module, "config", None)
    options = {} if config is None else config.to_dict()
    # "attention_dropout", "attention_probs_dropout_prob", or "attn_pdrop".
    found = (key for key in options if re.search("att.*drop", key) and options[key] == rate)
    return next(found, "attention_dropout")


def checked_mask(module: nn.Module, mask: object, query: Tensor, key: Tensor) -> LayerMask | Tensor:
    """A layer's mask in the form that attention reads. A Tensor is that of tokens
    that follow cached ones.

    mask: what the layer was handed as attention_mask.
    Raises ValueError for a mask that is none of ours, or does not fit what is cached.
    """
    name = type(module).__name__
    has_more_keys = key.shape[2] != query.shape[2]
    if isinstance(mask, LayerMask):
        if key.shape[2] != mask.keys:
            if mask.keys == query.shape[2] > 1:
                raise ValueError(
                    f"{name} attends to {key.shape[2]} keys where there are {mask.keys} tokens, "
                    f"which is not computed; {_OTHERS}"
                )
            # transformers' cache of a window of one token, for one, keeps more than it says.
            raise ValueError(
                f"the cache holds {key.shape[2]} keys where transformers announced {mask.keys}; "
                "write use_cache=False"
            )
        return mask
    if isinstance(mask, AttentionMask | Mask | MaskRanges):
        if has_more_keys:
            raise ValueError(BESIDE_CACHE)
        return as_layer_mask(mask, query.shape[2])
    if isinstance(mask, Tensor):
        if not has_more_keys:
            raise not_computed(mask)
        return mask
    if not getattr(module, "is_causal", True):
        raise ValueError(
            f"{name} is bidirectional or cross attention, which is not computed; "
            'write attn_implementation="sdpa" for that part of the model'
        )
    raise ValueError(
        f"{name} got {type(mask).__name__} for a mask; write register(), which registers masks too, "
        "and let the model build them"
    )


def check_training_beside_cache(module: nn.Module, query: Tensor, pattern: Pattern) -> None:
    """Raises ValueError where a pattern would be ignored in training, as in PEFT's prefix tuning.

    What follows cached tokens is dense. module: attention. query: [B, Hq, Sq, D] of such tokens.
    """
    trains = module.training and torch.is_grad_enabled() and query.shape[2] > 1
    if trains and pattern.dynamic:
        raise ValueError(
            "tokens that follow cached ones, as in prefix tuning, are computed densely, so that training "
            f"would ignore {pattern.name}; write register(AttentionSettings()), which is dense"
        )


def check_other_trainers() -> None:
    """Raises ValueError inside of a trainer that shares sequences in attention
    functions of its own.

    They replace those of flash_attention_2 and sdpa. Ours would see the tokens of one rank, and the
    loss would look plausible.
    """
    verl = sys.modules.get("verl.utils.ulysses")
    if verl is not None and verl.get_ulysses_sequence_parallel_world_size() > 1:
        raise ValueError(
            "verl's Ulysses would leave attention of titan_sparse with the tokens of one rank; write "
            "ulysses_sequence_parallel_size=1"
        )
    swift = sys.modules.get("swift.sequence_parallel.sequence_parallel")
    if swift is not None and (swift.sequence_parallel.world_size or 1) > 1:
        raise ValueError(
            "ms-swift's sequence parallelism would leave attention of titan_sparse with the tokens of "
            "one rank; write --sequence_parallel_size 1"
        )


def is_inside_alst() -> bool:
    """True if DeepSpeed's ALST gives attention functions whole sequences of some of the heads."""
    alst = sys.modules.get("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    # Its function raises as long as there is no group.
    if alst is None or alst._SEQUENCE_PARALLEL_GROUP is None:
        return False
    return alst.get_sequence_parallel_world_size() > 1


def check_rope(config: PreTrainedConfig | None, ranks: int) -> None:
    """Raises ValueError for a rotary embedding that depends on more than one of these ranks has."""
    parameters = getattr(config, "rope_parameters", None) or {}
    # Some models have one for each kind of layer.
    kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, dict))]
    for kind in kinds:
        if ranks > 1 and kind.get("rope_type") in ("dynamic", "longrope"):
            raise ValueError(
                f'rope_type "{kind["rope_type"]}" looks for the last position among one rank\'s '
                'tokens; write rope_type="yarn" or "linear" into config.rope_parameters, or cp_size=1'
            )
