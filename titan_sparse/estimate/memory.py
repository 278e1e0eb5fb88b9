"""Memory of a training step on one rank, from shapes alone.

The banner, --dry-run and --find-max-length go by it. A step is a few phases. Its peak is that of
the worst phase, not the sum of everything.

What a block keeps, and what is alive at the worst point of its backward, is counted in four units.
A unit is the bytes of a [tokens, width] tensor in training.dtype: hidden (H), query (Q: all query
heads), kv (K: all KV heads) and intermediate (I). The counts were read off the real model
(tests/estimate/test_memory.py runs it on fake tensors; with torch.compile, off the allocations of
compiled blocks). docs/training.md explains the parts.
"""

from typing import NamedTuple

from titan_sparse.estimate.attention_memory import attention_workspace, cp_buffers
from titan_sparse.estimate.step import LEVERS, Step, step_of
from titan_sparse.models.flavours import number_of_parameters
from titan_sparse.models.lora_config import adapter_elements, block_elements

__all__ = [
    "GIB",
    "LEVERS",
    "Step",
    "estimate",
    "frozen_bytes",
    "kept_by_block",
    "master_bytes",
    "peak_gib",
    "peak_phase",
    "step_of",
]

GIB = 2**30

OFFLOAD_BUFFERS = 3
"""Blocks whose kept tensors are on the GPU at one time while they are offloaded."""


class Units(NamedTuple):
    """Numbers of [tokens, width] tensors."""

    hidden: float = 0
    query: float = 0
    kv: float = 0
    intermediate: float = 0


def estimate(step: Step) -> dict[str, dict[str, float]]:
    """GiB by phase and part. The step's peak is that of the phase with the largest sum.

    peak_phase() names that phase.
    """
    bytes_by_phase = {
        "forward of the last block": _forward(step),
        "loss": _loss(step),
        "backward of the last block": _backward(step, blocks_left=step.model.layers),
        "backward of the first block": _backward(step, blocks_left=1),
        "gradient of the embedding": _embedding(step),
        "optimizer step": _optimizer(step),
    }
    gib_by_phase = {}
    for phase, parts in bytes_by_phase.items():
        gib_by_phase[phase] = {part: size / GIB for part, size in parts.items()}
    return gib_by_phase


def peak_phase(phases: dict[str, dict[str, float]]) -> str:
    """The phase that needs the most. phases: from estimate()."""
    sizes = {}
    for phase, parts in phases.items():
        sizes[phase] = sum(parts.values())
    return max(sizes, key=sizes.__getitem__)


def peak_gib(step: Step) -> float:
    """Most memory that PyTorch's allocator hands out (torch.cuda.max_memory_allocated), GiB."""
    phases = estimate(step)
    parts = phases[peak_phase(phases)]
    return sum(parts.values())


def _forward(step: Step) -> dict[str, float]:
    """The last block's forward: by part the bytes that are alive, as for all phases below."""
    # The residual, the second norm and the result; silu of gate, up and their product. Without
    # recomputation the block keeps all but one of them, so they are counted there.
    mlp_units = Units(hidden=1)
    if step.mode != "none":
        # An adapter's product is there beside what it is added to.
        adapted = step.adapters is not None and _has_adapter(step, "up_proj", "gate_up_proj")
        mlp_units = Units(hidden=3, intermediate=4 if adapted else 3)
    mlp = _bytes(step, mlp_units, _mlp_tokens(step))
    rotary = 0
    if not step.compiled:
        # In fp32: q, its rotated half, and what becomes of them.
        rotary = _bytes(step, Units(hidden=1, query=11))
    if step.mode == "none":
        # When q is rotated, most of what the block will keep does not exist yet.
        already_there = _bytes(step, Units(hidden=2, query=1, kv=2))
        rotary -= kept_by_block(step) - already_there
    return _before_backward(step, blocks=2) | {"block and attention": max(mlp, rotary)}


def _loss(step: Step) -> dict[str, float]:
    # Sharded weights of the last block stay gathered for its backward, which comes next.
    gathered_blocks = 0
    if step.shards > 1:
        gathered_blocks = 1
    parts = _before_backward(step, blocks=gathered_blocks)
    return parts | {"loss": _loss_tile(step)}


