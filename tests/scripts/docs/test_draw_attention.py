"""The pictures of scripts.docs.draw_attention: written, and their bars are the pairs that each rank computes."""

import pytest
import torch

from scripts.docs import draw_attention
from titan_sparse.estimate.planner import table_of

TOKENS, SIZE = 192, 16


@pytest.mark.parametrize(
    "name, layout",
    [
        ("prefix_lm", "zigzag"),
        ("sinks", "balanced"),
    ],
)
def test_work_of_the_ranks(tmp_path, name, layout):
    mask, out = draw_attention.EXAMPLES[name](TOKENS), tmp_path / "new" / "picture.png"
    index = draw_attention.select("dense", mask, TOKENS, SIZE)
    work = draw_attention.picture(mask, index, layout, 3, "title", str(out))
    by_block = mask.dense(TOKENS)[0].sum(-1).unflatten(0, (-1, SIZE)).sum(-1)
    assert torch.equal(work, by_block[table_of(mask.rows(TOKENS), layout, 3, SIZE)].sum(-1))
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 10_000
