"""The memory estimate: against the bytes of the real model's step on fake tensors, by phase."""

import dataclasses

import pytest

from tests.fake_step import peaks_of_a_step
from titan_sparse import memory
from titan_sparse.memory import Step, estimate, peak_gib, peak_phase
from titan_sparse.models.flavours import FLAVOURS

# Published shapes with few layers: tied with biases; head of its own; queries wider than the model, with their norms.
SHAPES = {
    "qwen2.5-0.5b": (dataclasses.replace(FLAVOURS["qwen2.5-0.5b"], layers=3), 32768, 1),
    "llama3.1-8b": (dataclasses.replace(FLAVOURS["llama3.1-8b"], layers=3), 16384, 4),
    "qwen3-0.6b": (dataclasses.replace(FLAVOURS["qwen3-0.6b"], layers=3), 65536, 2),
}


@pytest.mark.parametrize("mode", ["full", "selective", "none"])
@pytest.mark.parametrize("shape", SHAPES)
def test_estimate_is_what_fake_tensors_count(monkeypatch, shape, mode):
    model, tokens, ranks = SHAPES[shape]
    step = Step(model=model, sequences=1, seq_len=tokens, shards=ranks, mode=mode, optimizer_scratch=True, loss_chunk_tokens=1024)
    monkeypatch.setattr(memory, "_workspace", lambda step: 0)  # fake attention takes none
    block, loss, *backward, optimizer = (sum(parts.values()) for parts in estimate(step).values())
    counted = peaks_of_a_step(monkeypatch, model, mode, tokens, ranks, 1024)
    print([f"{a:.2f} {b:.2f} {a / b:.3f}" for a, b in zip((max(block, loss), max(backward), optimizer), counted)])
    assert max(block, loss) == pytest.approx(counted[0], rel=0.1)
    assert max(backward) == pytest.approx(counted[1], rel=0.1)
    assert optimizer == pytest.approx(counted[2], rel=0.1)
