"""Tables of flags: positions of the True elements as lists of a fixed width, and flags as bits of
int32 words, an eighth of the memory of bools that kernels can prefetch."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024
"""Flags that a program looks at."""


def compact_naive(selected: Tensor, capacity: int, fill: int) -> tuple[Tensor, Tensor]:
    """The twin of compact()."""
    # [N, L]
    rank = selected.long().cumsum(-1) - 1
    slot = torch.where(selected & (rank < capacity), rank, capacity)
    # [L]
    position = torch.arange(selected.shape[1], dtype=torch.int32, device=selected.device)

    # [N, capacity + 1]: the last slot takes what is not selected, or does not fit, and is cut off.
    shape = (len(selected), capacity + 1)
    positions = torch.full(shape, fill, dtype=torch.int32, device=selected.device)
    positions.scatter_(1, slot, position.expand_as(slot))
    return positions[:, :capacity].contiguous(), selected.sum(-1, dtype=torch.int32)


@triton.jit
def _count_kernel(selected, count, length, stride, CHUNK: tl.constexpr):
    """Count the flags that are set in each chunk of each row. count: [N, chunks]."""
    # Rows first: a CUDA grid has fewer than 65,536 programs along its other axes.
    i_row = tl.program_id(0).to(tl.int64)
    i_chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    o = i_chunk * CHUNK + tl.arange(0, CHUNK)
    on = tl.load(selected + i_row * stride + o, mask=o < length, other=0)
    tl.store(count + i_row * chunks + i_chunk, tl.sum(on.to(tl.int32), 0))


@triton.jit
def _write_kernel(
    selected, count, total, positions, length, stride, capacity, fill,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The positions of a chunk's flags, behind those of the chunks before it; and their total.

    CHUNKS: a power of two, at least the number of chunks of a row. With 1, count is not read.
    """
    i_row = tl.program_id(0).to(tl.int64)
    i_chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    o = i_chunk * CHUNK + tl.arange(0, CHUNK)
    o_chunk = tl.arange(0, CHUNKS)
    # [CHUNK]
    on = tl.load(selected + i_row * stride + o, mask=o < length, other=0).to(tl.int32)
    if CHUNKS == 1:
        chunks_before = 0
        of_row = tl.sum(on, 0)
    else:
        # [CHUNKS]: every program adds up the counts of the whole row, which are few.
        b_count = tl.load(count + i_row * chunks + o_chunk, mask=o_chunk < chunks, other=0)
        chunks_before = tl.sum(tl.where(o_chunk < i_chunk, b_count, 0), 0)
        of_row = tl.sum(b_count, 0)
    rank = chunks_before + tl.cumsum(on, 0) - 1

    tl.store(total + i_row, of_row, mask=i_chunk == 0)
    positions += i_row * capacity
    tl.store(positions + rank, o, mask=(on != 0) & (rank < capacity))
    # Places behind the last flag of the row are filled by whichever program has their numbers.
    is_left_over = (o >= of_row) & (o < capacity)
    tl.store(positions + o, tl.zeros_like(o) + fill, mask=is_left_over)


def compact(selected: Tensor, capacity: int, fill: int) -> tuple[Tensor, Tensor]:
    """Positions int32 [N, capacity] of the True elements of bool [N, L], ascending; and how many
    there are, int32 [N].

    What is left of the capacity is filled up with `fill`. Positions beyond the capacity are left
    out. Rows of `selected` may be slices of longer ones. One launch, or two for long rows.
    """
    rows, length = selected.shape
    if selected.stride(1) != 1:
        # A transposed table.
        selected = selected.contiguous()
    # The programs cover both the flags and the places that are to be filled.
    chunks = triton.cdiv(max(length, capacity, 1), _CHUNK)
    count = selected.new_empty(rows, chunks, dtype=torch.int32)
    total = selected.new_empty(rows, dtype=torch.int32)
    positions = selected.new_empty(rows, capacity, dtype=torch.int32)
    flags = selected.view(torch.int8)
    stride = selected.stride(0)
    if chunks > 1:
        _count_kernel[(rows, chunks)](flags, count, length, stride, CHUNK=_CHUNK)
    options = dict(CHUNKS=triton.next_power_of_2(chunks), CHUNK=_CHUNK)
    _write_kernel[(rows, chunks)](
        flags, count, total, positions, length, stride, capacity, fill, **options
    )
    return positions, total


def pack(flags: Tensor) -> Tensor:
    """bool [..., n] -> int32 [..., ceil(n / 32)]: flag i is bit i % 32 of word i // 32."""
    missing = -flags.shape[-1] % 32
    # [..., words, 32]; int64, as bit 31 is the sign of an int32.
    bits = F.pad(flags, (0, missing)).unflatten(-1, (-1, 32)).long()
    place = torch.arange(32, device=flags.device)
    return (bits << place).sum(-1).to(torch.int32)


def unpack(words: Tensor, n: int) -> Tensor:
    """int32 [..., ceil(n / 32)] -> bool [..., n]."""
    place = torch.arange(32, device=words.device, dtype=torch.int32)
    # [..., words, 32]
    bits = (words[..., None] >> place) & 1
    return bits.bool().flatten(-2)[..., :n]