def _before_backward(step: Step, blocks: int) -> dict[str, float]:
    """At the end of the forward. blocks: how many blocks' weights are gathered."""
    return _standing(step) | {
        "gradients": _gradient_bytes(step) if step.accumulates else 0,
        "gathered weights": _gathered(step, blocks),
        "kept for backward": _kept(step, step.model.layers),
    }


def _backward(step: Step, blocks_left: int) -> dict[str, float]:
    """The backward of a block while `blocks_left` blocks still hold what they keep.

    The block itself is one of them.
    """
    blocks_done = step.model.layers - blocks_left
    block = _trained_in_block(step)
    if step.accumulates:
        gradients = _gradient_bytes(step)
    elif step.offload_optimizer:
        # Reduced gradients leave for the CPU.
        gradients = 0
    else:
        gradients = block * blocks_done * step.wide / step.shards
    # The head's gradient waits for the end. A block's gradient is there whole when it is reduced,
    # beside the one before it, which is being reduced.
    being_reduced = block * step.wide if blocks_done else 0
    gradients += _head_gradient(step) * step.width + block * step.width + being_reduced
    return _standing(step) | {
        "gradients": gradients,
        "gathered weights": _gathered(step, blocks=2),
        "kept for backward": _kept(step, blocks_left),
        "block and attention": _block_peak(step),
    }


def _embedding(step: Step) -> dict[str, float]:
    """The end of the backward.

    Embedding, last norm and head are reduced together, in fp32, and their gathered weights are
    freed. A tied embedding has one gradient from the loss and one from the look-up until they are
    added.
    """
    if step.adapters:
        # Nothing of this is trained.
        return _standing(step) | {
            "gradients": _gradient_bytes(step),
            "kept for backward": _kept(step, 0),
        }
    second_gradient = 0
    if step.model.tied_embeddings:
        second_gradient = _head_parameters(step) * step.width
    unsharded = _embedding_parameters(step) * (step.width + step.wide) + second_gradient
    # What all blocks share is still kept, and the gradient that the look-up reads.
    kept = _kept(step, 0) + _bytes(step, Units(hidden=1))
    return _standing(step) | {
        "gradients": _gradient_bytes(step) + unsharded,
        "kept for backward": kept,
    }


def _optimizer(step: Step) -> dict[str, float]:
    gradients = _gradient_bytes(step)
    # A foreach step makes temporaries as large as all parameters together.
    has_scratch = step.optimizer_scratch and not step.offload_optimizer
    scratch = gradients if has_scratch else 0
    return _standing(step) | {"gradients": gradients, "optimizer's scratch": scratch}


def _embedding_parameters(step: Step) -> float:
    """Elements of the embedding, and of the head where it is a matrix of its own."""
    tied = step.model.tied_embeddings
    matrices = 1 if tied else 2
    return _head_parameters(step) * matrices


def _block_parameters(step: Step) -> float:
    """Elements of one block."""
    model = step.model
    parameters = number_of_parameters(model)
    in_blocks = parameters - _embedding_parameters(step)
    return in_blocks / model.layers


def _trained_in_block(step: Step) -> float:
    """Elements of one block that have gradients."""
    if step.adapters:
        return block_elements(step.model, step.adapters)
    return _block_parameters(step)


def _head_gradient(step: Step) -> float:
    """Elements of the gradient of the matrix that the loss reads."""
    return 0 if step.adapters else _head_parameters(step)


def _head_parameters(step: Step) -> float:
    """Elements of the matrix that the loss reads."""
    model = step.model
    return model.vocab_size * model.hidden_size


def master_bytes(step: Step) -> float:
    """This rank's share of all parameters that are trained, in fp32."""
    if step.adapters:
        parameters = adapter_elements(step.model, step.adapters)
    else:
        parameters = number_of_parameters(step.model)
    bytes_of_model = parameters * step.wide
    return bytes_of_model / step.shards


def frozen_bytes(step: Step) -> float:
    """This rank's share of the parameters that are not trained, in training.dtype."""
    if not step.adapters:
        return 0
    return number_of_parameters(step.model) * step.width / step.shards


def _gradient_bytes(step: Step) -> float:
    """This rank's share of all gradients, in fp32.

    With optimizer.offload they leave for the CPU when they are reduced.
    """
    if step.offload_optimizer:
        return 0
    return master_bytes(step)


