"""What our attention does not compute in torchtitan is refused, in one line
that says what to write."""

import pytest
import torch
import torch.distributed as dist
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed import on_ranks
from tests.refusals import refused
from titan_sparse.attention import ContextParallel
from titan_sparse.attention.masks import Documents, SlidingWindow

if torch.__version__ < "2.14":
    pytest.skip("torchtitan 0.3 needs torch 2.14", allow_module_level=True)

from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC
from torchtitan.models import deepseek_v3, gpt_oss, llama3
from torchtitan.models.common.attention import VarlenAttention

from titan_sparse.integrations import torchtitan as ours
from titan_sparse.integrations.torchtitan.attention import mask_of_positions

ONE = "one rank:16"


def attention(models, name="debugmodel"):
    return models.model_registry(name).model.layers[0].attention


@pytest.mark.parametrize(
    ("cfg", "options", "words"),
    [
        (attention(deepseek_v3), {}, "deepseek_v3.*is not attention.*leave out the override"),
        (attention(llama3), {"recal": 0.9}, 'option of vertical_slash = "recal".*mean "recall"'),
        (attention(llama3), {"recall": 2.0}, "vertical_slash.recall = 2.0 is out of range"),
        (attention(llama3), {"load_balancer": "ptrr"}, 'write "headtail" or null'),
        (
            attention(llama3),
            {"schedule": "double_ring"},
            'schedule = "double_ring" is not .*"ring"',
        ),
        (attention(llama3), {"schedule": "Ulysses"}, 'did you mean "ulysses"'),
        (attention(llama3), {"backend": "cuda"}, 'backend = "cuda" is not one of "auto"'),
        (attention(llama3), {"block_size": 0}, "block_size = 0 is out of range; write 1"),
        (attention(llama3), {"block_size": 8192}, "dense_below = 8192 or more"),
    ],
)
def test_configurations(cfg, options, words):
    with refused(words):
        ours.vertical_slash(cfg, **options)


def test_a_window_of_varlen_attention():
    cfg = attention(llama3)
    cfg.inner_attention = VarlenAttention.Config(window_size=(63, 0))
    with refused(r"write \(-1, 0\)"):
        ours.dense(cfg)
    cfg.inner_attention = VarlenAttention.Config()
    assert ours.dense(cfg).inner_attention.window is None
    windows = [
        ours.dense(layer.attention).inner_attention.window
        for layer in gpt_oss.model_registry("debugmodel").model.layers
    ]
    assert windows[:2] == [128, None]


def test_memory_budget():
    with refused("activation_checkpoint:selective"):
        ours.save_attention(MemoryBudgetAC.Config())


def test_arguments_of_attention():
    module = ours.dense(attention(llama3)).inner_attention.build()
    q = torch.randn(1, 32, 4, 16)
    positions = torch.arange(32)[None]
    assert module(q, q, q, attention_masks=positions, score_mod=None).shape == q.shape
    with refused("score_mod is not computed.*leave it out"):
        module(q, q, q, attention_masks=positions, score_mod=lambda score, *_: score)
    with refused("reads the LSE"):
        module(q, q, q, attention_masks=positions, out_transform=lambda out, lse: out)


def test_positions():
    with refused("one position per token"):
        mask_of_positions(torch.zeros(1, 8, 3), ONE, None)
    budget = functorch_config.patch(activation_memory_budget=0.5)
    with budget, pytest.raises(ValueError, match="activation_checkpoint:selective"):
        mask_of_positions(torch.arange(8)[None], ONE, None)


def test_masks_are_those_of_the_documents():
    positions = torch.cat([torch.arange(n) for n in (5, 1, 20, 6)])[None]
    documents = Documents([5, 1, 20, 6])
    got = mask_of_positions(positions, ONE, None)
    want = documents.rows(32)
    for name in ("start", "stop", "document_start"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    got = mask_of_positions(positions, ONE, 7)
    want = (documents & SlidingWindow(7)).rows(32)
    assert torch.equal(got.start, want.start) and torch.equal(got.stop, want.stop)
    # The layers of a batch share it, and the next batch has its own.
    assert mask_of_positions(positions, ONE, 7) is got
    without_bound = mask_of_positions(positions, ONE, 2**31 + 5)
    assert torch.equal(without_bound.start, mask_of_positions(positions, ONE, None).start)
    positions.copy_(torch.arange(32))
    assert mask_of_positions(positions, ONE, None).start.max() == 0


@on_ranks(2)
def test_another_order_of_tokens():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    cp = ContextParallel(mesh, "zigzag", block_size=16)
    positions = torch.cat([torch.arange(50), torch.arange(78)])[None]
    local = cp.shard(positions, 1)
    want = Documents([50, 78]).rows(128)
    assert torch.equal(mask_of_positions(local, cp.key, None).start, want.start)
    contiguous = positions.chunk(2, 1)[dist.get_rank()]
    with refused('load_balancer = "headtail".*write the same'):
        mask_of_positions(contiguous, cp.key, None)
    with refused("training.seq_len = 96 .* multiple of 64"):
        mask_of_positions(positions[:, :48], cp.key, None)
