"""register(), and the two functions that transformers calls: one makes masks, one computes
attention."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import prepare_padding_mask, sdpa_mask

from titan_sparse.attention import SAVED_OPS, attend
from titan_sparse.attention.compiling import switch_wrong_fusions_off
from titan_sparse.attention.masks import Mask, MaskRanges
from titan_sparse.attention.patterns import Dense
from titan_sparse.integrations.transformers.masks import (
    BIDIRECTIONAL,
    AttentionMask,
    AttentionSettings,
    LayerMask,
    MaskRule,
    as_layer_mask,
    check_bounds,
    read_rule,
    settings_of,
)
from titan_sparse.integrations.transformers.refusals import (
    BESIDE_CACHE,
    check_arguments,
    check_mixing,
    check_modules,
    check_other_trainers,
    check_rope,
    check_training_beside_cache,
    checked_mask,
    is_inside_alst,
    not_computed,
    note_mixers,
)


def register(settings: AttentionSettings | None = None, name: str = "titan_sparse") -> None:
    """From here on, attn_implementation=name computes a decoder's attention by attend().

    A second call with the same name replaces the settings, also for models that exist. A model
    that would not use attend(), or would use it incorrectly, raises ValueError when it is given
    the name. Raises ValueError for settings of another type, and for names that transformers
    has or reads.
    """
    if settings is None:
        settings = AttentionSettings()
    if not isinstance(settings, AttentionSettings):
        raise ValueError(
            f"register({settings!r}) is not an AttentionSettings; write register(AttentionSettings(...))"
        )
    _check_name(name)
    _check_models_given_a_name()
    # Without the second, transformers would build no mask and ignore padding and packing.
    AttentionInterface.register(name, functools.partial(attention_forward, settings))
    AttentionMaskInterface.register(name, functools.partial(layer_mask, settings))


@functools.cache
def _check_models_given_a_name() -> None:
    """Check transformers' models when they are given a name of ours.

    transformers accepts any registered name, also for models that crash with it or ignore it. It
    calls nothing of ours before the first forward, and for models with attention code of their own
    never. So two methods of PreTrainedModel are wrapped, for the whole process. Models with other
    names only have their name looked up.
    """
    finish = PreTrainedModel.post_init
    change = PreTrainedModel.set_attn_implementation

    # Arguments have the names that transformers gives them, as some callers write them.
    @functools.wraps(finish)
    def finish_checked(self: PreTrainedModel) -> None:
        finish(self)
        settings = settings_of(getattr(self.config, "_attn_implementation", None))
        if settings is None:
            return
        if self.can_generate():
            check_modules(self, self.config._attn_implementation, settings.ranks)
        else:
            # A part of a model, perhaps one that sees no text.
            note_mixers(self)

    @functools.wraps(change)
    def change_checked(
        self: PreTrainedModel, attn_implementation: str | dict, *args: Any, **kwargs: Any
    ) -> None:
        change(self, attn_implementation, *args, **kwargs)
        if not any(settings_of(name) for name in _names(attn_implementation)):
            return
        name = self.config.get_text_config(decoder=True)._attn_implementation
        given: Any = attn_implementation
        if isinstance(given, dict):
            given = given.get("text_config", given.get(""))
        if isinstance(given, str):
            # Of a model with attention of its own, transformers only warns, and changes nothing.
            name = given
        settings = settings_of(name)
        if settings is not None:
            check_modules(self, name, settings.ranks)

    PreTrainedModel.post_init = finish_checked  # type: ignore[method-assign]
    PreTrainedModel.set_attn_implementation = change_checked  # type: ignore[method-assign]


def _names(attn_implementation: str | dict) -> Iterator[str]:
    """All names in what set_attn_implementation() takes: one for the model,
    or some for its parts."""
    if isinstance(attn_implementation, dict):
        for of_part in attn_implementation.values():
            yield from _names(of_part)
    else:
        yield attn_implementation


def _check_name(name: str) -> None:
    names = {"eager", *AttentionInterface().valid_keys()}
    if not isinstance(name, str):
        raise ValueError(f'register(name={name!r}) is not a name; write name="titan_sparse"')
    is_taken = name in names and settings_of(name) is None
    # Others are kernels of FlashAttention, kernels of the hub, or paged variants.
    if is_taken or "flash" in name or not name.isidentifier():
        raise ValueError(
            f'register(name="{name}") means something else to transformers; write letters and "_", '
            'such as "titan_sparse"'
        )


def layer_mask(settings: AttentionSettings, **arguments: Any) -> LayerMask | Tensor:
    """make_mask(). While torch.compile traces this, inductor has not compiled what comes before."""
    if torch.compiler.is_compiling():
        switch_wrong_fusions_off()
    return make_mask(settings, **arguments)


@torch.compiler.disable
def make_mask(
    settings: AttentionSettings,
    q_length: int,
    kv_length: int,
    mask_function: Callable,
    attention_mask: Tensor | AttentionMask | Mask | MaskRanges | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    **kwargs,
) -> LayerMask | Tensor:
    """The attention_mask of attention_forward(): a LayerMask, or for tokens that follow
    cached ones a dense mask, bool [B, 1, Sq, Skv], True where a query sees a key.

    attention_mask: what the user gave to the model, the 2D one as bool [B, at most Skv].
    Raises ValueError for masks that attend() does not compute.
    """
    check_other_trainers()
    if isinstance(attention_mask, LayerMask):
        # generate() with a static cache asks us first, and the model asks again.
        return attention_mask
    rule = read_rule(mask_function)
    check_rope(kwargs.get("config"), settings.ranks)
    # Beside a mask of ours, no cache means a kv_length of 0. Several tokens may meet an empty
    # static cache: the host waits for the device.
    follows_cache = kv_length > q_length and (q_length == 1 or int(q_offset) > 0)
    if isinstance(attention_mask, AttentionMask | Mask | MaskRanges):
        if follows_cache:
            raise ValueError(BESIDE_CACHE)
        return as_layer_mask(attention_mask, max(q_length, kv_length), rule)
    _check(attention_mask, rule)
    if settings.ranks > 1:
        raise ValueError(
            "context parallelism reads a mask of whole sequences, without a cache; write "
            "model(**shard_batch(batch, cp)), or attention_mask=AttentionMask(mask). To generate, "
            'write register(name="one_rank") and model.set_attn_implementation("one_rank")'
        )
    kwargs |= {"allow_is_causal_skip": False, "mask_function": mask_function}
    if follows_cache:
        kwargs |= {"q_offset": q_offset, "kv_offset": kv_offset, "attention_mask": attention_mask}
        dense = sdpa_mask(q_length=q_length, kv_length=kv_length, **kwargs)
        assert dense is not None  # None would mean causal, which allow_is_causal_skip rules out.
        return dense
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    last_sees = None
    if padding is not None:
        # A static cache has free room after the prompt.
        padding = padding[:, :q_length]
        kwargs |= {"q_offset": q_length - 1, "attention_mask": padding}
        last_sees = sdpa_mask(q_length=1, kv_length=q_length, **kwargs)
    return LayerMask(rule, padding, own=None, keys=kv_length, last_sees=last_sees)


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
        raise not_computed(attention_mask)


def attention_forward(
    settings: AttentionSettings,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask | AttentionMask | Mask | MaskRanges | Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention of one layer, in transformers' terms: out [B, Sq, Hq, D], and no weights.

    query: [B, Hq, Sq, D]. key, value: [B, Hkv, Skv, D]; Skv differs from Sq beside a cache only.
    attention_mask: what layer_mask() made, or a mask of ours that the user gave for this kind of
    layer. s_aux: learned sinks [Hq]. kwargs: position_ids, and what else models add.
    Raises ValueError for what attend() does not compute.
    """
    if torch.compiler.is_compiling():
        switch_wrong_fusions_off()
    check_arguments(module, query, key, value, kwargs)
    if attention_mask is None and is_inside_alst():
        attention_mask = mask_inside_alst(module, kwargs.get("position_ids"), sliding_window, key)
    mask = checked_mask(module, attention_mask, query, key)
    bounds = kwargs.get("cu_seq_lens_q")
    if isinstance(mask, Tensor):
        if bounds is not None:
            check_bounds(bounds, None)
        if sliding_window is None:
            check_training_beside_cache(module, query, settings.pattern)
        out = attention_beside_cache(module, query, key, value, mask, scaling, s_aux)
        return out, None
    ranges = mask.ranges(kwargs.get("position_ids"), query, settings, bounds)
    check_mixing(module, ranges, settings.ranks)
    sees_far = not mask.rule.is_local and sliding_window is None
    # A static cache has free room after the prompt.
    seq_len = query.shape[2]
    q, k, v = query, key[:, :, :seq_len], value[:, :, :seq_len]
    if torch.is_autocast_enabled(q.device.type):
        # As for torch's own attention. Norms of queries and keys with fp32 weights return fp32.
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    out = attend(
        q,
        k,
        v,
        mask=ranges,
        pattern=settings.pattern if sees_far else Dense(),
        cp=settings.cp,
        backend=settings.backend,
        scale=scaling,
        block_size=settings.block_size,
        recomputed=settings.recomputed,
        sinks=None if s_aux is None else s_aux.float(),
    )
    out = out.transpose(1, 2)
    has_padding = ranges.document_start is not None or ranges.slices is not None
    if mask.padding is None or mask.last_sees is None or not has_padding:
        return out.contiguous(), None
    last = attention_beside_cache(module, q[:, :, -1:], k, v, mask.last_sees, scaling, s_aux)
    # generate() reads the first answer at the last token, also where that is padding.
    last = torch.where(mask.padding[:, -1, None, None, None], out[:, -1:], last)
    return torch.cat([out[:, :-1], last], dim=1), None


