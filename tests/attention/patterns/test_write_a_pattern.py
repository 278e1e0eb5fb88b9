"""The example of docs/write_a_pattern.md: one rank against brute force, two ranks against one; and
what a class of patterns from outside of the package may do."""

import dataclasses
import pickle
import sys
import types
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from tests.attention.context_parallel.against_one import MASKS, check, check_everything, mesh_of
from tests.attention.problems import RANGES, SEQ_LEN, assert_equal, problem
from tests.distributed import run_processes
from tests.docs.commands import ROOT, blocks
from tests.reference import dense_attention, structured_qkv
from tests.refusals import refused
from titan_sparse import attend
from titan_sparse.attention import ContextParallel
from titan_sparse.attention.masks import Causal, Dilated, Mask, Slices, documents
from titan_sparse.attention.observe import recording
from titan_sparse.attention.patterns import BlockPattern, Dense, Pattern

BLOCK = 16
PAGE = ROOT / "docs" / "write_a_pattern.md"


def example() -> type[Pattern]:
    """TopBlocks, as the page has it. Its module can be imported, as that of a user."""
    if "top_blocks" not in sys.modules:
        module = types.ModuleType("top_blocks")
        sys.modules["top_blocks"] = module
        [block] = blocks(PAGE, "python")
        exec(compile(block, str(PAGE), "exec"), vars(module))
    return sys.modules["top_blocks"].TopBlocks


