"""Memory of a training step on one rank, from shapes alone: what the banner, --dry-run and --find-max-length go by.

A step is a few phases, and its peak is that of the worst one, not the sum of everything. What a block keeps and what is
alive at the worst point of its backward is counted in four units, bytes of a [tokens, width] tensor in training.dtype:
hidden (H), query (Q: all query heads), kv (K: all KV heads) and intermediate (I). The counts were read off the real model
(tests/estimate/test_memory.py runs it on fake tensors; with torch.compile, off the allocations of compiled blocks). docs/memory.md
explains the parts.
"""

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import torch

from titan_sparse.attention.patterns import Pattern
from titan_sparse.config import padding_multiple, resolve_cp_intra, resolve_overlap_stages
from titan_sparse.config.sections import KINDS
from titan_sparse.from_config import schedule_named
from titan_sparse.models.flavours import DecoderConfig, number_of_parameters

if TYPE_CHECKING:
    from titan_sparse.config import Config

GIB = 2**30

LEVERS = {
    "attention_recompute": "activation_checkpoint.attention_recompute",
    "offload": "activation_checkpoint.offload",
    "mlp_chunk_tokens": "training.mlp_chunk_tokens",
    "offload_optimizer": "optimizer.offload",
    "float8": "float8.enable",
    "float8_recipe": "float8.recipe",
}
"""Fields of Step that are options of their own: where the configuration has them. Those it does not have keep the default."""

OFFLOAD_BUFFERS = 3
"""Blocks whose kept tensors are on the GPU at one time while they are offloaded."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What memory depends on. Sizes are those of one rank; seq_len is the padded global length.

    width: bytes of an element in training.dtype. index_bytes, columns, most_blocks: of one layer's selection, what it
    keeps, the gathered columns a head, and a bound on the KV blocks that a query block meets. inter, overlap_stages: of the
    schedule group_cast, whose ranks are taken to need every block.
    """

    model: DecoderConfig
    sequences: int
    seq_len: int
    width: int = 2
    shards: int = 1
    cp: int = 1
    schedule: str = "local"
    inter: int = 1
    overlap_stages: tuple[int, int] = (2, 2)
    gradient_width: int = 4
    mode: str = "full"
    compiled: bool = False
    backend: str = "eager"
    block_size: int = 128
    index_bytes: int = 0
    verticals: int = 0
    most_blocks: int = 0
    optimizer_states: int = 2
    optimizer_scratch: bool = False
    accumulates: bool = False
    reshard_after_forward: bool = True
    loss_chunk_tokens: int = 2048
    attention_recompute: float = 0.0
    offload: bool = False
    mlp_chunk_tokens: int = 0
    offload_optimizer: bool = False
    float8: bool = False
    float8_recipe: str = "rowwise"

    @property
    def tokens(self) -> int:
        """Tokens of this rank in one forward."""
        return self.sequences * self.seq_len // self.cp

    @property
    def wide(self) -> int:
        """Bytes of an element of weights, gradients, optimizer states and sums: fp32, or fp64 for fp64."""
        return max(self.width, 4)


class Units(NamedTuple):
    """Numbers of [tokens, width] tensors."""

    hidden: float = 0
    query: float = 0
    kv: float = 0
    intermediate: float = 0


def estimate(step: Step) -> dict[str, dict[str, float]]:
    """GiB by phase and part. The peak of the step is that of the phase with the largest sum: peak_phase()."""
    phases = {
        "forward of the last block": _forward(step),
        "loss": _loss(step),
        "backward of the last block": _backward(step, blocks_left=step.model.layers),
        "backward of the first block": _backward(step, blocks_left=1),
        "gradient of the embedding": _embedding(step),
        "optimizer step": _optimizer(step),
    }
    return {
        phase: {part: size / GIB for part, size in parts.items()} for phase, parts in phases.items()
    }


