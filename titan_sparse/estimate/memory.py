"""Memory of a training step on one rank, from shapes alone.

The banner, --dry-run and --find-max-length use it. A step has a few phases. Its peak is that of the
worst phase, not the sum of everything.

Tensors of [tokens, width] in training.dtype are counted in four units: hidden, query (all query
heads), kv (all KV heads of K) and intermediate. The counts were read off the real model: the tests
run it on fake tensors, and compiled blocks were measured. docs/training.md explains the parts. A
step on fake tensors in place of these formulas was no closer to the measured runs, takes up to a
minute, and knows nothing of the compiler.
"""

from titan_sparse.estimate.attention_memory import attention_workspace, cp_buffers
from titan_sparse.estimate.step import Step
from titan_sparse.models.flavours import number_of_parameters
from titan_sparse.models.lora_config import adapter_elements

GIB = 2**30

OFFLOAD_BUFFERS = 3
"""Blocks whose kept tensors are on the GPU at one time while they are offloaded."""


def estimate(step: Step) -> dict[str, dict[str, float]]:
    """GiB by phase and part. The step's peak is that of the phase with the largest sum."""
    layers = step.model.layers
    # This rank's share of all gradients, in fp32. With optimizer.offload they leave for the CPU.
    gradients = 0 if step.offload_optimizer else master_bytes(step)
    held = gradients if step.accumulates else 0
    trained = 0 if step.offload_optimizer else master_bytes(step)
    standing = {
        "parameters": trained + frozen_bytes(step),
        "optimizer states": trained * step.optimizer_states,
        "context-parallel buffers": cp_buffers(step),
    }
    kept = _kept(step, layers)
    # A foreach step makes temporaries as large as all parameters together.
    has_scratch = step.optimizer_scratch and not step.offload_optimizer
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
            "optimizer's scratch": gradients if has_scratch else 0,
        },
    }
    gib_by_phase = {}
    for phase, parts in bytes_by_phase.items():
        gib_by_phase[phase] = {part: size / GIB for part, size in (standing | parts).items()}
    return gib_by_phase


def peak_phase(phases: dict[str, dict[str, float]]) -> str:
    return max(phases, key=lambda phase: sum(phases[phase].values()))


def peak_gib(step: Step) -> float:
    """Most memory that PyTorch's allocator hands out (torch.cuda.max_memory_allocated), GiB."""
    phases = estimate(step)
    return sum(phases[peak_phase(phases)].values())


def master_bytes(step: Step) -> float:
    """This rank's share of all parameters that are trained, in fp32."""
    trained = number_of_parameters(step.model)
    if step.adapters:
        trained = adapter_elements(step.model, step.adapters)
    return trained * step.wide / step.shards


def frozen_bytes(step: Step) -> float:
    """This rank's share of the parameters that are not trained, in training.dtype."""
    if not step.adapters:
        return 0
    return number_of_parameters(step.model) * step.width / step.shards


def _matrix(step: Step) -> int:
    return step.model.vocab_size * step.model.hidden_size


def _matrices(step: Step) -> int:
    """1 where the embedding is also the head, else 2."""
    return 1 if step.model.tied_embeddings else 2


def _block(step: Step) -> float:
    """Elements of one block's own weights."""
    in_blocks = number_of_parameters(step.model) - _matrices(step) * _matrix(step)
    return in_blocks / step.model.layers


def _gathered(step: Step, blocks: int) -> float:
    """Weights that FSDP has gathered, in training.dtype.

    Embedding and head are gathered from the forward to the end of the backward. In addition a block
    and the next one, and the buffer that the next one arrives in.
    """
    block = _block(step)
    if step.adapters:
        block += adapter_elements(step.model, step.adapters) / step.model.layers
    if not step.reshard_after_forward:
        # All blocks stay gathered after the forward.
        blocks = step.model.layers
    if blocks > 1 and step.shards > 1:
        blocks += 1
    return step.width * (_matrices(step) * _matrix(step) + blocks * block)


