"""Which ranks need which chunks, by the mask and by the index, against a check of every pair."""

from unittest.mock import Mock

import pytest
import torch

from tests.attention.collectives import collectives, counts
from tests.attention.context_parallel.against_one import mesh_of
from tests.attention.problems import computed_blocks
from tests.fake_step import fake_world
from tests.reference import structured_qkv
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.context_parallel import needed_keys
from titan_sparse.attention.context_parallel.layouts import block_ids
from titan_sparse.attention.context_parallel.needed_keys import met_blocks
from titan_sparse.attention.masks.ranges import Causal, Documents
from titan_sparse.attention.masks.visibility import seen_chunks
from titan_sparse.attention.patterns import VerticalSlash

eager = BACKENDS["eager"]

BLOCK = 16
RANKS = 4
SEQ_LEN = 2 * RANKS * 2 * BLOCK
LOCAL = VerticalSlash(
    recall=0.5, sinks=0, local_slashes=2, max_verticals=0, max_slashes=1, dense_below=BLOCK
)
"""Two diagonals, another one where the probe finds it, and no verticals."""
MASKS = {
    "causal": Causal(),
    "packed": Documents([SEQ_LEN // 2 + 5, 40, SEQ_LEN // 2 - 45]),
    "short documents": Documents([12] * (SEQ_LEN // 12)),
}


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", MASKS)
def test_chunks_that_no_diagonal_meets_are_not_needed(name, layout):
    q, k, _ = structured_qkv(1, 2, 1, SEQ_LEN, 8)
    for seed in range(2):
        ranges = MASKS[name].rows(SEQ_LEN)._replace(probe_seed=torch.tensor(seed))
        index = LOCAL.select(q, k, ranges, block_size=BLOCK)
        table = block_ids(layout, RANKS, SEQ_LEN, BLOCK)
        met = met_blocks(ranges, index, table)[:, table].any(-1)
        needed = met & seen_chunks(ranges, table, BLOCK)
        computed = computed_blocks(index, MASKS[name])
        assert torch.equal(needed, computed[table].any(1)[:, table].any(-1))


def test_hops_and_work_that_the_index_saves(monkeypatch):
    """By hand, for rank 0 of a contiguous ring. Each rank needs the chunk before its own."""
    forward = Mock(side_effect=eager.forward)
    monkeypatch.setattr(eager, "forward", forward)
    with fake_world(RANKS):
        mesh = mesh_of((RANKS,))
        cp = ContextParallel(mesh, "contiguous", "ring", BLOCK)
        # Each query attends to its own key, so that no distant slash is chosen.
        generator = torch.Generator().manual_seed(0)
        k = 6 * torch.randn(1, 1, SEQ_LEN, 32, dtype=torch.float64, generator=generator)
        inputs = (k.repeat(1, 2, 1, 1), k, k.clone())
        q, k, v = [cp.shard(x, 2).requires_grad_() for x in inputs]
        with collectives() as said:
            out = attend(q, k, v, Causal(), LOCAL, cp, "eager")
        hops = counts(said)
        # Its chunk goes to rank 1. No other chunk comes so far; it computes on its own.
        assert (hops["send"], hops["receive"], forward.call_count) == (1, 0, 1)
        with collectives() as said:
            out.sum().backward()
        hops = counts(said)
        # Its chunk once more. Of the gradients its own comes home, and those of chunks 1 and 2 pass
        # by on their way from ranks 2 and 3.
        assert (hops["send"], hops["receive"]) == (3, 3)
        # The host does not wait for the index where the mask decides.
        monkeypatch.setattr(needed_keys, "met_blocks", None)
        cp = ContextParallel(mesh, "contiguous", "ring", BLOCK, route_by="mask")
        attend(q, k, v, Causal(), LOCAL, cp, "eager")
