"""What sparse attention kept: density, recall and budgets at their cap, per layer and head, measured while training.

With several context-parallel ranks also how the work and its time spread over ranks and steps, and what was sent. The
ops call observe_call() and observe_layer(), which cost nothing unless a recording is on. Layers are told apart by the order
of their calls, so that one compiled block serves all layers. What activation checkpointing repeats is not counted again.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention import timing
from titan_sparse.attention.blocks import token_positions
from titan_sparse.attention.masks.memo import once_per_mask
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.masks.slices import area, seen_by
from titan_sparse.attention.observe import visits as balance
from titan_sparse.attention.observe.thumbnails import pairs_by_block, thumbnail
from titan_sparse.attention.patterns.moba import MoBAIndex
from titan_sparse.attention.schedules import group_cast
from titan_sparse.attention.schedules.needs import needed_chunks
from titan_sparse.attention.schedules.transport import route
from titan_sparse.attention.tiles.blocks import all_blocks, covered_verticals

if TYPE_CHECKING:
    from titan_sparse.attention.call import Run

_Q_BLOCKS, _KEYS = 256, 8192
"""Query blocks of the index, and keys, that are looked at together: bounds the memory."""


class ByRank(NamedTuple):
    """Of each attention call's forward, float64 [calls, ranks, steps] on the CPU; a step of all_gather is a KV head, of
    group_cast the own blocks or a stage of others.

    work: visited pairs of tokens, summed over sequences and heads. compute: ms of computing. elapsed: ms since the step
    before was done, which together make the call.
    """

    work: Tensor
    compute: Tensor
    elapsed: Tensor


@dataclass
class Recording:
    """One tensor [Hq] a layer, averaged over sequences, the same on all context-parallel ranks.

    visited: pairs of tokens computed per sequence. visible: pairs the mask allows (one number).
    recall: share of the full softmax mass that the selection kept, over sampled rows; empty unless asked for.
    capped: share of budgets that their cap kept below the recall target; empty for patterns without budgets.
    blocks_per_query: keys in selected blocks that a query sees, on average, columns not counted; in blocks.
    columns, columns_at_cap: columns of a head, and share of heads whose cap kept columns from the target; empty for patterns
    without columns.
    thumbnails: of the first sequence's selection, [Hq, P, P] (thumbnails.py); empty unless asked for.
    Of this rank alone, and only with several context-parallel ranks:
    calls, work: times and visited pairs of each attention call's forward, as by_rank() reads them; an attention whose first
    part is recomputed has two calls.
    bytes_sent, plain_ring_bytes: from the first call until the recording ended, forward and backward, keys, values and
    gradients; what a ring would have sent in which each chunk visits every rank.
    bytes_of_columns, bytes_of_selection: sent besides, of the gathered columns and their gradients, and to choose.
    """

    recall_rows: int = 0
    thumbnail_cells: int = 0
    visited: list[Tensor] = field(default_factory=list)
    visible: Tensor | None = None
    recall: list[Tensor] = field(default_factory=list)
    capped: list[Tensor] = field(default_factory=list)
    blocks_per_query: list[Tensor] = field(default_factory=list)
    columns: list[Tensor] = field(default_factory=list)
    columns_at_cap: list[Tensor] = field(default_factory=list)
    thumbnails: list[Tensor] = field(default_factory=list)
    calls: list[timing.Call] = field(default_factory=list)
    work: list[Tensor] = field(default_factory=list)
    bytes_sent: int = 0
    plain_ring_bytes: int = 0
    bytes_of_columns: int = 0
    bytes_of_selection: int = 0
    parts: list[Tensor] = field(default_factory=list, repr=False)
    """[2, Hq], visited and those of them in blocks, of the calls that the attention in hand has made so far."""

    def density(self) -> Tensor:
        """visited / visible, [layers, Hq]."""
        return torch.stack(self.visited) / self.visible

    def by_rank(self) -> ByRank:
        """What all ranks measured. Collective over the context-parallel group; waits for the GPU.

        Raises ValueError if nothing was recorded with several ranks, or with different ContextParallels.
        """
        if len({call.cp.key for call in self.calls}) != 1:
            raise ValueError(
                "by_rank() needs attention calls of one ContextParallel of several ranks; record them alone"
            )
        cp, work = self.calls[0].cp, torch.stack(self.work)
        times = torch.stack([call.milliseconds() for call in self.calls]).to(work.device)
        work, times = (cp.all_gather(x).transpose(0, 1).cpu() for x in (work, times))
        return ByRank(work, *times.unbind(2))


_active: Recording | None = None


@contextlib.contextmanager
def recording(recall_rows: int = 0, thumbnail_cells: int = 0) -> Iterator[Recording]:
    """Record every attention inside; with `recall_rows` > 0 sampled query rows a sequence, recall too; with thumbnail_cells
    > 0 pictures of so many cells a side, which may be asked for on some ranks only.

    Collective: all context-parallel ranks record at the same time.
    """
    global _active
    with timing.timed_calls() as calls:
        _active = seen = Recording(recall_rows, thumbnail_cells, calls=calls)
        try:
            yield seen
        finally:
            _active = None
            if calls:
                sent = (
                    a - b for a, b in zip(timing.bytes_so_far(calls[0].cp), calls[0].bytes_before)
                )
                seen.bytes_sent, seen.plain_ring_bytes, seen.bytes_of_columns = sent


def is_recording() -> bool:
    """Whether what runs now is to be observed."""
    return _active is not None and not timing.recomputing()


def observe_selection(sent: int) -> None:
    """Called by the op that selects, with the bytes that this rank sent for it."""
    if is_recording():
        _active.bytes_of_selection += sent


def observe_call(run: "Run", q: Tensor, k: Tensor) -> None:
    """Called by the forward op with its padded inputs, of the whole sequence or of a part."""
    if not is_recording():
        return
    casts = run.cp.schedule == "group_cast" and run.cp.size > 1
    parts = [run.blocks(), *group_cast.stages(run)] if casts else None
    pairs, vertical_pairs = visited_pairs(run, len(q), parts)
    if run.cp.size > 1:
        _active.work.append(_own_work(run, pairs, vertical_pairs, k.shape[1], parts))
    in_blocks = pairs.sum(-1)
    _active.parts.append(
        run.cp.all_reduce(torch.stack([in_blocks + vertical_pairs.sum(-1), in_blocks])).mean(1)
    )


def observe_layer(run: "Run", q: Tensor, k: Tensor, lse: Tensor) -> None:
    """Called once for each attention, after its call or calls, with padded inputs and lse [B, Hq, S_local] of all rows."""
    if not is_recording():
        return
    visited, in_blocks = torch.stack(_active.parts).sum(0)
    _active.parts.clear()
    _active.visited.append(visited)
    queries = (run.rows.start < run.rows.stop).sum(-1).double().mean()
    _active.blocks_per_query.append(in_blocks / queries / run.index.block_size)
    _active.visible = visible_pairs(run.rows).mean()
    if hasattr(run.index, "capped"):
        _active.capped.append(run.index.capped.double().mean(dim=(0, 2)))
        _active.columns.append((run.index.verticals < run.seq_len).sum(-1).double().mean(0))
        _active.columns_at_cap.append(run.index.capped[..., 0].double().mean(0))
    if _active.thumbnail_cells:
        _active.thumbnails.append(thumbnail(run.index, run.rows, _active.thumbnail_cells))
    if _active.recall_rows:
        _active.recall.append(recall(run, q, k, lse, _active.recall_rows))


def visible_pairs(rows: MaskRanges) -> Tensor:
    """Pairs that the mask allows, float64 [Bm]."""
    if rows.slices is not None:
        return area(rows.slices).sum(-1).double()
    return (rows.stop - rows.start).sum(-1, dtype=torch.float64)


def _own_work(
    run: "Run", pairs: Tensor, vertical_pairs: Tensor, kv_heads: int, parts: list[Tensor] | None
) -> Tensor:
    """This rank's visited pairs by step, float64 [steps]. parts: the blocks of each step, where those are not chunks."""
    if run.cp.schedule == "all_gather":
        return (pairs.sum(-1) + vertical_pairs.sum(-1)).unflatten(1, (kv_heads, -1)).sum((0, 2))
    work = pairs.sum((0, 1))
    if parts:
        computes = [len(blocks) > 0 for blocks in parts]
    else:
        computes, work = (
            sum(route(run.cp, needed_chunks(run)).compute, []),
            work[sum(run.cp.windows, [])],
        )
    balance.add_verticals(work, vertical_pairs.sum((0, 1)), computes)
    return work


