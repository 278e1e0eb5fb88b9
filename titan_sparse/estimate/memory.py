"""Memory of a training step on one rank, from shapes alone.

The banner, --dry-run and --find-max-length use it. A step has a few phases. Its peak is that of the
worst phase, not the sum of everything.

Tensors of [tokens, width] in training.dtype are counted in four units: hidden, query (all query
heads), kv (all KV heads of K) and intermediate. The counts were read off the real model: the tests
run it on fake tensors, and compiled blocks were measured. docs/training.md explains the parts. A
step on fake tensors in place of these formulas was no closer to the measured runs, takes up to a
minute, and knows nothing of the compiler.
"""

from titan_sparse.attention.backends.flex import kv_heads_at_once
from titan_sparse.attention.context_parallel.schedules import Moves, head_groups, heads_gathered
from titan_sparse.estimate.step import StepShape
from titan_sparse.models.config import adapter_elements, block_adapter_elements

GIB = 2**30

OFFLOAD_BUFFERS = 3
"""Blocks whose kept tensors are on the GPU at one time while they are offloaded."""

GATHERED_BYTES = 1 << 28
"""Lists of gathered queries that are made at a time. Their fp32 sums take as much again."""


def estimate(step: StepShape) -> dict[str, dict[str, float]]:
    """GiB by phase and part. The step's peak is that of the phase with the largest sum."""
    layers = step.model.layers
    # This rank's share of all gradients, in fp32. With optimizer.offload they leave for the CPU.
    gradients = 0 if step.offload_optimizer else master_bytes(step)
    held = gradients if step.accumulates else 0
    standing = {
        "parameters": gradients + frozen_bytes(step),
        "optimizer states": gradients * step.optimizer_states,
        "context-parallel buffers": cp_buffers(step),
    }
    kept = _kept(step, layers)
    bytes_by_phase = {
        "forward of the last block": {
            "gradients": held,
            "gathered weights": _gathered(step, blocks=2),
            "kept for backward": kept,
            "block and attention": _block_forward(step),
        },
        "loss": {
            "gradients": held,
            # Sharded weights of the last block stay gathered for its backward, which comes next.
            "gathered weights": _gathered(step, blocks=1 if step.shards > 1 else 0),
            "kept for backward": kept,
            "loss": _loss(step),
        },
        "backward of the last block": _backward(step, held, blocks_left=layers),
        "backward of the first block": _backward(step, held, blocks_left=1),
        "gradient of the embedding": _embedding(step, gradients),
        "optimizer step": {
            "gradients": gradients,
            # A foreach step makes temporaries as large as all parameters together.
            "optimizer's scratch": gradients if step.optimizer_scratch else 0,
        },
    }
    gib_by_phase = {}
    for phase, parts in bytes_by_phase.items():
        gib_by_phase[phase] = {part: size / GIB for part, size in (standing | parts).items()}
    return gib_by_phase


def peak_phase(phases: dict[str, dict[str, float]]) -> str:
    return max(phases, key=lambda phase: sum(phases[phase].values()))


def peak_gib(step: StepShape) -> float:
    """Most memory that PyTorch's allocator hands out (torch.cuda.max_memory_allocated), GiB."""
    return max(sum(parts.values()) for parts in estimate(step).values())


def master_bytes(step: StepShape) -> float:
    """This rank's share of all parameters that are trained, in fp32."""
    trained = step.model.number_of_parameters()
    if step.adapters:
        trained = adapter_elements(step.model, step.adapters)
    return trained * step.wide / step.shards


def frozen_bytes(step: StepShape) -> float:
    """This rank's share of the parameters that are not trained, in training.dtype."""
    if not step.adapters:
        return 0
    return step.model.number_of_parameters() * step.width / step.shards


def _matrix(step: StepShape) -> int:
    """Elements of the embedding, and of the head."""
    return step.model.vocab_size * step.model.hidden_size


def _matrices(step: StepShape) -> int:
    """1 where the embedding is also the head, else 2."""
    return 1 if step.model.tied_embeddings else 2


def _block(step: StepShape) -> float:
    """Elements of one block's own weights."""
    in_blocks = step.model.number_of_parameters() - _matrices(step) * _matrix(step)
    return in_blocks / step.model.layers


def _adapters_of_block(step: StepShape) -> float:
    return block_adapter_elements(step.model, step.adapters) / step.model.layers