def _bytes(
    step: Step, hidden: float = 0, query: float = 0, kv: float = 0, intermediate: float = 0
) -> float:
    elements = hidden * step.tokens * step.model.hidden_size + query * step.query + kv * step.kv
    elements += intermediate * _mlp_tokens(step) * step.model.intermediate_size
    return step.width * elements


def _mlp_tokens(step: Step) -> int:
    """Tokens that an MLP computes at one time."""
    return min(step.mlp_chunk_tokens or step.tokens, step.tokens)


def _has_adapter(step: Step, *names: str) -> bool:
    """Whether one of these linear layers needs its input for a gradient: without adapters all do."""
    return step.adapters is None or any(name in step.adapters.targets for name in names)


def kept_by_block(step: Step) -> float:
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
        # Both norms with their inputs. q, k, v, and out by token, which the norms of q and k keep
        # once more. gate, up, their product, and without the compiler silu(gate). What only a frozen
        # matrix reads is not kept.
        norms = int(step.model.qk_norm)
        read_by_qkv = _has_adapter(step, "q_proj", "k_proj", "v_proj", "qkv_proj")
        read_by_mlp = _has_adapter(step, "gate_proj", "up_proj", "gate_up_proj")
        tensors_of_mlp = (2 if step.compiled else 3) + _has_adapter(step, "down_proj")
        kept = _bytes(
            step,
            hidden=2 + read_by_qkv + read_by_mlp,
            query=1 + _has_adapter(step, "o_proj") + norms,
            kv=2 + norms,
            intermediate=tensors_of_mlp * keeps_mlp,
        )
    # Attention's out and lse, which attention_recompute gives up. Without checkpointing nothing is
    # recomputed.
    kept_share = 1 if step.mode == "none" else 1 - step.recomputed
    attention = _bytes(step, query=1) + step.tokens * step.model.heads * step.wide
    # K and V of the gathered verticals.
    vectors = 2 * step.sequences * step.model.heads * step.verticals
    selection = step.index_bytes + vectors * step.model.head_dim * step.width
    return kept + _attention_layers(step) * (kept_share * attention + selection)


def _attention_layers(step: Step) -> float:
    """The share of layers that have attention; the others have linear attention."""
    return 1 - len(getattr(step.model, "linear_layers", ())) / step.model.layers


def _linear_attention(step: Step) -> float:
    """Bytes that the backward of a layer of linear attention needs at one time.

    q, k, v and gate before and after the convolution, with their gradients; the state that each 64
    tokens begin with, and its gradient. Over several ranks, a second state goes beside it.
    """
    if not getattr(step.model, "linear_layers", ()):
        return 0
    states = 2 * step.model.linear_state / 64 * (2 if step.cp > 1 else 1)
    return step.width * step.tokens * (4 * step.model.linear_width + states)


def _kept(step: Step, blocks: int) -> float:
    """What `blocks` blocks keep on the device for their backward, and the tables that all share."""
    if step.offload:
        blocks = min(blocks, OFFLOAD_BUFFERS)
    rope = 2 * step.tokens * step.model.head_dim * step.wide
    # Three vectors of int32.
    mask = 3 * 4 * step.sequences * step.seq_len
    return blocks * kept_by_block(step) + rope + mask


def _block_forward(step: Step) -> float:
    """The worst point of a block's forward: its MLP, or the rotation of q."""
    # The residual, the second norm and the result, and silu of gate, up and their product. Without
    # recomputation the block keeps all but one of them, so they are counted there.
    mlp = _bytes(step, hidden=1)
    if step.mode != "none":
        # An adapter's product exists together with what it is added to.
        adapted = step.adapters is not None and _has_adapter(step, "up_proj", "gate_up_proj")
        mlp = _bytes(step, hidden=3, intermediate=4 if adapted else 3)
    # In fp32: q, its rotated half, and their results.
    rotary = 0 if step.compiled else _bytes(step, hidden=1, query=11)
    if step.mode == "none":
        # When q is rotated, most of what the block will keep does not exist yet.
        rotary -= kept_by_block(step) - _bytes(step, hidden=2, query=1, kv=2)
    return max(mlp, rotary)