def peak_phase(phases: dict[str, dict[str, float]]) -> str:
    """The phase that needs the most."""
    return max(phases, key=lambda phase: sum(phases[phase].values()))


def peak_gib(step: Step) -> float:
    """Most memory that PyTorch's allocator hands out (torch.cuda.max_memory_allocated), GiB."""
    return max(sum(parts.values()) for parts in estimate(step).values())


# Phases: each says by part, in bytes, what is alive ---------------------------------------------------------------------


def _forward(step: Step) -> dict[str, float]:
    # The residual, the second norm, what comes out; gate's silu, up and their product. Without recomputation they are kept.
    mlp = _bytes(step, Units(1) if step.mode == "none" else Units(3, 0, 0, 3), _mlp_tokens(step))
    rotary = (
        0 if step.compiled else _bytes(step, Units(1, 11))
    )  # fp32: q, its rotated half and what becomes of them
    if step.mode == "none":  # when q is rotated, most of what the block will keep is not there yet
        rotary -= _kept(step, 1) - _kept(step, 0) - _bytes(step, Units(2, 1, 2))
    return _before_backward(step, blocks=2) | {"block and attention": max(mlp, rotary)}


def _loss(step: Step) -> dict[str, float]:
    return _before_backward(step, blocks=1 if step.shards > 1 else 0) | {"loss": _loss_tile(step)}


def _before_backward(step: Step, blocks: int) -> dict[str, float]:
    """At the end of the forward; blocks: how many's weights are gathered."""
    return _standing(step) | {
        "gradients": _gradient_bytes(step) if step.accumulates else 0,
        "gathered weights": _gathered(step, blocks),
        "kept for backward": _kept(step, step.model.layers),
    }


def _backward(step: Step, blocks_left: int) -> dict[str, float]:
    """The backward of a block when `blocks_left` blocks, itself included, have not given up what they keep."""
    done = step.model.layers - blocks_left
    embedding, block, _ = _parameters(step)
    reduced = 0 if step.offload_optimizer else block * done * step.wide / step.shards
    gradients = _gradient_bytes(step) if step.accumulates else reduced
    # The head's gradient waits for the end; a block's is there whole when it is reduced, beside the one before.
    gradients += _head(step) * step.width + block * step.width + (block * step.wide if done else 0)
    return _standing(step) | {
        "gradients": gradients,
        "gathered weights": _gathered(step, blocks=2),
        "kept for backward": _kept(step, blocks_left),
        "block and attention": _block_peak(step),
    }


def _embedding(step: Step) -> dict[str, float]:
    """The end of the backward: embedding, last norm and head are reduced together, in fp32, their gathered weights freed. A
    tied embedding has one gradient from the loss and one from the look-up until they are added."""
    embedding = _parameters(step)[0]
    unsharded = embedding * (step.width + step.wide) + (
        _head(step) * step.width if step.model.tied_embeddings else 0
    )
    return _standing(step) | {
        "gradients": _gradient_bytes(step) + unsharded,
        "kept for backward": _kept(step, 0) + _bytes(step, Units(hidden=1)),
    }


def _optimizer(step: Step) -> dict[str, float]:
    scratch = _gradient_bytes(step) if step.optimizer_scratch and not step.offload_optimizer else 0
    return _standing(step) | {"gradients": _gradient_bytes(step), "optimizer's scratch": scratch}


# Weights ---------------------------------------------------------------------------------------------------------------


def _parameters(step: Step) -> tuple[float, float, float]:
    """Elements of embedding (and head), of one block, and bytes of this rank's share of everything in fp32."""
    model, everything = step.model, number_of_parameters(step.model)
    embedding = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    return embedding, (everything - embedding) / model.layers, everything * step.wide / step.shards


def _head(step: Step) -> float:
    """Elements of the matrix that the loss reads."""
    return step.model.vocab_size * step.model.hidden_size


def _gradient_bytes(step: Step) -> float:
    """This rank's share of all gradients in fp32, which with optimizer.offload leave for the CPU when they are reduced."""
    return 0 if step.offload_optimizer else _parameters(step)[2]


