"""Keys that single queries choose: chunks of the query's document, one bit a query and chunk (MoBA).

A tile of keys that is no longer than a chunk touches at most two chunks of a document. So in each
tile the choice only narrows the range start <= p < stop that the mask gives a query, and kernels
compare nothing but that range.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class ChosenChunks(NamedTuple):
    """Chunks that a query chose: of the keys that start and stop let it see, it sees those in them.

    words: int32 [B, Hq, Sq, W], contiguous; bit c (compact.py) stands for the `tokens` keys from
        origin + c * tokens on.
    origin: int32 [B, Sq], where the query's document begins.
    tokens: of a chunk, no fewer than of a block.
    """

    words: Tensor
    origin: Tensor
    tokens: int


def chosen_keys(chosen: ChosenChunks, position: Tensor) -> Tensor:
    """bool [B, Hq, Sq, n]: whether each query chose the chunk of each key.

    position: of the keys, [B or 1, Hq or 1, n].
    """
    # [B, 1, Sq, 1]
    origin = chosen.origin[:, None, :, None]
    # [B, Hq or 1, Sq, n]: keys before the document count as its first chunk; the mask hides them.
    chunk = (position[:, :, None] - origin).clamp(min=0) // chosen.tokens
    return chosen_bits(chosen.words, chunk)


def chosen_bits(words: Tensor, chunk: Tensor) -> Tensor:
    """bool: of each row of words [B, H, n, W] the bits with the numbers `chunk`, False beyond them.

    chunk: [B, H or 1, n, m]. Returns [B, H, n, m].
    """
    batch, heads, _, width = words.shape
    # [B, H, n, m]
    place = (chunk >> 5).clamp(max=width - 1).long()
    word = words.gather(3, place.expand(batch, heads, -1, -1))
    bit = (word >> (chunk & 31).int()) & 1
    return bit.bool() & (chunk < 32 * width)


@triton.jit
def _bit(words, number, width):
    """True if bit `number` of `width` words is set; False beyond them."""
    word = tl.load(words + (number >> 5), mask=number < width * 32, other=0)
    return ((word >> (number & 31)) & 1) != 0


@triton.jit
def chosen_range(start, stop, words, origin, tokens, width, position):
    """start and stop of each query, [M], for a tile of keys, narrowed to the chunks that it chose.

    words: [M], pointers to the queries' words. origin: [M], where their documents begin. position:
    of the tile's first key. The tile lies in that key's chunk and the one behind it.
    """
    chunk = tl.maximum(position - origin, 0) // tokens
    boundary = origin + (chunk + 1) * tokens
    here = _bit(words, chunk, width)
    beyond = _bit(words, chunk + 1, width)
    # Without the first chunk the range begins at the boundary, without the second it ends there.
    narrowed_start = tl.where(here, start, tl.maximum(start, boundary))
    narrowed_stop = tl.where(beyond, stop, tl.minimum(stop, boundary))
    return narrowed_start, narrowed_stop
