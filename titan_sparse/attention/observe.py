"""Measurements of sparse attention per layer and head, while training: density, recall, budgets
at their cap.

With several context-parallel ranks also how work and time spread over ranks, and what was sent.
Layers are distinguished by the order of their calls, so that one compiled block serves all layers.
What activation checkpointing repeats is not counted again.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention import recorder
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.masks.ranges import MaskRanges, once_per_mask, token_positions
from titan_sparse.attention.masks.visibility import (
    pairs_by_block,
    queries_seeing,
    seen_pairs,
    visible_pairs,
)
from titan_sparse.attention.patterns.base import BlockIndex
from titan_sparse.kernels.dtypes import accumulation_dtype

# How much is looked at together, which bounds the memory.
_Q_BLOCKS_AT_ONCE = 256
_KEYS_AT_ONCE = 8192
_ELEMENTS = 1 << 23


class ByRank(NamedTuple):
    """Measurements of each attention call's forward, float64 [calls, ranks] on the CPU."""

    work: Tensor  # visited pairs of tokens of all sequences and heads
    compute: Tensor  # ms of computing
    elapsed: Tensor  # ms that the call took


@dataclass
class Recording:
    """One tensor [Hq] a layer, averaged over sequences, the same on all context-parallel ranks.

    recall_rows: sampled query rows a sequence for recall; 0 for none. thumbnail_cells: cells a side
    of thumbnails; 0 for none.
    visited: pairs of tokens computed per sequence. visible: pairs that the layer's mask allows (a
    number).
    recall: share of the full softmax mass that the selection kept, over sampled rows. The
    softmax is the one over keys: what a learned sink takes is in neither, so dense attention has
    a recall of 1.
    capped: share of budgets that their cap kept below the recall target; empty for patterns without
    budgets.
    blocks_per_query: keys in selected blocks that a query sees on average, in blocks, without
    verticals.
    verticals: of a head; empty for patterns without verticals.
    thumbnails: of the first sequence's selection, [Hq, P, P].

    Of this rank alone, and only with several context-parallel ranks:
    calls, work: times and visited pairs of each call's forward, which by_rank() reads. An attention
    whose first share is recomputed has two calls.
    bytes_sent, plain_ring_bytes: keys, values and gradients, forward and backward, from the first
    call until the recording ended; and what a ring would have sent in which each chunk visits every
    rank. bytes_of_verticals, bytes_of_selection: sent in addition, for the gathered verticals and
    their gradients, and to choose.
    """

    recall_rows: int = 0
    thumbnail_cells: int = 0
    visited: list[Tensor] = field(default_factory=list)
    visible: list[Tensor] = field(default_factory=list)
    recall: list[Tensor] = field(default_factory=list)
    capped: list[Tensor] = field(default_factory=list)
    blocks_per_query: list[Tensor] = field(default_factory=list)
    verticals: list[Tensor] = field(default_factory=list)
    thumbnails: list[Tensor] = field(default_factory=list)
    calls: list[recorder.TimedCall] = field(default_factory=list)
    work: list[Tensor] = field(default_factory=list)
    bytes_sent: int = 0
    plain_ring_bytes: int = 0
    bytes_of_verticals: int = 0
    bytes_of_selection: int = 0
    outer: "Recording | None" = field(default=None, repr=False)
    """The recording that this one is inside of."""
    sent_before: list[int] = field(default_factory=list, repr=False)
    """What _sent() said before the first call, plus what inner recordings have counted since."""
    trades: list[tuple[recorder.Moment, recorder.Moment]] = field(default_factory=list, repr=False)
    """Times of trades whose call is still to come."""
    timed: recorder.TimedCall | None = field(default=None, repr=False)
    """The call of several ranks whose forward runs now."""
    visited_by_call: list[Tensor] = field(default_factory=list, repr=False)
    """[2, Hq]: visited pairs, and those of them in blocks, of each call that the current attention
    has made so far."""

    def density(self) -> Tensor:
        """visited / visible, [layers, Hq]. Raises ValueError if nothing was recorded, and for
        layers with different numbers of heads."""
        if not self.visited:
            raise ValueError(
                "density() has no layers: attend() was not called inside of recording(), or without "
                'tokens; in a model of transformers write attn_implementation="titan_sparse"'
            )
        heads = sorted({len(visited) for visited in self.visited})
        if len(heads) > 1:
            raise ValueError(
                f"density() is one tensor of all layers, and they have {heads} heads; write [visited / "
                "visible for visited, visible in zip(seen.visited, seen.visible)]"
            )
        visited = torch.stack(self.visited)
        return visited / torch.stack(self.visible).unsqueeze(1)

    def by_rank(self) -> ByRank:
        """The measurements of all ranks. Collective over the context-parallel group; waits for the
        GPU.

        Raises ValueError if nothing was recorded with several ranks, or with different
        ContextParallels.
        """
        keys = {call.cp.key for call in self.calls}
        if len(keys) != 1:
            raise ValueError(
                "by_rank() needs attention calls of one ContextParallel of several ranks; "
                "record them alone"
            )
        cp = self.calls[0].cp
        # [calls]
        work = torch.stack(self.work)
        compute, elapsed = zip(*(call.milliseconds() for call in self.calls))
        measured = torch.stack([work, work.new_tensor(compute), work.new_tensor(elapsed)])
        # [ranks, 3, calls] -> [3, calls, ranks]
        of_ranks = cp.all_gather(measured).movedim(0, 2).cpu()
        return ByRank(*of_ranks)

    # What the ops report (recorder.py)

    def selection(self, bytes_sent: int) -> None:
        """After a selection, for which this rank sent so much."""
        self.bytes_of_selection += bytes_sent

    @contextlib.contextmanager
    def trading(self, cp: ContextParallel, device: torch.device, before: bool) -> Iterator[None]:
        """Around a trade, as recorder.trading()."""
        self.sent_before = self.sent_before or _sent(cp)
        began = recorder.mark(device)
        yield
        trades = self.trades if before else self.calls[-1].trades
        trades.append((began, recorder.mark(device)))

    def begin(self, call: AttentionCall) -> None:
        """Before a forward."""
        cp = call.cp.whole
        if cp.size > 1:
            self.sent_before = self.sent_before or _sent(cp)
            self.timed = recorder.TimedCall(cp, call.mask.start.device)
            self.timed.trades, self.trades = self.trades, []

    def forward(self, call: AttentionCall) -> None:
        """After a forward of the whole sequence or of a share of it."""
        if self.timed is not None:
            self.timed.ended = recorder.mark(self.timed.device)
            self.calls.append(self.timed)
            self.timed = None
        # [B, Hq]
        in_blocks, in_verticals = visited_pairs(call)
        # [2, B, Hq], then averaged over sequences
        visited = torch.stack([in_blocks + in_verticals, in_blocks])
        if call.cp.whole.size > 1:
            self.work.append(visited[0].sum())
        visited = call.cp.all_reduce(visited)
        self.visited_by_call.append(call.cp.of_all_heads(visited.mean(1), 1))

    def layer(self, call: AttentionCall, q: Tensor, k: Tensor, lse: Tensor) -> None:
        """Once for each attention, after its forwards, with padded inputs and the lse
        [B, Hq, S_local] of all rows, without learned sinks."""
        # [Hq] each, summed over the calls that the attention has made
        visited, in_blocks = torch.stack(self.visited_by_call).sum(0)
        self.visited_by_call.clear()
        self.visited.append(visited)
        index = call.index
        of_all_heads = call.cp.of_all_heads
        # Queries that see anything; padding does not.
        queries = (call.mask.start < call.mask.stop).sum(-1).double().mean()
        self.blocks_per_query.append(in_blocks / queries / index.block_size)
        self.visible.append(visible_pairs(call.mask).mean())
        if index.capped is not None:
            # [B, Hq]; a position of seq_len means that there is no such vertical.
            verticals = (index.verticals < call.seq_len).sum(-1)
            self.verticals.append(of_all_heads(verticals.double().mean(0), 0))
            # [B, Hq, 2]
            self.capped.append(of_all_heads(index.capped.double().mean(dim=(0, 2)), 0))
        if self.thumbnail_cells:
            cells = thumbnail(index, call.mask, self.thumbnail_cells)
            self.thumbnails.append(of_all_heads(cells, 0))
        if self.recall_rows:
            self.recall.append(of_all_heads(recall(call, q, k, lse, self.recall_rows), 0))