def _gathered(step: Step, blocks: int) -> float:
    """Weights that FSDP has gathered in training.dtype: embedding and head from forward to the end of the backward, a
    block and the next one, and the buffer that they arrive in."""
    embedding, block, _ = _parameters(step)
    if not step.reshard_after_forward:
        blocks = step.model.layers
    arriving = block if blocks > 1 and step.shards > 1 else 0
    return step.width * (embedding + blocks * block + arriving)


def _standing(step: Step) -> dict[str, float]:
    """What is there in every phase."""
    master = 0 if step.offload_optimizer else _parameters(step)[2]
    parameters, states = master, master * step.optimizer_states
    return {
        "parameters": parameters,
        "optimizer states": states,
        "context-parallel buffers": _cp_buffers(step),
    }


# Activations -----------------------------------------------------------------------------------------------------------


def _bytes(step: Step, units: Units, tokens: int | None = None) -> float:
    """Bytes of that many tensors. tokens: those of the intermediate ones, where they are fewer."""
    model, width = step.model, step.width
    sizes = (model.hidden_size, model.heads * model.head_dim, model.kv_heads * model.head_dim)
    plain = sum(count * size for count, size in zip(units, sizes)) * step.tokens
    return width * (
        plain
        + units.intermediate * model.intermediate_size * (step.tokens if tokens is None else tokens)
    )


def _kept_units(step: Step) -> Units:
    """What a block keeps besides its lse. Mode full: its input and attention's out."""
    norms = int(step.model.qk_norm)  # they keep what comes in
    intermediate = 0 if step.mlp_chunk_tokens else 1
    if step.mode == "full":
        return Units(1, 1)
    if (
        step.mode == "selective"
    ):  # q, v, gate, and outside of the compiler, which sees that it is not needed, down
        return Units(1 if step.compiled else 2, 2, 1, intermediate)
    # Both norms, with what comes in; q, k, v, out twice; gate, up, their product; outside of the compiler silu(gate)
    return Units(4, 3 + norms, 2 + norms, (3 if step.compiled else 4) * intermediate)


def _recomputed_units(step: Step) -> Units:
    """What is alive besides at the worst point of a block's backward: silu's, with the gradients of gate and up just made.

    From the forward both norms, the residual, q, k, v, out by token, gate, up and their product; then the gradients of the
    block's output, of the product, of gate and of up. The compiler frees what it need not have, or makes it anew later.
    """
    norms = int(step.model.qk_norm)
    needs = Units(3, 1, 0, 6) if step.compiled else Units(4, 2 + norms, 2 + norms, 6)
    if step.mode == "full":
        return needs
    if step.mode == "selective":
        return needs._replace(
            query=max(needs.query - (0 if step.compiled else 1), 0),
            kv=max(needs.kv - 1, 0),
            intermediate=5,
        )
    return Units(1, 0, 0, 3)


def _attention_units(step: Step) -> Units:
    """The same during attention's backward: gradients of out, q, k and v besides, and nothing of the MLP any more."""
    if step.mode == "none":
        return Units(2, 4, 3)
    return Units(5, 5, 5) if step.compiled else Units(5, 7, 5)


def _kept(step: Step, blocks: int) -> float:
    """What `blocks` blocks keep for their backward, and the tables that all blocks share."""
    model, units = step.model, _kept_units(step)
    kept_attention = 1 - _recomputed_share(step) if step.mode != "none" else 1
    rest = _bytes(step, units._replace(query=units.query - 1))
    attention = _bytes(step, Units(query=1)) + step.tokens * model.heads * step.wide
    selection = (
        step.index_bytes
        + 2 * step.sequences * model.heads * step.verticals * model.head_dim * step.width
    )
    rope = 2 * step.tokens * model.head_dim * step.wide
    mask = 3 * 4 * step.sequences * step.seq_len
    on_device = min(blocks, OFFLOAD_BUFFERS) if step.offload else blocks
    return on_device * (rest + kept_attention * attention + selection) + rope + mask


