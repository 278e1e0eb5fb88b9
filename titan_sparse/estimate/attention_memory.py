"""Memory that attention takes in addition to its inputs and results.

What depends on the schedule is a small table, keyed by what moves between ranks.
"""

import math

from titan_sparse.attention.context_parallel.schedule import Moves, head_groups
from titan_sparse.estimate.step import Step

GATHERED_BYTES = 1 << 28
"""Lists of gathered queries that are made at a time, and their fp32 sums: as many again."""


def _query_elements(step: Step) -> int:
    """Elements of q of this rank."""
    model = step.model
    query_width = model.heads * model.head_dim
    return step.tokens * query_width


def _kv_elements(step: Step) -> int:
    """Elements of K of this rank, which are as many as those of V."""
    model = step.model
    kv_width = model.kv_heads * model.head_dim
    return step.tokens * kv_width


def attention_workspace(step: Step) -> float:
    """What attention's backward takes in addition to its inputs and results.

    See docs/benchmarks.md, "Attention on one GPU".
    """
    model = step.model
    query = _query_elements(step)
    kv = _kv_elements(step)
    if step.backend == "eager":
        # Scores of a query block against all keys, a few of them.
        queries_of_block = step.sequences * model.heads * step.block_size
        return 3 * step.wide * queries_of_block * step.seq_len
    # Block lists: full and partial, by query and by key. Without verticals all heads share them.
    heads_with_lists = model.heads if step.verticals else 1
    blocks = -(-step.tokens // step.block_size)
    lists = 16 * blocks * step.most_blocks * heads_with_lists
    # Measured: 17 % of q, k, v and out, or the lists where they are larger.
    share_of_tensors = 0.17 * 2 * (query + kv) * step.width
    size = max(share_of_tensors, lists)
    if step.backend == "flex":
        # FlashAttention-4 sums dq in fp32, and with grouped queries dk and dv too.
        grouped_sums = 2 * kv if model.heads > model.kv_heads else 0
        size += step.wide * (query + grouped_sums)
    if step.backend == "cudnn":
        # cuDNN sums dq in fp32, and with grouped queries has dk and dv of every query head, rounded.
        by_query_head = 2 * query if model.heads > model.kv_heads else 0
        heads_at_once = model.kv_heads if step.schedule.moves is not Moves.HEADS else 1
        share_of_heads = heads_at_once / model.kv_heads
        size += share_of_heads * (step.wide * query + step.width * by_query_head)
    if step.gathers_queries:
        # dK and dV are summed up in fp32, too.
        size += 2 * GATHERED_BYTES + 2 * step.wide * kv
    return size + _WORKSPACE[step.schedule.moves](step)


def _no_bytes(step: Step) -> float:
    """Where nothing moves nothing is held."""
    return 0


def _workspace_of_heads(step: Step) -> float:
    """dK and dV of the whole sequence, of two heads: one computed on, one on its way home."""
    kv_heads = step.model.kv_heads
    heads_at_once = min(2, kv_heads)
    # As many for dK as for dV, of all heads and ranks.
    sequence_elements = _kv_elements(step) * step.cp
    gradient_bytes = 2 * step.wide * sequence_elements
    return gradient_bytes * heads_at_once / kv_heads


def _workspace_of_chunks(step: Step) -> float:
    """Sums over chunks: dq, dK and dV; and the chunks that are sent."""
    if step.cp == 1:
        return 0
    query = _query_elements(step)
    kv = _kv_elements(step)
    if step.circulates_queries:
        # dK and dV; dq of a chunk, and as it is sent. q and d_out side by side, and a chunk's out.
        return step.wide * (2 * kv + 2 * query) + step.width * 3 * query
    return step.wide * (query + 4 * kv)


def _workspace_of_blocks(step: Step) -> float:
    """Sums of dq, dK and dV; and a stage's blocks as sent and as received, with their gradients."""
    if step.cp == 1:
        return 0
    blocks = -(-step.tokens // step.block_size)
    # A stage's blocks, as a multiple of this rank's own.
    stage_share = (step.cp - 1) / step.overlap_stages[1]
    received_share = stage_share
    if step.backend == "flex":
        # flex is compiled for numbers of blocks that are powers of two.
        received_share = _power_of_two(stage_share * blocks) / blocks
    sums = step.wide * (step.inter + 1)
    in_transit = (stage_share + received_share) * (step.width + step.wide)
    query_bytes = step.wide * _query_elements(step)
    kv_bytes = 2 * _kv_elements(step) * (sums + in_transit)
    return query_bytes + kv_bytes


_WORKSPACE = {
    Moves.NOTHING: _no_bytes,
    Moves.HEADS: _workspace_of_heads,
    Moves.CHUNKS: _workspace_of_chunks,
    Moves.BLOCKS: _workspace_of_blocks,
}
"""What a schedule adds to the workspace of attention's backward, bytes."""


def cp_buffers(step: Step) -> float:
    """Bytes of the buffers of received chunks, which are kept from call to call.

    See docs/context_parallel.md, "Buffers".
    """
    if step.cp == 1:
        return 0
    return _BUFFERS[step.schedule.moves](step)


def _head_elements(step: Step) -> int:
    """Elements of K and V of one KV head, of the whole sequence."""
    tokens = step.sequences * step.seq_len
    # The 2 is for K and V.
    return 2 * tokens * step.model.head_dim


def _chunk_elements(step: Step) -> float:
    """Elements of K and V of one rank, all KV heads."""
    kv_heads = step.model.kv_heads
    sequence_elements = _head_elements(step) * kv_heads
    return sequence_elements / step.cp


def _buffers_of_heads(step: Step) -> float:
    """Two heads of the whole sequence: one is computed on while the next one arrives."""
    head_bytes = _head_elements(step) * step.width
    return 2 * head_bytes


def _buffers_of_chunks(step: Step) -> float:
    """Two in turn for each kind of hop, but one where there is only one hop.

    Besides, the chunk that a backward holds back for the end.
    """
    intra = step.cp // step.inter
    outer_ranks, inner_ranks = step.schedule.rings(step.inter, intra)
    inner = min(2, inner_ranks - 1)
    outer = min(2, outer_ranks - 1)
    held_back = (inner > 0) * step.width
    forward_chunk = _chunk_elements(step) * step.width
    if step.circulates_queries:
        # All queries take the place of one group of KV heads; the other groups keep theirs.
        groups = head_groups(step.model.kv_heads, outer_ranks)
        chunk, gradient = _query_chunk_bytes(step)
        group = forward_chunk / groups
        hop = max(group, chunk) + forward_chunk - group + gradient
    else:
        # Each hop has a buffer for keys and values and one for their gradients.
        chunk = forward_chunk
        gradient = _chunk_elements(step) * step.gradient_width
        hop = chunk + gradient
    held_back = (inner > 0) * chunk
    return (inner + outer) * hop + held_back


def _query_chunk_bytes(step: Step) -> tuple[float, float]:
    """Bytes of what goes around a backward with queries circulating, and of its gradient, dq."""
    query = _query_elements(step)
    rows = step.tokens * step.model.heads
    # q and d_out, and two sums a row.
    chunk = 2 * query * step.width + 2 * rows * step.wide
    return chunk, query * step.gradient_width


def _buffers_of_blocks(step: Step) -> float:
    """Between nodes own blocks and those handed on; the blocks of a stage; gradients likewise."""
    forward_or_backward_stages = min(step.overlap_stages)
    backward_stages = step.overlap_stages[1]
    other_ranks = step.cp - 1
    # Everything here is a multiple of this rank's own chunk.
    handed_on = step.inter if step.inter > 1 else 0
    keys = handed_on + other_ranks / forward_or_backward_stages
    gradients_of_stage = other_ranks / backward_stages
    gradients_between_nodes = min(step.inter - 1, step.inter / backward_stages)
    gradients = gradients_of_stage + gradients_between_nodes
    # Bytes for each element of the own chunk.
    key_bytes = step.width * keys
    gradient_bytes = step.gradient_width * gradients
    return _chunk_elements(step) * (key_bytes + gradient_bytes)


_BUFFERS = {
    Moves.NOTHING: _no_bytes,
    Moves.HEADS: _buffers_of_heads,
    Moves.CHUNKS: _buffers_of_chunks,
    Moves.BLOCKS: _buffers_of_blocks,
}
"""Buffers that a schedule keeps from call to call, bytes."""


def _power_of_two(blocks: float) -> int:
    """The first power of two that is not below a number of blocks."""
    whole_blocks = math.ceil(blocks)
    exponent = (whole_blocks - 1).bit_length()
    return 1 << exponent