def _loss(step: Step) -> float:
    """What the loss needs.

    Hidden states before and after the last norm and their gradient, the head's gradient in fp32, and
    one chunk of logits in fp32. The logits' gradient takes their place. It comes with a gradient of
    hidden states in fp32.
    """
    chunk_tokens = min(step.loss_chunk_tokens, step.tokens)
    chunk = chunk_tokens * (step.model.vocab_size + step.model.hidden_size)
    head_gradient = 0 if step.adapters else _matrix(step)
    return _bytes(step, hidden=3) + (head_gradient + chunk) * step.wide


def _backward(step: Step, held: float, blocks_left: int) -> dict[str, float]:
    """The backward of a block while it and others, `blocks_left` blocks, still keep their tensors.

    held: bytes of gradients of earlier forwards.
    """
    blocks_done = step.model.layers - blocks_left
    if step.adapters:
        block = adapter_elements(step.model, step.adapters) / step.model.layers
        head = 0
    else:
        block = _block(step)
        head = _matrix(step)
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


def _block_backward(step: Step) -> float:
    """The most that one block's backward needs in addition to what the block has kept.

    The worst point is in its MLP or in its attention. In the MLP it is silu's backward, when the
    gradients of gate and up have just been made. From the forward there are both norms, the residual,
    q, k, v, out by token, gate, up and their product, except for what was kept. Then the gradients of
    the block's output, of the product, of gate and of up. The compiler frees what it does not need,
    or computes it later. During attention's backward the gradients of out, q, k and v are alive, and
    nothing of the MLP.
    """
    model = step.model
    # q, v and gate were kept.
    selective = int(step.mode == "selective")
    if step.mode == "none":
        mlp = _bytes(step, hidden=1, intermediate=3)
        attention = _bytes(step, hidden=2, query=4, kv=3)
    elif step.compiled:
        of_adapters = 0
        in_mlp = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
        has_adapters = step.adapters is not None and _has_adapter(step, *in_mlp)
        if has_adapters and not step.mlp_chunk_tokens and not selective:
            # The adapters' outputs, those of the frozen layers, and the gradients of both. Measured
            # on an H200 with torch 2.11: 38.3 GiB in tests/estimate/test_memory.py.
            of_adapters = 5
        mlp = _bytes(step, hidden=3, query=1, intermediate=6 - selective + of_adapters)
        attention = _bytes(step, hidden=5, query=5, kv=5)
    else:
        rotated = 2 + int(model.qk_norm) - selective
        mlp = _bytes(step, hidden=4, query=rotated, kv=rotated, intermediate=6 - selective)
        attention = _bytes(step, hidden=5, query=7, kv=5)
    if step.mlp_chunk_tokens and not step.adapters:
        # The weights' gradients are summed over chunks in fp32.
        mlp += 3 * model.hidden_size * model.intermediate_size * step.wide
    if step.float8 and step.float8_recipe == "tensorwise":
        # Both operands of a matmul, a byte an element.
        mlp += _mlp_tokens(step) * (model.hidden_size + model.intermediate_size)
    elif step.float8:
        # The weights' gradients have bf16 operands, which are kept too (measured: docs/training.md).
        mlp += _mlp_tokens(step) * 8 * model.intermediate_size
    # A block whose attention is recomputed did not keep out, which now exists again.
    recomputed_out = step.recomputed * _bytes(step, query=1)
    attention += attention_workspace(step)
    return max(mlp, attention, _linear_attention(step)) + recomputed_out


def _embedding(step: Step, gradients: float) -> dict[str, float]:
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
        # The gradient that the look-up reads.
        kept += _bytes(step, hidden=1)
    return {"gradients": gradients, "kept for backward": kept}