def _recomputed_share(step: Step) -> float:
    """Of attention's results; a negative attention_recompute means as much as memory needs: it fits if all of it does."""
    return 1.0 if step.attention_recompute < 0 else step.attention_recompute


def _block_peak(step: Step) -> float:
    """The most that one block's backward needs besides what it has kept: in its MLP or in its attention."""
    tokens = _mlp_tokens(step)
    mlp = _bytes(step, _recomputed_units(step), tokens)
    if step.mlp_chunk_tokens:  # the weights' gradients are summed over chunks in fp32
        mlp += 3 * step.model.hidden_size * step.model.intermediate_size * step.wide
    if (
        step.float8 and step.float8_recipe == "tensorwise"
    ):  # both operands of a matmul, a byte an element
        mlp += tokens * (step.model.hidden_size + step.model.intermediate_size)
    elif step.float8:  # the weights' gradients are of bf16 operands, which are kept beside; measured: docs/memory.md
        mlp += tokens * 8 * step.model.intermediate_size
    attention = _bytes(step, _attention_units(step)) + _workspace(step)
    return max(mlp, attention) + _recomputed_share(step) * _bytes(step, Units(query=1))


def _mlp_tokens(step: Step) -> int:
    """Tokens that an MLP computes at one time."""
    return min(step.mlp_chunk_tokens or step.tokens, step.tokens)


def _loss_tile(step: Step) -> float:
    """Hidden states before and after the last norm, their gradient, that of the head in fp32, and one chunk of logits in
    fp32, whose gradient takes their place, with its fp32 gradient of hidden states."""
    chunk = min(step.loss_chunk_tokens, step.tokens)
    tile = chunk * (step.model.vocab_size + step.model.hidden_size) * step.wide
    return _bytes(step, Units(hidden=3)) + _head(step) * step.wide + tile


# Attention ---------------------------------------------------------------------------------------------------------------


