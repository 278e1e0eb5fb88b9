"""Memory that attention takes in addition to its inputs and results, by what its schedule moves."""

import math

from titan_sparse.attention.context_parallel.schedule import Moves, head_groups
from titan_sparse.estimate.step import Step

GATHERED_BYTES = 1 << 28
"""Lists of gathered queries that are made at a time. Their fp32 sums take as much again."""


def attention_workspace(step: Step) -> float:
    """Bytes that attention's backward takes in addition to its inputs and results.

    docs/benchmarks.md, "Attention on one GPU", has the measurements.
    """
    model = step.model
    if step.backend == "eager":
        # Three tables of scores, of a query block against all keys.
        queries_of_block = step.sequences * model.heads * step.block_size
        return 3 * step.wide * queries_of_block * step.seq_len
    # Block lists: full and partial, by query and by key. Without verticals all heads share them.
    heads_with_lists = model.heads if step.verticals else 1
    blocks = -(-step.tokens // step.block_size)
    lists = 16 * blocks * step.most_blocks * heads_with_lists
    # Measured: 17 % of q, k, v and out, or the lists where they are larger.
    size = max(0.17 * 2 * (step.query + step.kv) * step.width, lists)
    is_grouped = model.heads > model.kv_heads
    if step.backend == "flex":
        # FlashAttention-4 sums dq in fp32, and with grouped queries also dk and dv.
        size += step.wide * (step.query + is_grouped * 2 * step.kv)
    if step.backend == "cudnn":
        # cuDNN sums dq in fp32, and with grouped queries it has dk and dv of every query head.
        heads_at_once = 1 if step.schedule.moves is Moves.HEADS else model.kv_heads
        share = heads_at_once / model.kv_heads
        size += share * (step.wide * step.query + step.width * is_grouped * 2 * step.query)
    if step.gathers_queries:
        # dK and dV are summed in fp32 too.
        size += 2 * GATHERED_BYTES + 2 * step.wide * step.kv
    return size + _schedule_workspace(step)


def _schedule_workspace(step: Step) -> float:
    """What a schedule adds to the workspace of attention's backward, bytes."""
    moves = step.schedule.moves
    if moves is Moves.HEADS:
        # dK and dV of the whole sequence, of two heads: one is computed while one is sent.
        kv_heads = step.model.kv_heads
        return 2 * step.wide * step.kv * step.cp * min(2, kv_heads) / kv_heads
    if moves is Moves.NOTHING or step.cp == 1:
        return 0
    if moves is Moves.CHUNKS:
        if step.circulates_queries:
            # Sums of dK and dV. dq of a chunk, and as it is sent. q, d_out and out of a chunk.
            return step.wide * (2 * step.kv + 2 * step.query) + step.width * 3 * step.query
        # Sums of dq, dK and dV, and the chunks that are sent.
        return step.wide * (step.query + 4 * step.kv)
    # Sums of dq, dK and dV, and a stage's blocks as sent and as received, with their gradients.
    # A stage's blocks are a multiple of this rank's own.
    stage = received = (step.cp - 1) / step.overlap_stages[1]
    if step.backend == "flex":
        # flex is compiled for numbers of blocks that are powers of two.
        blocks = -(-step.tokens // step.block_size)
        received = (1 << (math.ceil(stage * blocks) - 1).bit_length()) / blocks
    sums = step.wide * (step.inter + 1)
    in_transit = (stage + received) * (step.width + step.wide)
    return step.wide * step.query + 2 * step.kv * (sums + in_transit)


def cp_buffers(step: Step) -> float:
    """Bytes of the buffers of received chunks, which are kept from call to call.

    docs/context_parallel.md, "Buffers", explains them.
    """
    moves = step.schedule.moves
    if moves is Moves.NOTHING or step.cp == 1:
        return 0
    # K and V of this rank.
    chunk = 2 * step.kv * step.width
    gradient = 2 * step.kv * step.gradient_width
    if moves is Moves.HEADS:
        # Two heads of the whole sequence: one is computed on while the next one arrives.
        return 2 * chunk * step.cp / step.model.kv_heads
    if moves is Moves.BLOCKS:
        # Own blocks and those handed on between nodes, and the blocks of a stage. Gradients likewise.
        backward_stages = step.overlap_stages[1]
        handed_on = step.inter if step.inter > 1 else 0
        received = handed_on + (step.cp - 1) / min(step.overlap_stages)
        gradients_of_stage = (step.cp - 1) / backward_stages
        gradients_between_nodes = min(step.inter - 1, step.inter / backward_stages)
        return chunk * received + gradient * (gradients_of_stage + gradients_between_nodes)
    # Two buffers in turn for each kind of hop, but one where there is only one hop. In addition the
    # chunk that a backward keeps for its end.
    outer_ranks, inner_ranks = step.schedule.rings(step.inter, step.cp // step.inter)
    inner = min(2, inner_ranks - 1)
    outer = min(2, outer_ranks - 1)
    hop = chunk + gradient
    if step.circulates_queries:
        # All queries take the place of one group of KV heads. The other groups keep theirs.
        group = chunk / head_groups(step.model.kv_heads, outer_ranks)
        others = chunk - group
        # q and d_out, and two sums of each row.
        rows = step.tokens * step.model.heads
        chunk = 2 * step.query * step.width + 2 * rows * step.wide
        hop = max(group, chunk) + others + step.query * step.gradient_width
    return (inner + outer) * hop + (chunk if inner else 0)