def _gathered(step: StepShape, blocks: int) -> float:
    """Weights that FSDP has gathered, in training.dtype.

    Embedding and head are gathered from the forward to the end of the backward. In addition a block
    and the next one, and the buffer that the next one arrives in.
    """
    if not step.reshard_after_forward:
        # All blocks stay gathered after the forward.
        blocks = step.model.layers
    # The buffer that the next one arrives in.
    if blocks > 1 and step.shards > 1:
        blocks += 1
    of_blocks = blocks * (_block(step) + _adapters_of_block(step))
    return step.width * (_matrices(step) * _matrix(step) + of_blocks)


def _bytes(
    step: StepShape, hidden: float = 0, query: float = 0, kv: float = 0, intermediate: float = 0
) -> float:
    elements = hidden * step.tokens * step.model.hidden_size + query * step.query + kv * step.kv
    elements += intermediate * _mlp_tokens(step) * step.model.intermediate_size
    return step.width * elements


def _mlp_tokens(step: StepShape) -> int:
    """Tokens that an MLP computes at one time."""
    return min(step.mlp_chunk_tokens or step.tokens, step.tokens)


def kept_by_block(step: StepShape) -> float:
    """Bytes that one block keeps for its backward, wherever they are."""
    # A chunked MLP keeps nothing of its own, because its backward recomputes it.
    keeps_mlp = 0 if step.mlp_chunk_tokens else 1
    if step.mode == "full":
        # Its input.
        kept = _bytes(step, hidden=1)
    elif step.mode == "selective":
        # Its input, q, v and gate. Without the compiler, which sees that it is not needed, also
        # down.
        kept = _bytes(step, 1 if step.compiled else 2, query=1, kv=1, intermediate=keeps_mlp)
    else:
        # Both norms with their inputs. q, k and v, of which the norms keep q and k once more. gate,
        # up, their product, and without the compiler silu(gate).
        norms = int(step.model.qk_norm)
        of_mlp = (3 if step.compiled else 4) * keeps_mlp
        kept = _bytes(step, hidden=4, query=1 + norms, kv=2 + norms, intermediate=of_mlp)
    # Attention's out and lse, which attention_recompute gives up. Without checkpointing nothing is
    # recomputed.
    kept_share = 1 if step.mode == "none" else 1 - step.recomputed
    attention = _bytes(step, query=1) + step.tokens * step.model.heads * step.wide
    # K and V of the gathered verticals.
    vectors = 2 * step.sequences * step.model.heads * step.verticals
    selection = step.index_bytes + vectors * step.model.head_dim * step.width
    selection /= step.head_shares
    # Other layers have linear attention.
    with_attention = 1 - len(step.model.linear_layers) / step.model.layers
    return kept + with_attention * (kept_share * attention + selection)


def _kept(step: StepShape, blocks: int) -> float:
    """The memory that `blocks` blocks keep on the device for their backward, with the tables that
    all share."""
    if step.offload:
        blocks = min(blocks, OFFLOAD_BUFFERS)
    rope = 2 * step.tokens * step.model.head_dim * step.wide
    # Three vectors of int32.
    mask = 3 * 4 * step.sequences * step.seq_len
    return blocks * kept_by_block(step) + rope + mask


def _block_forward(step: StepShape) -> float:
    """The worst point of a block's forward: its MLP, or the rotation of q."""
    # The residual, the second norm and the result, and silu of gate, up and their product, an
    # adapter's product together with what it is added to. Without recomputation the block keeps all
    # but one of them, so they are counted there.
    mlp = _bytes(step, hidden=1)
    if step.mode != "none":
        mlp = _bytes(step, hidden=3, intermediate=4 if step.has_adapters_in_mlp else 3)
    # In fp32: q, its rotated half, and their results.
    rotary = 0 if step.compiled else _bytes(step, hidden=1, query=11)
    if step.mode == "none":
        # When q is rotated, most of what the block will keep does not exist yet.
        rotary -= kept_by_block(step) - _bytes(step, hidden=2, query=1, kv=2)
    return max(mlp, rotary)


def _loss(step: StepShape) -> float:
    """Hidden states before and after the last norm and their gradient, the head's gradient in fp32,
    and one chunk of logits in fp32.

    The logits' gradient takes their place. It comes with a gradient of hidden states in fp32.
    """
    chunk_tokens = min(step.loss_chunk_tokens, step.tokens)
    chunk = chunk_tokens * (step.model.vocab_size + step.model.hidden_size)
    head_gradient = 0 if step.adapters and not step.adapters.tokens else _matrix(step)
    # PEFT puts the rows of trained tokens into a copy of the head.
    copied = _matrix(step) if step.adapters and step.adapters.tokens else 0
    wide = (head_gradient + chunk) * step.wide
    return _bytes(step, hidden=3) + wide + copied * step.width