@contextlib.contextmanager
def recording(recall_rows: int = 0, thumbnail_cells: int = 0) -> Iterator[Recording]:
    """Record every attention inside. What is inside of an inner recording() counts there alone: its
    calls, and what is sent from its first call to its end.

    recall_rows: with more than 0, measure recall on so many sampled query rows a sequence.
    thumbnail_cells: with more than 0, draw pictures of so many cells a side.

    Collective: all context-parallel ranks record at the same time, with the same arguments. Raises
    ValueError for an argument that is not a whole number of 0 or more.
    """
    for name, value in (("recall_rows", recall_rows), ("thumbnail_cells", thumbnail_cells)):
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < 0:
            raise ValueError(
                f"{name}={value!r} is not a whole number of 0 or more; write 0 for none"
            )
    seen = Recording(recall_rows, thumbnail_cells, outer=recorder.listeners.recording)
    try:
        with recorder.observed_by(seen):
            yield seen
    finally:
        if seen.calls:
            cp = seen.calls[0].cp
            now = _sent(cp)
            sent = [after - earlier for after, earlier in zip(now, seen.sent_before, strict=True)]
            seen.bytes_sent, seen.plain_ring_bytes, seen.bytes_of_verticals = sent
            _leave_out(seen.outer, cp, sent)


