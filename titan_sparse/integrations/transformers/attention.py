"""The attention function that transformers calls in every layer."""

import torch
from torch import Tensor, nn

from titan_sparse.attention import attend
from titan_sparse.attention.masks import Mask, MaskRanges
from titan_sparse.attention.patterns import Dense
from titan_sparse.integrations.transformers.cached import attention_beside_cache
from titan_sparse.integrations.transformers.layer_masks import AttentionMask, LayerMask
from titan_sparse.integrations.transformers.mask_rules import MaskRule
from titan_sparse.integrations.transformers.refusals import (
    check_arguments,
    check_mask,
    check_mixing,
)
from titan_sparse.integrations.transformers.settings import AttentionSettings


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
    layer. sliding_window: the layer's, or None. s_aux: learned sinks [Hq], or None.
    kwargs: position_ids, and whatever else transformers and the model add.
    Raises ValueError for what attend() does not compute.
    """
    check_arguments(query, key, value, kwargs)
    check_mask(module, attention_mask, query, key)
    if isinstance(attention_mask, Tensor):
        out = attention_beside_cache(module, query, key, value, attention_mask, scaling, s_aux)
        return out, None
    mask = _for_layers(attention_mask, query.shape[2])
    ranges = mask.ranges(kwargs.get("position_ids"), query, settings)
    check_mixing(module, ranges, settings.ranks)
    sees_far = not mask.rule.is_local and sliding_window is None
    # A static cache has room behind the prompt.
    seq_len = query.shape[2]
    q, k, v = _in_one_dtype(query, key[:, :, :seq_len], value[:, :, :seq_len])
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
        sinks=_sinks(s_aux, q),
    )
    out = out.transpose(1, 2)
    has_padding = ranges.document_start is not None or ranges.slices is not None
    if mask.last_sees is None or not has_padding:
        return out.contiguous(), None
    last = attention_beside_cache(module, q[:, :, -1:], k, v, mask.last_sees, scaling, s_aux)
    # generate() reads the first answer at the last token, also where that is padding.
    last = torch.where(mask.padding[:, -1, None, None, None], out[:, -1:], last)
    return torch.cat([out[:, :-1], last], dim=1), None


def _for_layers(mask: AttentionMask | Mask | MaskRanges, keys: int) -> LayerMask:
    """The mask as layers read it. What a user gave for one kind of layer is taken as it is."""
    if isinstance(mask, LayerMask):
        return mask
    if isinstance(mask, AttentionMask):
        mask = mask.mask
    return LayerMask(MaskRule(), padding=None, own=mask, keys=keys)


def _in_one_dtype(*tensors: Tensor) -> list[Tensor]:
    """The tensors in autocast's dtype, where autocast is on, as it treats torch's own attention.

    Norms of queries and keys whose weights are fp32 leave them in fp32, beside values in bf16.
    """
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type)
    return [tensor.to(dtype) for tensor in tensors]


def _sinks(s_aux: Tensor | None, q: Tensor) -> Tensor | None:
    """Learned sinks [Hq] in a dtype that attend() takes, also where autocast has changed q's."""
    if s_aux is None or s_aux.dtype == q.dtype:
        return s_aux
    return s_aux.float()
