"""The twins of kernels.gathered in plain torch. They take any dtype and device, for small sizes."""

import torch
from torch import Tensor

from titan_sparse.kernels.bits import unpack
from titan_sparse.kernels.gathered.lists import Choices, Gathered


def chosen_pairs(choices: Choices) -> Tensor:
    words = choices.words
    chunks = choices.begin.shape[1]
    slots = choices.slots
    # [B, Hq, S, C]: in which slot each chosen chunk of the query's document is.
    number = torch.arange(words.shape[-1] * 32, device=words.device)
    is_earlier = number < choices.earlier[:, None, :, None]
    chosen = unpack(words, len(number)) & is_earlier
    slot = torch.where(chosen, chosen.cumsum(-1) - 1, slots)
    slot = slot.clamp(max=slots)

    # [B, Hq, S, slots]; one slot more takes what was not chosen, and is cut off.
    chunk = choices.offset[:, None, :, None] + number
    shape = (*words.shape[:3], slots + 1)
    chunk_of_slot = torch.full(shape, chunks, device=words.device)
    chunk_of_slot.scatter_(3, slot, chunk.expand_as(slot))
    chunk_of_slot = chunk_of_slot[..., :slots]
    pairs = chunk_of_slot * slots + torch.arange(slots, device=words.device)
    return pairs.mT.int().contiguous()


def gather_queries(pairs: Tensor, chunks: int) -> Gathered:
    slots, q_len = pairs.shape[2:]
    # [B, Hq, slots * S]
    keys, order = pairs.flatten(2).sort(dim=-1, stable=True)
    wanted = torch.arange((chunks + 1) * slots + 1, dtype=torch.int32, device=pairs.device)
    wanted = wanted.expand(*keys.shape[:2], -1).contiguous()
    begin = torch.searchsorted(keys, wanted, out_int32=True)
    return Gathered((order % q_len).int(), begin, slots)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choices: Choices,
    gathered: Gathered,
    scale: float,
    total: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """As add_attention(), but the total is left alone. Returns both, merged."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys, values = _of_query_heads(k, v, q.shape[1], dtype)
    scores = _scores(q, keys, choices, gathered, scale)
    lse = scores.logsumexp(-1)
    before, before_lse = total
    merged_lse = torch.logaddexp(before_lse.to(dtype), lse)
    out = _probability(scores, merged_lse) @ values
    # Of what was there already, the share that is left.
    share = _probability(before_lse.to(dtype)[..., None], merged_lse)
    return out + share * before.to(dtype), merged_lse


def backward(
    d_out: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    k: Tensor,
    v: Tensor,
    choices: Choices,
    gathered: Gathered,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv through the gathered pairs; out and lse are of the whole attention."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    kv_heads = k.shape[1]
    keys, values = _of_query_heads(k, v, q.shape[1], dtype)
    p = _probability(_scores(q, keys, choices, gathered, scale), lse.to(dtype))
    d_out = d_out.to(dtype)
    delta = (d_out * out.to(dtype)).sum(-1, keepdim=True)
    d_scores = p * (d_out @ values.mT - delta) * scale
    dk = (d_scores.mT @ q.to(dtype)).unflatten(1, (kv_heads, -1)).sum(2)
    dv = (p.mT @ d_out).unflatten(1, (kv_heads, -1)).sum(2)
    return d_scores @ keys, dk, dv


def seen_keys(choices: Choices, gathered: Gathered, k_len: int) -> Tensor:
    """bool [B, Hq, S, Sk]: the pairs on the lists."""
    queries, begin, slots = gathered
    batch, heads, places = queries.shape
    chunks = choices.begin.shape[1]
    # [B, Hq, slots * S]: the chunk of every entry.
    place = torch.arange(places, dtype=torch.int32, device=queries.device)
    place = place.expand(batch, heads, -1).contiguous()
    # [B, Hq, chunks + 1]: chunks end where all their slots do.
    ends = begin[..., slots::slots].contiguous()
    chunk = torch.searchsorted(ends, place, right=True)

    # [B, Hq, S, chunks + 1]
    shape = (batch, heads, places // slots, chunks + 1)
    met = torch.zeros(shape, dtype=torch.bool, device=queries.device)
    met.flatten(2).scatter_(2, queries.long() * (chunks + 1) + chunk, True)
    # [B, chunks, Sk]
    key = torch.arange(k_len, device=queries.device)
    begin_of_chunk = choices.begin[..., None]
    in_chunk = (key >= begin_of_chunk) & (key < begin_of_chunk + choices.tokens)
    return (met[..., :chunks].float() @ in_chunk[:, None].float()) > 0


def _of_query_heads(k: Tensor, v: Tensor, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [B, Hq, Sk, D]."""
    group = heads // k.shape[1]
    return k.to(dtype).repeat_interleave(group, 1), v.to(dtype).repeat_interleave(group, 1)


def _scores(q: Tensor, keys: Tensor, choices: Choices, gathered: Gathered, scale: float) -> Tensor:
    """Scores [B, Hq, S, Sk], -inf for the pairs that are not on the lists."""
    seen = seen_keys(choices, gathered, keys.shape[2])
    scores = q.to(keys.dtype) @ keys.mT * scale
    return scores.masked_fill(~seen, -torch.inf)


def _probability(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), 0 in rows that see nothing, where lse is -inf and would give NaN."""
    lowest = torch.finfo(scores.dtype).min
    return (scores - lse.clamp(min=lowest)[..., None]).exp()
