"""Dense attention of tokens that follow cached ones: transformers' own, and ours for sinks."""

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def attention_beside_cache(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Dense attention, [B, Sq, Hq, D].

    query: [B, Hq, Sq, D]. key, value: [B, Hkv, Skv, D]. mask: bool [B, 1, Sq, Skv], True where a
    query sees a key, or what is added to scores. s_aux: learned sinks [Hq], or None.
    """
    if s_aux is None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, mask, dropout=0.0, scaling=scaling, is_causal=False
        )
        return out
    return _attention_with_sinks(query, key, value, mask, scaling, s_aux)


def _attention_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    s_aux: Tensor,
) -> Tensor:
    """The same with a column of scores s_aux that adds to the softmax's sum and has no value."""
    groups = query.shape[1] // key.shape[1]
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    # [B, Hq, Sq, Skv]
    keys = key.repeat_interleave(groups, dim=1)
    scores = (query @ keys.mT).float() * scaling
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    else:
        scores = scores + mask
    sinks = s_aux.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    shares = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    values = value.repeat_interleave(groups, dim=1)
    out = shares.to(value.dtype) @ values
    return out.transpose(1, 2).contiguous()