def _leave_out(recording: Recording | None, cp: ContextParallel, sent: list[int]) -> None:
    """Do not count again in the recordings outside what an inner one has counted."""
    while recording is not None:
        # Others have not begun to count, or they count another group's traffic.
        if recording.calls and recording.calls[0].cp is cp:
            pairs = zip(recording.sent_before, sent, strict=True)
            recording.sent_before = [before + more for before, more in pairs]
        recording = recording.outer


def _sent(cp: ContextParallel) -> list[int]:
    return [cp.bytes_sent, cp.plain_ring_bytes, cp.sent["verticals"]]


def visited_pairs(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Pairs of tokens computed for this rank's queries, float64 [B, Hq]: those in selected blocks,
    and those of verticals outside them."""
    index = call.index
    ranges = call.mask
    size = index.block_size
    query_blocks = call.query_blocks()
    keys = index.all_blocks()
    pairs = index.pairs(ranges, query_blocks, [keys])
    if pairs is not None:
        return pairs[..., 0], torch.zeros_like(pairs[..., 0])
    # [Bm, nq, blocks]: what the mask allows
    key = ("pairs by block", call.cp.key, call.first, call.last)
    allowed = once_per_mask(ranges, key, lambda: pairs_by_block(ranges, query_blocks, size))
    # [B, Hq]
    in_blocks = torch.zeros(index.batch, index.heads, dtype=torch.float64, device=allowed.device)
    shares = (query_blocks.split(_Q_BLOCKS_AT_ONCE), allowed.split(_Q_BLOCKS_AT_ONCE, dim=1))
    for q_blocks, allowed_pairs in zip(*shares, strict=True):
        # [B, Hq, nq, blocks]
        selected = index.selects(q_blocks, keys)
        in_blocks += torch.where(selected, allowed_pairs[:, None], 0).sum(dim=(-2, -1))
    return in_blocks, vertical_pairs(index, ranges, query_blocks).double()


def vertical_pairs(index: BlockIndex, ranges: MaskRanges, q_blocks: Tensor) -> Tensor:
    """Pairs of these blocks' queries with verticals, outside the tiles that they compute.

    q_blocks: int64 [nq], global. Returns int64 [B, Hq].
    """
    verticals = index.verticals
    counted = torch.zeros(verticals.shape[:2], dtype=torch.int64, device=verticals.device)
    if verticals.numel() and not verticals.is_cuda:  # for which the host would wait
        # Lists are filled up with the sequence length.
        verticals = verticals[..., : int((verticals < index.seq_len).sum(-1).max())]
    if verticals.numel() == 0:
        return counted
    first_query, behind_query = queries_seeing(ranges, verticals)
    for now in q_blocks.split(max(1, _ELEMENTS // verticals.numel())):
        # [n, 1], then [B, Hq, n, C]: the block's queries that see each vertical
        begin = now.int()[:, None] * index.block_size
        first_seeing = torch.maximum(first_query[:, :, None], begin)
        behind_seeing = torch.minimum(behind_query[:, :, None], begin + index.block_size)
        seeing = (behind_seeing - first_seeing).clamp(min=0)
        counted += (seeing * ~index.covers(now, verticals)).sum((2, 3))
    return counted


def recall(call: AttentionCall, q: Tensor, k: Tensor, lse: Tensor, samples: int) -> Tensor:
    """Mean of exp(lse - lse of all allowed keys) over `samples` evenly spread query rows.

    A learned sink takes the same factor from every key of a row. What the kept keys hold of all
    keys is therefore the same with and without it, and every row counts alike.

    q: [B, Hq, S_local, D]. k: [B, Hkv, S_local, D]. lse: [B, Hq, S_local], of the keys alone.
    Returns fp32 or fp64 [Hq].
    """
    cp = call.cp
    ranges = call.mask
    if ranges.slices is not None and call.index.selects_all:
        return torch.ones(q.shape[1], dtype=lse.dtype, device=q.device)
    # Global positions of this rank's tokens, and the local rows that it samples.
    position = token_positions(call.key_blocks(), call.index.block_size)
    local_len = q.shape[2]
    samples_of_rank = max(1, min(samples // cp.size, local_len))
    # Not in torch's default dtype, which may be one of 16 bits.
    spread = torch.linspace(0, local_len - 1, samples_of_rank, dtype=torch.float64, device=q.device)
    rows = spread.long()
    # [B, Hq, samples, D] and [B, Hq, samples], of all ranks
    queries = torch.cat(list(cp.all_gather(q[:, :, rows])), dim=2)
    sparse_lse = torch.cat(list(cp.all_gather(lse[:, :, rows])), dim=2)
    query_position = cp.all_gather(position[rows]).flatten()
    # Every rank meets all sampled queries with its own keys; the sums are then joined.
    lse_of_rank = _lse_of_keys(queries, query_position, k, position, ranges, call.scale)
    dense_lse = cp.all_gather(lse_of_rank).logsumexp(0)
    # Rows that see nothing do not count. [Bm, 1, n]
    sees_any = (ranges.start < ranges.stop)[:, None, query_position].expand_as(sparse_lse)
    kept = torch.where(sees_any, (sparse_lse - dense_lse).exp(), 0)
    return kept.sum(dim=(0, 2)) / sees_any.sum(dim=(0, 2)).clamp(min=1)


def _lse_of_keys(
    q: Tensor,
    q_positions: Tensor,
    k: Tensor,
    k_positions: Tensor,
    ranges: MaskRanges,
    scale: float,
) -> Tensor:
    """Log of the softmax sum of queries [B, Hq, n, D] over the keys [B, Hkv, S, D] that they see.

    q_positions: int64 [n]. k_positions: int64 [S].
    """
    dtype = accumulation_dtype(q.dtype)
    total = torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)
    group = q.shape[1] // k.shape[1]
    shares = (k.split(_KEYS_AT_ONCE, dim=2), k_positions.split(_KEYS_AT_ONCE))
    for keys, key_position in zip(*shares, strict=True):
        # [B, Hq, m, D]
        keys = keys.to(dtype).repeat_interleave(group, 1)
        # [B, Hq, n, m]
        scores = q.to(dtype) @ keys.mT * scale
        seen = seen_pairs(ranges, q_positions, key_position)
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        total = torch.logaddexp(total, scores.logsumexp(-1))
    return total


def thumbnail(index: BlockIndex, ranges: MaskRanges, cells: int) -> Tensor:
    """Share of the pairs the mask allows that the first sequence's index selects.

    Returns fp32 [Hq, P, P], queries down and keys to the right, with P = min(cells, blocks). A
    cell is nan where the mask allows nothing.

    Pairs in blocks are exact (for MoBA those of blocks that any query of the block chose). A
    vertical counts for as many pairs in a block of keys as a key of that block has on average.
    """
    device = index.verticals.device
    block_size = index.block_size
    blocks = index.all_blocks()
    number_of_blocks = len(blocks)
    size = min(cells, number_of_blocks)
    # [blocks, P]: 1 where the block belongs to the cell
    cell_of_block = torch.nn.functional.one_hot(blocks * size // number_of_blocks, size).float()

    first_slices = None if ranges.slices is None else ranges.slices[:1]
    first = MaskRanges(ranges.start[:1], ranges.stop[:1], slices=first_slices)
    # [blocks, blocks]; the same for all layers under one mask
    key = ("pairs of all blocks", block_size)
    all_pairs = once_per_mask(ranges, key, lambda: pairs_by_block(first, blocks, block_size)[0])

    # Verticals are ascending, so differences of their ranks at the edges count them block by block.
    # The last block may be cut off by the end of the sequence.
    edges = torch.arange(number_of_blocks + 1, device=device, dtype=torch.int32) * block_size
    # [Hq, blocks + 1]; searchsorted() wants them contiguous.
    edges = edges.clamp(max=index.seq_len).expand(index.heads, -1).contiguous()
    verticals_before = torch.searchsorted(index.verticals[0], edges)
    # [Hq, 1, blocks]: share of the block's keys that are verticals
    vertical_share = verticals_before.diff(dim=-1)[:, None].float() / block_size

    computed = torch.zeros(index.heads, size, size, dtype=torch.float32, device=device)
    allowed = torch.zeros(size, size, dtype=torch.float32, device=device)
    shares = (blocks.split(_Q_BLOCKS_AT_ONCE), cell_of_block.split(_Q_BLOCKS_AT_ONCE))
    for q_blocks, cell_of_q in zip(*shares, strict=True):
        # [nq, blocks]
        pairs = all_pairs[q_blocks].float()
        # [Hq or 1, nq, blocks]
        selected = index.selects(q_blocks, blocks)[0]
        computed_pairs = torch.where(selected, pairs, pairs * vertical_share)
        # Sums over the blocks of each cell, first of keys and then of queries.
        computed += cell_of_q.T @ (computed_pairs @ cell_of_block)
        allowed += cell_of_q.T @ (pairs @ cell_of_block)
    return computed / allowed.where(allowed > 0, torch.nan)


def worker_imbalance(work: Tensor) -> Tensor:
    """Work of the busiest rank / mean over ranks, float64 [...] (MTraining, figure 7).

    work: [..., ranks]. 1 is perfect, and the degree where there is no work at all.
    """
    work = work.double()
    mean = work.mean(-1)
    has_work = mean > 0
    # The divisor keeps a division by zero out of the branch that torch.where() drops.
    return torch.where(has_work, work.amax(-1) / mean.where(has_work, 1.0), 1.0)
