"""The pictures of the docs: their numbers are those of a dense softmax and of the planner."""

import pytest
import torch
from matplotlib.figure import Figure

from scripts.docs import draw_attention, draw_head, draw_timeline
from scripts.study.real_model import write_toy_model
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.estimate.planner import table_of

TOKENS, SIZE = 192, 16


@pytest.mark.parametrize("name, layout", [("prefix_lm", "zigzag"), ("sinks", "balanced")])
def test_work_of_the_ranks(tmp_path, name, layout):
    mask, out = draw_attention.EXAMPLES[name](TOKENS), tmp_path / "new" / "picture.png"
    index = draw_attention.select("dense", mask, TOKENS, SIZE)
    work = draw_attention.picture(mask, index, layout, 3, "title", str(out))
    by_block = mask.dense(TOKENS)[0].sum(-1).unflatten(0, (-1, SIZE)).sum(-1)
    assert torch.equal(work, by_block[table_of(mask.rows(TOKENS), layout, 3, SIZE)].sum(-1))
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 10_000


def test_head_of_a_toy_model(tmp_path, monkeypatch):
    tokens = 512
    monkeypatch.setattr(draw_head, "BLOCK", 32)
    write_toy_model(tmp_path / "toy")
    q, k = draw_head.queries_and_keys(tmp_path / "toy", 1, tokens)
    head = draw_head.look(q, k, 3)

    # The pairs that the picture draws, from its own lists.
    keys = torch.arange(tokens)
    blocks = keys // 32
    drawn = torch.isin(blocks[:, None] - blocks, head.slashes)
    drawn |= torch.isin(keys, head.verticals) | (keys < head.sinks)
    drawn &= Causal().dense(tokens)[0]
    logits = q[0, 3] @ k[0, 1].T * q.shape[-1] ** -0.5
    mass = logits.masked_fill(~Causal().dense(tokens)[0], -torch.inf).softmax(-1)
    assert head.density == pytest.approx(drawn.sum().item() / (tokens * (tokens + 1) / 2))
    assert head.recall == pytest.approx((mass * drawn).sum().item() / tokens, abs=1e-5)
    assert head.mass.max() == mass.max()
    assert 0 < head.density < 1
    *_, axes = draw_head.draw(head, tokens, "a toy").axes
    slash, vertical, sinks = [text.xy for text in axes.texts]
    query, key = round(slash[1]), round(slash[0])
    assert (query - key) / 32 == head.slashes.max()
    assert vertical[0] in head.verticals.tolist() and vertical[1] >= vertical[0]
    assert sinks[0] < head.sinks
    with pytest.raises(ValueError, match="has 2 layers"):
        draw_head.queries_and_keys(tmp_path / "toy", 2, tokens)


def test_bars_end_with_the_planned_pass(tmp_path):
    plans = draw_timeline.plans_of(65536, 0.05)
    assert list(plans) == list(draw_timeline.SCHEDULE_NAMES)
    for name, plan in plans.items():
        axes = Figure().subplots()
        draw_timeline.draw(axes, name, plan)
        ends = [patch.get_x() + patch.get_width() for patch in axes.patches]
        assert max(ends) == pytest.approx(1e3 * plan.forward.seconds)
    out = tmp_path / "new" / "timeline.png"
    draw_timeline.main(["--tokens", "65536", "--out", str(out)])
    assert out.stat().st_size > 10_000