def _backward(step: StepShape, held: float, blocks_left: int) -> dict[str, float]:
    """The backward of a block while it and others, `blocks_left` blocks, still keep their tensors.

    held: bytes of gradients of earlier forwards.
    """
    blocks_done = step.model.layers - blocks_left
    block = _adapters_of_block(step) if step.adapters else _block(step)
    head = 0 if step.adapters else _matrix(step)
    gradients = held
    if not step.accumulates and not step.offload_optimizer:
        gradients = block * blocks_done * step.wide / step.shards
    # The head's gradient waits for the end. A block's gradient is whole until it is reduced, at the
    # same time as the one before it, which is being reduced.
    gradients += (head + block) * step.width
    if blocks_done:
        gradients += block * step.wide
    return {
        "gradients": gradients,
        "gathered weights": _gathered(step, blocks=2),
        "kept for backward": _kept(step, blocks_left),
        "block and attention": _block_backward(step),
    }


def _block_backward(step: StepShape) -> float:
    """The most that one block's backward needs in addition to what the block has kept.

    The worst point is in its MLP or in its attention. In the MLP it is silu's backward, when the
    gradients of gate and up have just been made. From the forward there are both norms, the
    residual, q, k, v, gate, up and their product, except for what was kept. Then the gradients of
    the block's output, of the product, of gate and of up. The compiler frees what it does not need,
    or computes it later. During attention's backward the gradients of out, q, k and v are alive,
    and nothing of the MLP.
    """
    model = step.model
    # q, v and gate were kept.
    selective = int(step.mode == "selective")
    if step.mode == "none":
        mlp = _bytes(step, hidden=1, intermediate=3)
        attention = _bytes(step, hidden=2, query=3, kv=3)
    elif step.compiled:
        of_adapters = 0
        if step.has_adapters_in_mlp and not step.mlp_chunk_tokens and not selective:
            # The adapters' outputs, those of the frozen layers, and the gradients of both. Measured
            # on an H200 with torch 2.11: 38.3 GiB in tests/estimate/test_memory.py.
            of_adapters = 5
        mlp = _bytes(step, hidden=3, intermediate=6 - selective + of_adapters)
        attention = _bytes(step, hidden=5, query=5, kv=5)
    else:
        rotated = 1 + int(model.qk_norm) - selective
        mlp = _bytes(step, hidden=4, query=rotated, kv=rotated + 1, intermediate=6 - selective)
        attention = _bytes(step, hidden=5, query=7, kv=5)
    if step.mlp_chunk_tokens and not step.adapters:
        # The weights' gradients are summed over chunks in fp32.
        mlp += 3 * model.hidden_size * model.intermediate_size * step.wide
    if step.float8 and step.float8_recipe == "tensorwise":
        # Both operands of a matmul, a byte an element.
        mlp += _mlp_tokens(step) * (model.hidden_size + model.intermediate_size)
    elif step.float8:
        # The weights' gradients have bf16 operands, which are kept too
        # (measured: docs/training.md).
        mlp += _mlp_tokens(step) * 8 * model.intermediate_size
    linear = 0
    if model.linear_layers:
        # q, k, v and gate before and after the convolution, with their gradients; the state
        # that each 64 tokens begin with, and its gradient. Over several ranks, a second state
        # goes beside.
        states = 2 * model.linear_state / 64 * (2 if step.cp > 1 else 1)
        linear = step.width * step.tokens * (4 * model.linear_width + states)
    # A block whose attention is recomputed did not keep out, which now exists again.
    recomputed_out = step.recomputed * _bytes(step, query=1)
    return max(mlp, attention + attention_workspace(step), linear) + recomputed_out


def _embedding(step: StepShape, gradients: float) -> dict[str, float]:
    """The end of the backward.

    Embedding, last norm and head are reduced together, in fp32, and their gathered weights are
    freed. A tied embedding has one gradient from the loss and one from the look-up until they are
    added.
    """
    kept = _kept(step, 0)
    if not step.adapters:
        gradients += _matrices(step) * _matrix(step) * (step.width + step.wide)
        if step.model.tied_embeddings:
            gradients += _matrix(step) * step.width
    elif step.adapters.tokens:
        # Of the copy of the embedding into which PEFT puts the rows of trained tokens.
        gradients += _matrix(step) * step.width
    if not step.adapters or step.adapters.tokens:
        # The gradient that the look-up reads.
        kept += _bytes(step, hidden=1)
    return {"gradients": gradients, "kept for backward": kept}