def visited_pairs(
    run: "Run", batch: int, parts: list[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Pairs computed for this rank's queries: in each of `parts`, global blocks int64 [n], or by default in the blocks of
    each source rank, float64 [B, Hq, parts], and of columns outside them, by block of columns [B, Hq, C]."""
    index, blocks, key = (
        run.index,
        run.query_blocks(),
        ("pairs by block", run.cp.key, run.first, run.last),
    )
    parts = parts or list(run.cp.table(run.rows))
    if isinstance(index, MoBAIndex):
        found = index.pairs(run.rows, blocks, parts)
        return found, torch.zeros_like(found[..., :0])
    pairs = once_per_mask(run.rows, key, lambda: pairs_by_block(run.rows, blocks, index.block_size))
    first, last = _rows_seeing(run.rows, index.verticals)
    keys = all_blocks(index)
    by_key = torch.zeros(
        batch, index.heads, len(keys), dtype=torch.float64, device=index.verticals.device
    )
    vertical_pairs = by_key.new_zeros(index.verticals.shape)
    for q_blocks, seen in zip(blocks.split(_Q_BLOCKS), pairs.split(_Q_BLOCKS, dim=1)):
        selected = index.selects(q_blocks, keys)
        by_key += torch.where(selected, seen[:, None], 0).sum(dim=-2)
        begin = (q_blocks * index.block_size)[:, None]
        rows = torch.minimum(last[:, :, None], begin + index.block_size) - torch.maximum(
            first[:, :, None], begin
        )
        vertical_pairs += (
            rows.clamp(min=0).where(~covered_verticals(index, selected), 0).sum(dim=-2)
        )
    by_block = vertical_pairs.unflatten(
        -1, (index.verticals.shape[-1] // index.block_size, index.block_size)
    ).sum(-1)
    return torch.stack([by_key[..., part].sum(-1) for part in parts], dim=-1), by_block


def _rows_seeing(rows: MaskRanges, columns: Tensor) -> tuple[Tensor, Tensor]:
    """First and last + 1 query that sees each column, int64 like columns [B, H, C]; both vectors of rows are sorted."""
    flat = columns.flatten(1).contiguous()
    first, last = (
        torch.searchsorted(x.expand(len(flat), -1).contiguous(), flat, right=True)
        for x in (rows.stop, rows.start)
    )
    return first.view(columns.shape), last.view(columns.shape)


def recall(run: "Run", q: Tensor, k: Tensor, lse: Tensor, samples: int) -> Tensor:
    """Mean of exp(lse - lse of all allowed keys) over `samples` evenly spread query rows, fp32 or fp64 [Hq]."""
    position = token_positions(run.blocks(), run.index.block_size)
    picked = torch.linspace(
        0, q.shape[2] - 1, max(1, min(samples // run.cp.size, q.shape[2])), device=q.device
    ).long()
    queries = _joined(run, q[:, :, picked])
    sparse = _joined(run, lse[:, :, picked, None])[..., 0]
    where = run.cp.all_gather(position[picked]).flatten()
    start, stop = run.rows.start[:, where], run.rows.stop[:, where]
    sees = lambda keys: (keys >= start[..., None]) & (keys < stop[..., None])
    own = _lse_of_keys(
        queries,
        k,
        position,
        sees if run.rows.slices is None else seen_by(run.rows, where),
        run.scale,
    )
    dense = run.cp.all_gather(own).logsumexp(0)
    seen = (start < stop)[:, None].expand_as(sparse)
    kept = torch.where(seen, (sparse - dense).exp(), 0)
    return kept.sum(dim=(0, 2)) / seen.sum(dim=(0, 2)).clamp(min=1)


def _joined(run: "Run", x: Tensor) -> Tensor:
    """All ranks' x [B, H, n, D] one after the other along n."""
    return torch.cat(list(run.cp.all_gather(x)), dim=2)


def _lse_of_keys(
    q: Tensor, k: Tensor, position: Tensor, sees: Callable[[Tensor], Tensor], scale: float
) -> Tensor:
    """Log of the softmax sum of each query [B, Hq, n, D] over the keys [B, Hkv, S, D] it sees: sees(positions [m]) gives
    bool [Bm, n, m]."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    total = torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)
    group = q.shape[1] // k.shape[1]
    for keys, at in zip(k.split(_KEYS, dim=2), position.split(_KEYS)):
        scores = q.to(dtype) @ keys.to(dtype).repeat_interleave(group, 1).mT * scale
        total = torch.logaddexp(
            total, scores.masked_fill(~sees(at)[:, None], -torch.inf).logsumexp(-1)
        )
    return total