def _by_hand(q: Tensor, k: Tensor, mask: Mask, most: int) -> Tensor:
    """bool [B, Hq, S, S], block by block."""
    batch, heads, seq_len, _ = q.shape
    seen = mask.dense(seq_len)
    chosen = torch.zeros(batch, heads, seq_len, seq_len, dtype=torch.bool)
    spans = [slice(first, first + BLOCK) for first in range(0, seq_len, BLOCK)]
    for b, h in torch.cartesian_prod(torch.arange(batch), torch.arange(heads)).tolist():
        keys = k[b, h // (heads // k.shape[1])]
        for here in spans:
            of_mask = seen[b if len(seen) > 1 else 0, here]
            scores = {}
            for there in spans:
                if of_mask[:, there].any():
                    mean_of_queries = q[b, h, here].mean(0)
                    scores[there.start] = (mean_of_queries @ keys[there].mean(0)).item()
            best = sorted(scores, key=scores.get, reverse=True)[:most]
            for start in {*best, here.start}:
                chosen[b, h, here, start : start + BLOCK] = True
    return chosen & seen[:, None]


@pytest.mark.parametrize("name", ["causal", "documents", "windowed documents"])
def test_one_rank_against_brute_force(name):
    mask = RANGES[name]
    p = problem((4, 2), mask, example()(most=2), BLOCK)
    q, k, _ = p.inputs
    seen = _by_hand(q, k, mask, 2)
    assert 0.2 < seen.sum() / mask.dense(SEQ_LEN).expand(2, -1, -1).sum() / 4 < 0.95
    assert_equal(p.results(), p.wanted(seen))
    assert torch.equal(p.pattern.select(q, k, mask, block_size=BLOCK).dense(mask), seen)


def test_compiled_and_ragged():
    q, k, v = structured_qkv(1, 4, 2, 100, 8)
    pattern = example()(most=1)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    want = attend(q, k, v, pattern=pattern, block_size=BLOCK)
    got = compiled(q, k, v, pattern=pattern, block_size=BLOCK)
    assert torch.equal(got, want)
    assert not torch.allclose(want, attend(q, k, v, block_size=BLOCK))


def _check_ranks() -> None:
    torch.set_num_threads(1)
    pattern = example()(most=2)
    # Every schedule and layout by turns, masks, gradients, sinks, and recomputed parts.
    check_everything((2,), MASKS[:4], [pattern], (4, 2), every=3)
    cp = ContextParallel(mesh_of((2,)), block_size=SEQ_LEN // 8)
    check(problem((4, 2), Causal(), pattern), cp)


def test_two_ranks_are_one():
    run_processes(2, _check_ranks)


def test_a_class_that_is_defined_again_is_another_pattern():
    """A notebook runs a cell again: the old class must not answer for the new one."""
    q, k, v = structured_qkv(1, 2, 2, 128, 8)

    def define(selects: bool) -> type[Pattern]:
        class Mine(BlockPattern):
            name: ClassVar[str] = "mine"

            def select_blocks(self, q, k, ranges, cp, scale) -> Tensor:
                n, blocks = q.shape[2] // cp.block_size, ranges.start.shape[1] // cp.block_size
                selected = torch.full((*q.shape[:2], n, blocks), selects)
                return selected | (cp.blocks(ranges)[:, None] == torch.arange(blocks))

        return dataclasses.dataclass(Mine)

    local, everything = define(False)(), define(True)()
    assert local.name == everything.name == "mine" and local.key != everything.key
    outs = [attend(q, k, v, pattern=x, block_size=BLOCK) for x in (local, everything)]
    torch.testing.assert_close(outs[1], attend(q, k, v, Causal(), Dense(), block_size=BLOCK))
    assert not torch.allclose(*outs)


@pytest.mark.parametrize(
    "returned",
    [
        lambda good: good[..., :-1],
        lambda good: good[:, :1],
        lambda good: good[:1],
        lambda good: good[0],
        lambda good: good.float(),
        lambda good: (good,),
    ],
)
def test_a_selection_of_another_shape_is_refused(returned):
    """Of fewer blocks it would hide keys. As numbers it would select what they do not say."""

    @dataclasses.dataclass
    class Wrong(BlockPattern):
        name: ClassVar[str] = "wrong"

        def select_blocks(self, q, k, ranges, cp, scale) -> Tensor:
            return returned(torch.ones(2, 4, 7, 7, dtype=torch.bool))

    q, k, v = structured_qkv(2, 4, 2, 100, 8)
    with refused(r"Wrong.select_blocks\(\) returned .*; write bool \[2, 4, 7, 7\]"):
        attend(q, k, v, pattern=Wrong(), block_size=BLOCK)


@pytest.mark.parametrize(
    "mask", [Dilated(90, 3) & Causal(), Slices.batch([documents([60, 68]), documents([99])])]
)
def test_recall_of_a_pattern_that_takes_slices(mask):
    @dataclasses.dataclass
    class Local(BlockPattern):
        name: ClassVar[str] = "local"
        takes_slices: ClassVar[bool] = True

        def select_blocks(self, q, k, ranges, cp, scale) -> Tensor:
            near = torch.eye(q.shape[2] // cp.block_size, dtype=torch.bool)
            return near.expand(*q.shape[:2], -1, -1)

    p = problem((4, 2), mask, Local(), BLOCK)
    q, k, v = p.inputs
    with recording(recall_rows=SEQ_LEN) as seen:
        p.attend(q, k, v)
    allowed = mask.dense(SEQ_LEN)[:, None].expand(2, 4, -1, -1)
    computed = allowed & p.pattern.select(q, k, mask, block_size=BLOCK).dense(mask)
    kept, total = (dense_attention(q, k, v, pairs)[1] for pairs in (computed, allowed))
    rows = allowed.any(-1)
    wanted = torch.where(rows, (kept - total).exp(), 0).sum((0, 2)) / rows.sum((0, 2))
    torch.testing.assert_close(seen.recall[0], wanted, rtol=1e-9, atol=0)
    assert wanted.max() < 0.9


def test_values_of_options():
    top_blocks = example()
    assert top_blocks(3) == top_blocks(3) and hash(top_blocks(3)) == hash(top_blocks(3))
    assert pickle.loads(pickle.dumps(top_blocks(3))).key == top_blocks(3).key
    with pytest.raises(ValueError, match=r"top_blocks.most = 0 is out of range; write 1 or more"):
        top_blocks(0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        top_blocks(3).most = 4

    @dataclasses.dataclass
    class WithPath(BlockPattern):
        name: ClassVar[str] = "with_path"
        where: Path = Path(".")

    with pytest.raises(ValueError, match="with_path.where: an option is an int, float, bool"):
        WithPath()

    @dataclasses.dataclass
    class Nameless(BlockPattern):
        most: int = 1

    with pytest.raises(TypeError, match="Nameless has no name; write name: ClassVar"):
        Nameless()

    @dataclasses.dataclass
    class WithTable(BlockPattern):
        """Two of them would have one key, and each would be computed as the newer one."""

        name: ClassVar[str] = "with_table"
        most: int = 1

        def __init__(self, table: Tensor):
            self.table = table
            self.__post_init__()

    with pytest.raises(TypeError, match="WithTable.table is not an option; write it as a field"):
        WithTable(torch.ones(3))
