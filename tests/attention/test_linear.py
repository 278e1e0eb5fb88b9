"""Linear attention, packed and over several ranks: nothing leaks, and everything arrives."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.attention.context_parallel.against_one import mesh_of
from tests.distributed import run_processes
from tests.models.transformers_models import delta_rule_in_float64
from tests.reference import relative_error
from titan_sparse.attention import linear
from titan_sparse.attention.context_parallel import ContextParallel
from titan_sparse.attention.context_parallel.group import one_rank
from titan_sparse.attention.context_parallel.layouts import block_ids, take_blocks
from titan_sparse.attention.context_parallel.linear_attention import Move, entering_state
from titan_sparse.attention.linear import gated_delta_net, split_documents

transformers = pytest.importorskip("transformers")

torch.set_num_threads(1)

CPU = torch.device("cpu")
LENGTH = 96
# Two rows: documents that end at a boundary of ranks, begin one or two tokens before it, span
# several ranks, or are a single token; and padding.
LENGTHS = [[23, 1, 7, 46, 2, 9], [96]]


def layer(remembers: bool = False) -> nn.Module:
    """A Gated DeltaNet of Qwen3.5 with random weights, in fp64.

    remembers: hardly any state is lost, and the convolution passes its input on.
    """
    from transformers.models.qwen3_5 import modeling_qwen3_5

    config = transformers.Qwen3_5TextConfig(
        hidden_size=24,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        layer_types=["linear_attention"],
        num_hidden_layers=1,
    )
    torch.manual_seed(0)
    module = modeling_qwen3_5.Qwen3_5GatedDeltaNet(config, 0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
        if remembers:
            module.A_log.fill_(-12.0)
            module.conv1d.weight.zero_()
            module.conv1d.weight[:, 0, -1] = 1
    module.forward = functools.partial(gated_delta_net, module)
    # transformers' norm is in fp32 too.
    module.norm.forward = lambda x, gate: (
        F.rms_norm(x, x.shape[-1:], module.norm.weight, 1e-6) * F.silu(gate)
    )
    return module.double()


def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(len(LENGTHS), LENGTH, 24, generator=generator, dtype=torch.float64)


def weights_of_loss() -> Tensor:
    """0 on padding."""
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(len(LENGTHS), LENGTH, 24, generator=generator, dtype=torch.float64)
    for row, lengths in enumerate(LENGTHS):
        weights[row, sum(lengths) :] = 0
    return weights


def run(
    module: nn.Module, x: Tensor, weights: Tensor, lengths: list[list[int]], cp: ContextParallel
) -> list[Tensor]:
    """out, and the gradients of x and of all parameters, of this rank's tokens."""
    pieces = split_documents(lengths, x.shape[1] * cp.size, 4, cp, CPU)
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    out = module(x, attention_mask=pieces)
    (out * weights).sum().backward()
    return [out.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Two results of run(). The gradient of A_log is summed in fp32, in transformers too."""
    names = [name for name, _ in layer().named_parameters()]
    for name, a, b in zip(["out", "x", *names], found, wanted, strict=True):
        assert relative_error(a, b) < (1e-6 if name == "A_log" else 1e-9), name


@pytest.mark.parametrize("remembers", [False, True])
def test_packed_is_each_document_alone(remembers: bool, monkeypatch) -> None:
    monkeypatch.setattr(linear, "_torch_rule", delta_rule_in_float64)
    module = layer(remembers)
    x, weights = inputs(), weights_of_loss()
    found = run(module, x, weights, LENGTHS, one_rank(8))
    wanted = [torch.zeros_like(tensor) for tensor in found]
    for row, lengths in enumerate(LENGTHS):
        first = 0
        for length in lengths:
            own = slice(row, row + 1), slice(first, first + length)
            out, d_x, *rest = run(module, x[own], weights[own], [[length]], one_rank(8))
            wanted[0][own] = out
            wanted[1][own] = d_x
            for whole, part in zip(wanted[2:], rest, strict=True):
                whole += part
            first += length
    wanted[0][weights_of_loss() == 0] = found[0][weights_of_loss() == 0]
    assert_equal(found, wanted)


def part(whole: Tensor, cp: ContextParallel) -> Tensor:
    """The tokens of this rank."""
    return whole.chunk(cp.size, 1)[cp.rank]


def alone(module: nn.Module, cp: ContextParallel) -> tuple[list[Tensor], list[Tensor]]:
    """run() of this rank of `cp`, with parameters' gradients summed, and the same of one rank."""
    x, weights = inputs(), weights_of_loss()
    found = run(module, part(x, cp), part(weights, cp), LENGTHS, cp)
    found[2:] = [cp.all_reduce(gradient) for gradient in found[2:]]
    wanted = run(module, x, weights, LENGTHS, one_rank(8))
    wanted[:2] = [part(tensor, cp) for tensor in wanted[:2]]
    return found, wanted


def _ranks_agree() -> None:
    linear._torch_rule = delta_rule_in_float64
    cp = ContextParallel(mesh_of((dist.get_world_size(),)), block_size=8)
    for remembers in (False, True):
        module = layer(remembers)
        assert_equal(*alone(module, cp))
    # Other documents than the first one's: nothing changes, to the bit.
    x, weights = inputs(), part(weights_of_loss(), cp)
    before = run(module, part(x, cp), weights, LENGTHS, cp)
    document = slice(sum(LENGTHS[0][:3]), sum(LENGTHS[0][:4]))
    is_changed = torch.zeros(2, LENGTH, dtype=torch.bool)
    is_changed[0, document] = True
    other = torch.where(is_changed[..., None], x + 1, x)
    after = run(module, part(other, cp), weights, LENGTHS, cp)
    is_changed = part(is_changed, cp)
    for a, b in zip(before[:2], after[:2]):
        assert torch.equal(a[~is_changed], b[~is_changed])
        assert not is_changed.any() or not torch.equal(a[is_changed], b[is_changed])
    # From the first token of a document to the last rank, and back.
    x[1, 0] += 1
    moved = run(module, part(x, cp), weights, LENGTHS, cp)
    assert (moved[0][1] - before[0][1]).abs().max() > 1e-2
    last = torch.zeros(2, LENGTH, 24, dtype=torch.float64)
    last[1, -1] = 1
    assert run(module, part(x, cp), part(last, cp), LENGTHS, cp)[1][1].abs().max() > 1e-3
    _moves_are_inverse(cp)
    _autocast_rounds_no_state(cp)


def _autocast_rounds_no_state(cp: ContextParallel) -> None:
    """What passes from rank to rank stays in fp32, forward and backward."""
    generator = torch.Generator().manual_seed(cp.rank)
    leaving = torch.randn(2, 3, 4, 5 + 4, generator=generator).requires_grad_()
    enters = torch.ones(cp.size, 2, dtype=torch.bool)

    def results() -> tuple[Tensor, Tensor]:
        state = entering_state(leaving, enters, cp)
        [gradient] = torch.autograd.grad(state.square().sum(), leaving)
        return state, gradient

    wanted = results()
    with torch.autocast("cpu", torch.bfloat16):
        found = results()
    assert all(map(torch.equal, found, wanted))


def _moves_are_inverse(cp: ContextParallel) -> None:
    """Of layouts that follow from the length, and of one like "balanced"."""
    whole = torch.arange(2 * LENGTH * 3, dtype=torch.float32).view(2, LENGTH, 3)
    generator = torch.Generator().manual_seed(3)
    shuffled = torch.randperm(LENGTH // 4, generator=generator).view(cp.size, -1)
    tables = [block_ids(layout, cp.size, LENGTH, 4) for layout in ("striped", "zigzag")]
    for table in (*tables, shuffled):
        move = Move(table, 4, cp, CPU)
        own = part(whole, cp).clone().requires_grad_()
        moved = move.to_layout(own)
        wanted = take_blocks(whole, 1, table[cp.rank], 4)
        assert torch.equal(moved, wanted)
        assert torch.equal(move.to_contiguous(moved), own)
        (moved * wanted).sum().backward()
        assert torch.equal(own.grad, own)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_are_one_rank(ranks: int) -> None:
    run_processes(ranks, _ranks_agree)