def attention_workspace(step: StepShape) -> float:
    """Bytes that attention's backward takes in addition to its inputs and results.

    docs/benchmarks.md, "Attention on one GPU", has the measurements.
    """
    model = step.model
    if step.backend == "eager":
        # Three tables of scores, of a query block against all keys.
        scores = step.sequences * model.heads / step.head_shares * step.block_size * step.seq_len
        return 3 * step.wide * scores
    # Block lists: full and partial, by query and by key. Without verticals all heads share them.
    heads_with_lists = model.heads if step.verticals else step.head_shares
    lists = 16 * step.blocks * step.most_blocks * heads_with_lists
    # Measured: 17 % of q, k, v and out, or the lists where they are larger.
    size = max(0.17 * 2 * (step.query + step.kv) * step.width, lists)
    is_grouped = model.heads > model.kv_heads
    kv_heads = _heads_gathered(step) if step.schedule.moves is Moves.HEADS else model.kv_heads
    if step.backend == "flex":
        # FlashAttention-4 sums dq in fp32, and with grouped queries also dk and dv.
        at_once = kv_heads_at_once(kv_heads, model.heads // model.kv_heads, step.blocks)
        of_heads = step.wide * (step.query + is_grouped * 2 * step.kv)
        size += at_once / model.kv_heads * of_heads
    if step.backend == "cudnn":
        # cuDNN sums dq in fp32, and with grouped queries it has dk and dv of every query head.
        share = kv_heads / model.kv_heads
        size += share * (step.wide * step.query + step.width * is_grouped * 2 * step.query)
    if step.gathers_queries:
        # dK and dV are summed in fp32 too.
        size += 2 * GATHERED_BYTES + 2 * step.wide * step.kv
    return size + _schedule_workspace(step)


def _schedule_workspace(step: StepShape) -> float:
    """The bytes that a schedule adds to the workspace of attention's backward."""
    moves = step.schedule.moves
    if moves is Moves.HEADS:
        kv_heads = step.model.kv_heads
        at_once = _heads_gathered(step)
        # Of the whole sequence: dK and dV of two groups of heads, of which one is computed while
        # one is sent, and K and V of one, head by head instead of rank by rank.
        sums = step.wide * min(2 * at_once, kv_heads)
        copies = step.width * at_once if at_once * step.sequences > 1 else 0
        return 2 * step.kv * step.cp * (sums + copies) / kv_heads
    if moves is Moves.NOTHING or step.cp == 1:
        return 0
    if moves is Moves.TOKENS:
        # Gradients of q, k and v as they are sent and as they arrive, and out, d_out and dq of this
        # rank's tokens beside those of its heads.
        kv = step.kv * step.kv_copies
        trades = step.width * (2 * (step.query + 2 * kv) + 3 * step.query)
        if step.inter == 1:
            return trades
        # The ring between nodes has the same numbers of elements.
        return trades + step.wide * (step.query + 4 * kv)
    if moves is Moves.CHUNKS:
        if step.circulates_queries:
            # Sums of dK and dV. dq of a chunk, and as it is sent. q, d_out and out of a chunk.
            return step.wide * (2 * step.kv + 2 * step.query) + step.width * 3 * step.query
        # Sums of dq, dK and dV, and the chunks that are sent.
        return step.wide * (step.query + 4 * step.kv)
    # Sums of dq, dK and dV, and a stage's blocks as sent and as received, with their gradients.
    # A stage's blocks are a multiple of this rank's own.
    stage = (step.cp - 1) / step.overlap_stages[1]
    sums = step.wide * (step.inter + 1)
    in_transit = 2 * stage * (step.width + step.wide)
    return step.wide * step.query + 2 * step.kv * (sums + in_transit)


def _heads_gathered(step: StepShape) -> int:
    """The KV heads that all_gather gathers together."""
    kv_heads = step.model.kv_heads
    return heads_gathered(kv_heads, 2 * step.kv * step.width * step.cp // kv_heads)


def cp_buffers(step: StepShape) -> float:
    """Bytes of the buffers of received chunks, which are kept from call to call.

    docs/context_parallel.md, "Buffers", explains them.
    """
    moves = step.schedule.moves
    if moves is Moves.NOTHING or step.cp == 1:
        return 0
    # K and V of this rank, or of its heads and the node's tokens.
    chunk = 2 * step.kv * step.kv_copies * step.width
    gradient = 2 * step.kv * step.kv_copies * step.gradient_width
    if moves is Moves.HEADS:
        # Two groups of heads of the whole sequence: one is computed on while the next one arrives.
        kv_heads = step.model.kv_heads
        return chunk * step.cp * min(2 * _heads_gathered(step), kv_heads) / kv_heads
    if moves is Moves.BLOCKS:
        # Own blocks and those handed on between nodes, and the blocks of a
        # stage. Gradients likewise.
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
