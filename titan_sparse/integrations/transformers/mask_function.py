"""The mask function that transformers calls once a forward for each kind of layer."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.masking_utils import prepare_padding_mask, sdpa_mask

from titan_sparse.integrations.transformers.layer_masks import AttentionMask, LayerMask
from titan_sparse.integrations.transformers.mask_rules import BIDIRECTIONAL, MaskRule, read_rule
from titan_sparse.integrations.transformers.refusals import BESIDE_CACHE, check_rope
from titan_sparse.integrations.transformers.settings import ON_ONE_RANK, AttentionSettings


@torch.compiler.disable
def layer_mask(
    settings: AttentionSettings,
    q_length: int,
    kv_length: int,
    mask_function: Callable,
    attention_mask: Tensor | AttentionMask | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    **kwargs,
) -> LayerMask | Tensor:
    """What attention_forward() gets as attention_mask: a LayerMask, or for tokens that follow
    cached ones a dense mask, bool [B, 1, Sq, Skv], True where a query sees a key.

    attention_mask: what the user gave to the model, the 2D one as bool [B, at most Skv].
    Raises ValueError for masks that attend() does not compute.
    """
    if isinstance(attention_mask, LayerMask):
        # generate() with a static cache asks us first, and the model asks again.
        return attention_mask
    kwargs["allow_is_causal_skip"] = False
    rule = read_rule(mask_function)
    is_own = isinstance(attention_mask, AttentionMask)
    if not is_own:
        _check(attention_mask, rule)
    if follows_cache(q_length, kv_length, q_offset):
        if is_own:
            raise ValueError(BESIDE_CACHE)
        if settings.ranks > 1:
            raise ValueError(
                f"context parallelism does not compute tokens that follow cached ones. {ON_ONE_RANK}"
            )
        return sdpa_mask(
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **kwargs,
        )
    check_rope(kwargs.get("config"), settings.ranks)
    if is_own:
        own = attention_mask.mask
        return LayerMask(rule, padding=None, own=own, keys=max(q_length, kv_length))
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    last_sees = None
    if padding is not None:
        # A static cache has room behind the prompt.
        padding = padding[:, :q_length]
        last_sees = sdpa_mask(
            q_length=1,
            kv_length=q_length,
            q_offset=q_length - 1,
            mask_function=mask_function,
            attention_mask=padding,
            **kwargs,
        )
    return LayerMask(rule, padding, own=None, keys=kv_length, last_sees=last_sees)


def follows_cache(q_length: int, kv_length: int, q_offset: int | Tensor) -> bool:
    """Whether these tokens see cached ones, or are a single one beside a static cache.

    The host waits for the device if several tokens meet a static cache.
    """
    if kv_length <= q_length:
        # No cache, or an empty one. Beside an AttentionMask, no cache means a kv_length of 0.
        return False
    if q_length == 1:
        return True
    return int(q_offset) > 0


def _check(attention_mask: Tensor | None, rule: MaskRule) -> None:
    if rule.unknown is not None:
        others = "AttentionMask(mask) with a mask of titan_sparse.attention.masks"
        if rule.unknown == BIDIRECTIONAL:
            others = "AttentionMask(Full()) for sequences without padding"
        raise ValueError(
            f"titan_sparse does not read {rule.unknown} of transformers; write "
            f'attn_implementation="sdpa", or attention_mask={others}'
        )
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask with {attention_mask.ndim} dims is not computed; write "
            "attention_mask=AttentionMask(mask) with a mask of titan_sparse.attention.masks"
        )
