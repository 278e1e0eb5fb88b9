"""Single parts of the memory estimate, added up by hand."""

import dataclasses

import pytest

from titan_sparse.estimate.memory import GIB, Step, estimate
from titan_sparse.models.flavours import FLAVOURS

TOKENS = 4096
HIDDEN, INTERMEDIATE, VOCABULARY, LAYERS = 64, 512, 1000, 3
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
# The MLP is so wide that its backward is the worst point of a block's.
MODEL = dataclasses.replace(
    FLAVOURS["debug"],
    hidden_size=HIDDEN,
    intermediate_size=INTERMEDIATE,
    vocab_size=VOCABULARY,
    layers=LAYERS,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    qkv_bias=False,
    qk_norm=False,
    tied_embeddings=True,
)
STEP = Step(model=MODEL, sequences=1, seq_len=TOKENS, backend="triton", compiled=True)
BACKWARD = "backward of the last block"


def part(step: Step, phase: str, name: str) -> float:
    """Bytes."""
    return estimate(step)[phase][name] * GIB


def added(phase: str, name: str, **changes) -> float:
    """Bytes that a part has more with these changes."""
    return part(dataclasses.replace(STEP, **changes), phase, name) - part(STEP, phase, name)


def exactly(size: float) -> object:
    return pytest.approx(size, rel=1e-9)


def test_float8_keeps_operands():
    """tensorwise: both, a byte an element. rowwise: eight bytes an intermediate element."""
    name = "block and attention"
    tensorwise = added(BACKWARD, name, float8=True, float8_recipe="tensorwise")
    rowwise = added(BACKWARD, name, float8=True, float8_recipe="rowwise")
    assert tensorwise == exactly(TOKENS * (HIDDEN + INTERMEDIATE))
    assert rowwise == exactly(TOKENS * 8 * INTERMEDIATE)


def test_a_chunked_mlp_sums_its_weights_gradients():
    """In fp32. One chunk of all tokens saves nothing else."""
    more = added(BACKWARD, "block and attention", mlp_chunk_tokens=TOKENS)
    assert more == exactly(3 * HIDDEN * INTERMEDIATE * 4)


def test_every_block_keeps_its_selection():
    """The index, and keys and values of the gathered verticals."""
    more = added("loss", "kept for backward", index_bytes=1000, verticals=256)
    assert more == exactly(LAYERS * (1000 + 2 * HEADS * 256 * HEAD_DIM * 2))


def test_what_all_blocks_share():
    """cos and sin in fp32, three int32 of the mask, and the gradient that the embedding reads."""
    kept = part(STEP, "gradient of the embedding", "kept for backward")
    assert kept == exactly(2 * TOKENS * HEAD_DIM * 4 + 3 * TOKENS * 4 + TOKENS * HIDDEN * 2)


# Queries and out, keys and values; gate, up and down; two norms.
BLOCK = HIDDEN * 2 * (HEADS + KV_HEADS) * HEAD_DIM + 3 * HIDDEN * INTERMEDIATE + 2 * HIDDEN
# The last norm lies in no block, and is counted as if it did.
BLOCK += HIDDEN / LAYERS
EMBEDDING = VOCABULARY * HIDDEN


@pytest.mark.parametrize(
    "shards, reshards, phase, elements",
    [
        (1, True, "loss", EMBEDDING),
        # The last block stays gathered for its backward.
        (4, True, "loss", EMBEDDING + BLOCK),
        # A block, the next one, and the buffer that it arrives in.
        (4, True, BACKWARD, EMBEDDING + 3 * BLOCK),
        (1, False, "loss", EMBEDDING + LAYERS * BLOCK),
        (4, False, BACKWARD, EMBEDDING + (LAYERS + 1) * BLOCK),
    ],
)
def test_gathered_weights(shards, reshards, phase, elements):
    step = dataclasses.replace(STEP, shards=shards, reshard_after_forward=reshards)
    assert part(step, phase, "gathered weights") == exactly(2 * elements)