def _gathered(step: Step, blocks: int) -> float:
    """Weights that FSDP has gathered, in training.dtype.

    Embedding and head from the forward to the end of the backward, a block and the next one, and
    the buffer that they arrive in.
    """
    block = _block_parameters(step)
    if step.adapters:
        block += _trained_in_block(step)
    if not step.reshard_after_forward:
        # Nothing is given back after the forward.
        blocks = step.model.layers
    arriving = 0
    if blocks > 1 and step.shards > 1:
        arriving = block
    elements = _embedding_parameters(step) + blocks * block + arriving
    return step.width * elements


def _standing(step: Step) -> dict[str, float]:
    """What is there in every phase."""
    trained = 0 if step.offload_optimizer else master_bytes(step)
    return {
        "parameters": trained + frozen_bytes(step),
        "optimizer states": trained * step.optimizer_states,
        "context-parallel buffers": cp_buffers(step),
    }


def _bytes(step: Step, units: Units, intermediate_tokens: int | None = None) -> float:
    """Bytes of that many tensors. intermediate_tokens: where those tensors have fewer tokens."""
    model = step.model
    if intermediate_tokens is None:
        intermediate_tokens = step.tokens
    elements_a_token = (
        units.hidden * model.hidden_size
        + units.query * model.heads * model.head_dim
        + units.kv * model.kv_heads * model.head_dim
    )
    elements = (
        elements_a_token * step.tokens
        + units.intermediate * model.intermediate_size * intermediate_tokens
    )
    return step.width * elements


def _has_adapter(step: Step, *names: str) -> bool:
    """Whether one of these linear layers needs its input for a gradient: without adapters all do."""
    if step.adapters is None:
        return True
    targets = step.adapters.targets
    return any(name in targets for name in names)


def _kept_units(step: Step) -> Units:
    """What a block keeps for its backward, without its lse."""
    # Norms of q and k keep what comes in.
    norms = int(step.model.qk_norm)
    # A chunked MLP keeps nothing of its own: it is computed anew.
    intermediate = 0 if step.mlp_chunk_tokens else 1
    if step.mode == "full":
        # Its input, and attention's out.
        return Units(hidden=1, query=1)
    if step.mode == "selective":
        # Its input, out, q, v, gate; outside of the compiler, which sees that it is not needed,
        # also down.
        return Units(
            hidden=1 if step.compiled else 2,
            query=2,
            kv=1,
            intermediate=intermediate,
        )
    # Both norms with what comes in; q, k, v, out twice; gate, up, their product; outside of the
    # compiler also silu(gate). What only a frozen matrix reads is not kept.
    read_by_qkv = _has_adapter(step, "q_proj", "k_proj", "v_proj", "qkv_proj")
    read_by_mlp = _has_adapter(step, "gate_proj", "up_proj", "gate_up_proj")
    read_by_o = _has_adapter(step, "o_proj")
    read_by_down = _has_adapter(step, "down_proj")
    tensors_of_mlp = (2 if step.compiled else 3) + read_by_down
    return Units(
        hidden=2 + read_by_qkv + read_by_mlp,
        query=2 + read_by_o + norms,
        kv=2 + norms,
        intermediate=tensors_of_mlp * intermediate,
    )


def _recomputed_units(step: Step) -> Units:
    """What is alive besides at the worst point of a block's backward.

    That is silu's backward, when the gradients of gate and up have just been made. From the forward
    there are both norms, the residual, q, k, v, out by token, gate, up and their product. Then the
    gradients of the block's output, of the product, of gate and of up. The compiler frees what it
    need not have, or makes it anew later. With adapters it also has their outputs beside those of
    the frozen layers, and the gradients of both.
    """
    norms = int(step.model.qk_norm)
    of_adapters = 0
    if step.compiled and step.adapters and not step.mlp_chunk_tokens:
        # Measured on an H200 with torch 2.11: 38.3 GiB in tests/estimate/test_lora.py.
        of_adapters = 5 * _has_adapter(step, "gate_proj", "up_proj", "gate_up_proj", "down_proj")
    if step.compiled:
        alive = Units(hidden=3, query=1, kv=0, intermediate=6 + of_adapters)
    else:
        alive = Units(hidden=4, query=2 + norms, kv=2 + norms, intermediate=6)
    if step.mode == "full":
        return alive
    if step.mode == "selective":
        # q, v and gate were kept, so they are not counted again.
        kept_query = 0 if step.compiled else 1
        return Units(
            hidden=alive.hidden,
            query=max(alive.query - kept_query, 0),
            kv=max(alive.kv - 1, 0),
            intermediate=5,
        )
    # Everything from the forward was kept: only gradients are new.
    return Units(hidden=1, query=0, kv=0, intermediate=3)


