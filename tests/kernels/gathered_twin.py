"""The twins of the lists of kernels.gathered in plain torch, for small sizes."""

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
