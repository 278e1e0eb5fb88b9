"""checkpoint_layers(): the same gradients, and attention runs once."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.integrations.transformers.families import BLOCK, assert_close, family, tokens
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.integrations.transformers import AttentionSettings, register
from titan_sparse.integrations.transformers.checkpointing import checkpoint_layers


class Counted(TorchDispatchMode):
    """How often our ops ran."""

    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "titan_sparse":
            self.ran.append(func.name())
        return func(*args, **(kwargs or {}))


def gradients(model) -> tuple[list[torch.Tensor], list[str]]:
    model.train()
    with Counted() as counted:
        loss = model(input_ids=tokens(1, 8 * BLOCK), labels=tokens(1, 8 * BLOCK)).loss
        found = torch.autograd.grad(loss, list(model.parameters()))
    return [loss.detach(), *found], counted.ran


def test_attention_runs_once():
    pattern = VerticalSlash(recall=0.5, sinks=1, max_columns=8, max_slashes=2, dense_below=16)
    register(AttentionSettings(pattern, block_size=BLOCK))
    model = family("qwen3")
    model.set_attn_implementation("titan_sparse")
    wanted, ops = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _, repeated = gradients(model)
    checkpoint_layers(model)
    found, kept = gradients(model)
    assert_close(found, wanted, 1e-6)
    assert sorted(kept) == sorted(ops)
    # What transformers' own checkpointing does, so that the count is known to see it.
    assert len(repeated) > len(ops)