def _workspace(step: Step) -> float:
    """What attention's backward takes besides its inputs and results (docs/benchmarks.md, "Peak memory")."""
    model, blocks = step.model, -(-step.tokens // step.block_size)
    query, kv = (step.tokens * heads * model.head_dim for heads in (model.heads, model.kv_heads))
    if step.backend == "eager":  # scores of a query block against all keys, a few of them
        return 3 * step.wide * step.sequences * model.heads * step.block_size * step.seq_len
    lists = (
        16 * blocks * step.most_blocks * (model.heads if step.verticals else 1)
    )  # full and partial, by query and by key
    size = max(0.17 * 2 * (query + kv) * step.width, lists)
    if (
        step.backend == "flex"
    ):  # FlashAttention-4 sums dq in fp32, and with grouped queries dk and dv
        size += step.wide * (query + (2 * kv if model.heads > model.kv_heads else 0))
    if step.schedule == "all_gather":  # dk and dv of the whole sequence, of two heads
        size += 2 * step.wide * kv * step.cp * min(2, model.kv_heads) / model.kv_heads
    elif (
        step.schedule == "group_cast" and step.cp > 1
    ):  # sums; a stage's blocks as sent and as received, their gradients
        part = (step.cp - 1) / step.overlap_stages[1]
        room = (
            _power_of_two(part * blocks) / blocks if step.backend == "flex" else part
        )  # which compiles for it
        size += step.wide * query + 2 * kv * (
            step.wide * (step.inter + 1) + (part + room) * (step.width + step.wide)
        )
    elif step.cp > 1:  # sums over chunks: dq, dk and dv; sent chunks
        size += step.wide * (query + 4 * kv)
    return size


def _cp_buffers(step: Step) -> float:
    """Buffers of received chunks, kept from call to call (docs/context_parallel.md, "Buffers")."""
    if step.cp == 1:
        return 0
    head = 2 * step.sequences * step.seq_len * step.model.head_dim
    if step.schedule == "all_gather":
        return 2 * head * step.width
    chunk = head * step.model.kv_heads / step.cp
    if (
        step.schedule == "group_cast"
    ):  # between nodes own blocks and those handed on; those of a stage; their gradients likewise
        stages, back = min(step.overlap_stages), step.overlap_stages[1]
        gradients = (step.cp - 1) / back + min(step.inter - 1, step.inter / back)
        held = step.inter if step.inter > 1 else 0
        return chunk * (
            step.width * (held + (step.cp - 1) / stages) + step.gradient_width * gradients
        )
    # Two in turn for each kind of hop, one where there is but one hop; and the chunk that a backward holds back.
    lengths = (
        (step.cp // step.inter, step.inter) if step.schedule == "double_ring" else (step.cp, 1)
    )
    inner, outer = (min(2, ranks - 1) for ranks in lengths)
    return chunk * ((inner + outer) * (step.width + step.gradient_width) + (inner > 0) * step.width)


def _power_of_two(blocks: float) -> int:
    """The first power of two from a number of blocks on."""
    return 1 << (math.ceil(blocks) - 1).bit_length()


# From the configuration ---------------------------------------------------------------------------------------------------


def step_of(
    config: "Config",
    model: DecoderConfig,
    pattern: Pattern,
    backend: str,
    world_size: int,
    local_world_size: int,
) -> Step:
    """The step that a checked configuration runs on `world_size` ranks. backend: of attention, "auto" resolved."""
    training, attention, parallelism = config.training, config.attention, config.parallelism
    intra = resolve_cp_intra(parallelism, local_world_size)
    inter = parallelism.cp // intra
    multiple, dtype = padding_multiple(config), getattr(torch, training.dtype)
    seq_len = -(-training.seq_len // multiple) * multiple
    foreach = config.optimizer.implementation == "foreach" or (
        config.optimizer.implementation == "auto" and training.device == "cpu"
    )
    return Step(
        model=model,
        sequences=training.local_batch_size,
        seq_len=seq_len,
        width=dtype.itemsize,
        shards=world_size // parallelism.dp_replicate,
        cp=parallelism.cp,
        schedule=schedule_named(attention, inter, intra),
        inter=inter,
        overlap_stages=resolve_overlap_stages(attention, inter),
        gradient_width=2 if attention.gradient_dtype == "bfloat16" else max(dtype.itemsize, 4),
        mode=config.activation_checkpoint.mode,
        compiled=config.compile.enable,
        backend=backend,
        block_size=attention.block_size,
        optimizer_states=0 if config.optimizer.name == "SGD" else 2,
        optimizer_scratch=foreach,
        accumulates=training.gradient_accumulation_steps > 1,
        reshard_after_forward=parallelism.reshard_after_forward,
        loss_chunk_tokens=training.loss_chunk_tokens,
        **_selection(config, model, pattern, seq_len),
        **{field: attrgetter(key)(config) for field, key in LEVERS.items() if key in KINDS},
    )


def _selection(
    config: "Config", model: DecoderConfig, pattern: Pattern, seq_len: int
) -> dict[str, int]:
    """index_bytes, columns and most_blocks of Step."""
    size, packed = config.attention.block_size, config.attention.mask == "documents"
    blocks = -(-seq_len // size)
    if not pattern.dynamic:
        return {"most_blocks": blocks}
    q = torch.empty(config.training.local_batch_size, model.heads, 1, model.head_dim, device="meta")
    kept = pattern.empty_tensors(q, seq_len, size, packed)
    bound = (
        pattern.most_blocks(seq_len, size, packed) if hasattr(pattern, "most_blocks") else blocks
    )
    return {
        "index_bytes": sum(x.nbytes for x in kept),
        "verticals": pattern.vertical_count(kept),
        "most_blocks": bound,
    }
