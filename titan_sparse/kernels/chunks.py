"""Keys seen by choice of each single query: chunks of its document, one bit a query and chunk (MoBA).

A tile of keys that is no longer than a chunk touches two chunks of a document at most. So the choice only narrows the
range start <= p < stop that the mask gives a query, tile by tile; in a tile nothing but that range is compared.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class ChosenChunks(NamedTuple):
    """Of the keys that start and stop let a query see, it sees those in the chunks that it chose.

    words: int32 [B, Hq, Sq, W], contiguous; bit c (bits.py) stands for the keys from origin + c * tokens on, `tokens` of
    them. origin: int32 [B, Sq], where the query's document begins. tokens: of a chunk, no fewer than of a block.
    """

    words: Tensor
    origin: Tensor
    tokens: int


def chosen_keys(chosen: ChosenChunks, position: Tensor) -> Tensor:
    """bool [B, Hq, Sq, n]: whether each query chose the chunk of each key, whose positions are [B or 1, Hq or 1, n]."""
    chunk = (position[:, :, None] - chosen.origin[:, None, :, None]).clamp(min=0) // chosen.tokens
    return chosen_bits(chosen.words, chunk)


def chosen_bits(words: Tensor, chunk: Tensor) -> Tensor:
    """bool, of each row of words [B, H, n, W] the bits with the numbers `chunk` [B, H or 1, n, m]; False beyond them."""
    batch, heads, _, width = words.shape
    place = (chunk >> 5).clamp(max=width - 1).long()
    word = words.gather(3, place.expand(batch, heads, -1, -1))
    return ((word >> (chunk & 31).int()) & 1).bool() & (chunk < 32 * width)


@triton.jit
def _bit(words, number, width):
    word = tl.load(words + (number >> 5), mask=number < width * 32, other=0)
    return ((word >> (number & 31)) & 1) != 0


@triton.jit
def chosen_range(start, stop, words, origin, tokens, width, position):
    """start and stop of each query ([M], like the pointers `words` to the queries' bits and `origin`) for a tile of keys
    whose first has that position, narrowed to the chunks that the query chose."""
    chunk = tl.maximum(position - origin, 0) // tokens
    boundary = origin + (chunk + 1) * tokens
    here, beyond = _bit(words, chunk, width), _bit(words, chunk + 1, width)
    return tl.where(here, start, tl.maximum(start, boundary)), tl.where(
        beyond, stop, tl.minimum(stop, boundary)
    )
