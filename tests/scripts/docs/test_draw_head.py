"""The picture of scripts.docs.draw_head: its numbers are those of a dense softmax, its arrows hit."""

import pytest
import torch

from scripts.docs import draw_head
from scripts.study.real_model import write_toy_model
from titan_sparse.attention.masks.ranges import Causal

TOKENS = 512


def test_head_of_a_toy_model(tmp_path, monkeypatch):
    monkeypatch.setattr(draw_head, "BLOCK", 32)
    write_toy_model(tmp_path / "toy")
    q, k = draw_head.queries_and_keys(tmp_path / "toy", 1, TOKENS)
    head = draw_head.look(q, k, 3)

    # The pairs that the picture draws, from its own lists.
    keys = torch.arange(TOKENS)
    blocks = keys // 32
    drawn = torch.isin(blocks[:, None] - blocks, head.slashes)
    drawn |= torch.isin(keys, head.verticals) | (keys < head.sinks)
    drawn &= Causal().dense(TOKENS)[0]
    logits = q[0, 3] @ k[0, 1].T * q.shape[-1] ** -0.5
    mass = logits.masked_fill(~Causal().dense(TOKENS)[0], -torch.inf).softmax(-1)
    assert head.density == pytest.approx(drawn.sum().item() / (TOKENS * (TOKENS + 1) / 2))
    assert head.recall == pytest.approx((mass * drawn).sum().item() / TOKENS, abs=1e-5)
    assert head.mass.max() == mass.max()
    assert 0 < head.density < 1

    *_, axes = draw_head.draw(head, TOKENS, "a toy").axes
    slash, vertical, sinks = [text.xy for text in axes.texts]
    query, key = round(slash[1]), round(slash[0])
    assert (query - key) / 32 == head.slashes.max()
    assert vertical[0] in head.verticals.tolist() and vertical[1] >= vertical[0]
    assert sinks[0] < head.sinks
    with pytest.raises(ValueError, match="has 2 layers"):
        draw_head.queries_and_keys(tmp_path / "toy", 2, TOKENS)