def _attention_units(step: Step) -> Units:
    """The same during attention's backward.

    The gradients of out, q, k and v are alive besides, and nothing of the MLP any more.
    """
    if step.mode == "none":
        return Units(hidden=2, query=4, kv=3)
    if step.compiled:
        return Units(hidden=5, query=5, kv=5)
    return Units(hidden=5, query=7, kv=5)


def kept_by_block(step: Step) -> float:
    """Bytes that one block keeps for its backward, wherever they are."""
    model = step.model
    units = _kept_units(step)
    # Without checkpointing there is nothing to recompute.
    kept_share = 1 if step.mode == "none" else 1 - _recomputed_share(step)
    units_besides_out = units._replace(query=units.query - 1)
    besides_out = _bytes(step, units_besides_out)
    # Attention's out and lse, which attention_recompute gives up.
    out = _bytes(step, Units(query=1))
    lse = step.tokens * model.heads * step.wide
    attention = out + lse
    # Elements of the gathered K; V has as many.
    vertical_vectors = step.sequences * model.heads * step.verticals
    gathered_verticals = vertical_vectors * model.head_dim
    selection = step.index_bytes + 2 * gathered_verticals * step.width
    return besides_out + kept_share * attention + selection


def _kept(step: Step, blocks: int) -> float:
    """What `blocks` blocks keep on the device for their backward, and the tables that all share."""
    blocks_on_device = blocks
    if step.offload:
        blocks_on_device = min(blocks, OFFLOAD_BUFFERS)
    # Shared by all blocks: cos and sin; the mask's vectors, three of int32.
    rope = 2 * step.tokens * step.model.head_dim * step.wide
    mask = 3 * 4 * step.sequences * step.seq_len
    return blocks_on_device * kept_by_block(step) + rope + mask


def _recomputed_share(step: Step) -> float:
    """Share of attention's results that is recomputed.

    A negative attention_recompute means as much as memory needs. Then a step fits if it fits with
    all of it recomputed.
    """
    if step.attention_recompute < 0:
        return 1.0
    return step.attention_recompute


def _block_peak(step: Step) -> float:
    """The most that one block's backward needs besides what the block has kept.

    The worst point is in its MLP or in its attention.
    """
    model = step.model
    tokens = _mlp_tokens(step)
    mlp = _bytes(step, _recomputed_units(step), tokens)
    if step.mlp_chunk_tokens and not step.adapters:
        # The weights' gradients are summed over chunks in fp32.
        mlp += 3 * model.hidden_size * model.intermediate_size * step.wide
    if step.float8:
        if step.float8_recipe == "tensorwise":
            # Both operands of a matmul, a byte an element.
            mlp += tokens * (model.hidden_size + model.intermediate_size)
        else:
            # The weights' gradients are of bf16 operands, which are kept beside (measured:
            # docs/training.md).
            mlp += tokens * 8 * model.intermediate_size
    attention = _bytes(step, _attention_units(step)) + attention_workspace(step)
    # Out of a block whose attention is recomputed was not kept, and comes back.
    recomputed_out = _recomputed_share(step) * _bytes(step, Units(query=1))
    return max(mlp, attention) + recomputed_out


def _mlp_tokens(step: Step) -> int:
    """Tokens that an MLP computes at one time."""
    chunk_tokens = step.mlp_chunk_tokens
    if not chunk_tokens:
        # The MLP is not computed in chunks.
        return step.tokens
    return min(chunk_tokens, step.tokens)


def _loss_tile(step: Step) -> float:
    """What the loss needs.

    Hidden states before and after the last norm, their gradient, that of the head in fp32, and one
    chunk of logits in fp32, whose gradient takes their place, with its fp32 gradient of hidden
    states.
    """
    model = step.model
    # Logits and hidden states: elements of one token.
    chunk_width = model.vocab_size + model.hidden_size
    chunk_tokens = min(step.loss_chunk_tokens, step.tokens)
    chunk = chunk_tokens * chunk_width * step.wide
    head_gradient = _head_gradient(step) * step.wide
    hidden_states = _bytes(step, Units(hidden=3))
    return hidden_states + head_gradient + chunk