def mask_inside_alst(
    module: nn.Module, position_ids: Tensor | None, window: int | None, key: Tensor
) -> LayerMask:
    """The mask of whole sequences that DeepSpeed's ALST gathered: it drops masks
    and gathers positions.

    key: [B, Hkv, S, D]. Raises ValueError for what positions do not say.
    """
    if position_ids is None or getattr(module.config, "attention_chunk_size", None) is not None:
        raise ValueError(
            "DeepSpeed's ALST hands on position_ids and no masks, which titan_sparse needs for a model "
            "with chunks; write sp_size=1, and position_ids for each token"
        )
    return LayerMask(MaskRule(window=window), padding=None, own=None, keys=key.shape[2])


def attention_beside_cache(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Dense attention, [B, Sq, Hq, D], of tensors as in attention_forward().

    mask: bool [B, 1, Sq, Skv], True where a query sees a key, or what is added to scores.
    """
    if s_aux is not None:
        # A sink is one more key: its score is s_aux, and its value is 0.
        key = pad(key, (0, 0, 0, 1))
        value = pad(value, (0, 0, 0, 1))
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
        shape = query.shape[:3]
        sinks = s_aux.to(mask.dtype)[None, :, None, None].expand(*shape, 1)
        mask = torch.cat([mask.expand(*shape, -1), sinks], dim=-1)
    out, _ = sdpa_attention_forward(
        module, query, key, value, mask, dropout=0.0, scaling=scaling, is_causal=False
    )
    return out


def keep_attention() -> dict[str, object]:
    """gradient_checkpointing_kwargs with which the backward recomputes all of a layer except
    attention: its selections, its transfers between ranks, and the kernels' forward.

        model.gradient_checkpointing_enable(keep_attention())

    In addition to each layer's input, attention's output [B, S, Hq * D] and its LSE [B, Hq, S] in
    fp32 are kept.
    """
    contexts = functools.partial(create_selective_checkpoint_contexts, list(SAVED_OPS))
    return {"use_reentrant": False, "context_fn": contexts}
