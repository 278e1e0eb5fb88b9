"""Linear attention of transformers' models: Gated DeltaNet, of Qwen3-Next and Qwen3.5.

The recurrent state and the window of the convolution begin anew at each document. On a GPU, both
run in kernels of flash-linear-attention, which take the bounds of documents. Elsewhere each
document goes alone through transformers' plain torch code.

Over several ranks, each computes its tokens from a state of zero. What a state that enters would
add to them is linear in it. So the identity runs through the same kernels as a second state, beside
values of 0: what it leaves is the transition A, and what is read from it is the factor of the state
that enters (context_parallel/linear_attention.py combines the ranks).
"""

import functools
import inspect
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.context_parallel.linear_attention import entering_state, previous_tokens

logger = logging.getLogger("titan_sparse")


class Bounds:
    """Pieces of a packed row: their lengths, and where they begin, on the CPU and on the device."""

    def __init__(self, lengths: list[int], device: torch.device):
        self.lengths = lengths
        # [documents + 1]: where each begins, and where the last one ends.
        self.on_cpu = torch.tensor([0, *itertools.accumulate(lengths)], device="cpu")
        self.on_device = self.on_cpu.to(device)


@dataclass(frozen=True, eq=False)
class Pieces:
    """The parts of documents that this rank holds, of all rows one after the other."""

    tokens: Bounds
    """Padding is a piece of its own."""
    with_halo: Bounds
    """The same where the last tokens of the rank before stand before each row."""
    halo: int
    """How many tokens that are."""
    last: Tensor  # int64 [B], the last piece of each row
    continued: Tensor  # int64, the pieces that continue a document of the rank before
    enters: Tensor  # bool [ranks, B], whether the first piece of a rank does so
    cp: ContextParallel


def split_documents(
    lengths: list[list[int]], seq_len: int, window: int, cp: ContextParallel, device: torch.device
) -> Pieces:
    """The pieces of this rank, which holds contiguous tokens.

    lengths: of the documents of each row; the rest of `seq_len` tokens is padding. window: of the
    convolution, in tokens.
    """
    own = seq_len // cp.size
    halo = window - 1 if cp.size > 1 else 0
    tokens: list[int] = []
    with_halo: list[int] = []
    last: list[int] = []
    continued: list[int] = []
    enters = torch.zeros(cp.size, len(lengths), dtype=torch.bool, device="cpu")
    for row, of_row in enumerate(lengths):
        # The begin of each document, and that of the padding.
        begins = sorted({0, *itertools.accumulate(of_row)})
        padding = sum(of_row)
        for rank in range(cp.size):
            first = rank * own
            enters[rank, row] = first < padding and first not in begins
        first = cp.rank * own
        if enters[cp.rank, row]:
            continued.append(len(tokens))
        cuts = [first, *(begin for begin in begins if first < begin < first + own), first + own]
        of_rank = [stop - start for start, stop in itertools.pairwise(cuts)]
        tokens += of_rank
        last.append(len(tokens) - 1)
        # Tokens before the document that goes on are not part of it.
        seen = first - max(begin for begin in begins if begin <= first)
        seen = min(halo, seen) if enters[cp.rank, row] else 0
        with_halo += [halo - seen] * (halo > seen) + [seen + of_rank[0], *of_rank[1:]]
    return Pieces(
        tokens=Bounds(tokens, device),
        with_halo=Bounds(with_halo, device),
        halo=halo,
        last=torch.tensor(last, device=device),
        continued=torch.tensor(continued, dtype=torch.int64, device=device),
        enters=enters.to(device),
        cp=cp,
    )


def gated_delta_net(
    module: Any, hidden_states: Tensor, attention_mask: Pieces, **kwargs: Any
) -> Tensor:
    """The forward of transformers' Gated DeltaNet, for packed documents and contiguous tokens of
    several ranks.

    module: the Gated DeltaNet. hidden_states: [B, S_local, hidden_size]. attention_mask: the pieces
    that transformers hands on.
    """
    if hasattr(module, "in_proj_qkv"):
        mixed = module.in_proj_qkv(hidden_states)
        z = module.in_proj_z(hidden_states)
        b = module.in_proj_b(hidden_states)
        a = module.in_proj_a(hidden_states)
    else:
        q, k, v, z, b, a = module.fix_query_key_value_ordering(
            module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states)
        )
        mixed = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], dim=-1)
    # [B, S_local, Hv]; the exponent is in fp32, as in transformers.
    g = -module.A_log.float().exp() * F.softplus(a.float() + module.dt_bias)
    out = _mix_tokens(module, mixed, g, b.sigmoid(), attention_mask)
    heads = (-1, module.head_v_dim)
    out = module.norm(out.reshape(heads), z.reshape(heads))
    return module.out_proj(out.reshape(*hidden_states.shape[:2], -1))


@torch.compiler.disable
def _mix_tokens(module: Any, mixed: Tensor, g: Tensor, beta: Tensor, pieces: Pieces) -> Tensor:
    """mixed [B, S_local, 2 K Hk + V Hv], g and beta [B, S_local, Hv] -> [B, S_local, Hv, V]."""
    mixed = _convolution(module, mixed, pieces)
    keys = module.head_k_dim
    q, k, v = mixed.split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
    q = q.unflatten(-1, (-1, keys))
    k = k.unflatten(-1, (-1, keys))
    v = v.unflatten(-1, (-1, module.head_v_dim))
    batch, seq_len, heads, values = v.shape
    state = None
    if pieces.cp.size > 1:
        v = F.pad(v, (0, keys))
        shape = (len(pieces.tokens.lengths), heads, keys, values + keys)
        state = torch.zeros(shape, dtype=torch.float32, device=v.device)
        state[pieces.continued, ..., values:] = torch.eye(keys, device=v.device)
    q, k, v, g, beta = (x.flatten(0, 1)[None] for x in (q, k, v, g, beta))
    out, states = _delta_rule(q, k, v, g, beta, state, pieces.tokens)
    out = out.view(batch, seq_len, heads, -1)
    if states is None:
        return out
    entering = entering_state(states[pieces.last], pieces.enters, pieces.cp)
    out, factor = out.split([values, keys], dim=-1)
    return out + torch.einsum("bshk,bhkv->bshv", factor, entering.to(out.dtype))


def _convolution(module: Any, x: Tensor, pieces: Pieces) -> Tensor:
    """The causal convolution with its activation, in each document alone."""
    if pieces.halo:
        x = torch.cat([previous_tokens(x, pieces.halo, pieces.cp), x], dim=1)
    row = x.flatten(0, 1)[None]
    weight = module.conv1d.weight
    kernels = _kernels(x)
    if kernels is not None:
        convolve, _ = kernels
        row, _ = convolve(
            row,
            weight.squeeze(1),
            activation=module.activation,
            cu_seqlens=pieces.with_halo.on_device,
            cu_seqlens_cpu=pieces.with_halo.on_cpu,
        )
    else:
        parts = []
        for part in row.split(pieces.with_halo.lengths, dim=1):
            part = F.pad(part.transpose(1, 2), (weight.shape[-1] - 1, 0))
            parts.append(F.conv1d(part, weight, groups=len(weight)).transpose(1, 2))
        row = F.silu(torch.cat(parts, dim=1))
    return row.view(x.shape)[:, pieces.halo :]


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, bounds: Bounds
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule, in each piece alone: out [1, T, Hv, V], and with `state` the states
    after the pieces.

    q, k: [1, T, Hk, K]. v: [1, T, Hv, V]. g, beta: [1, T, Hv]. state: before each piece, [pieces,
    Hv, K, V]; None for 0.
    """
    options = {"output_final_state": state is not None, "use_qk_l2norm_in_kernel": True}
    kernels = _kernels(q)
    if kernels is not None:
        _, rule = kernels
        return rule(
            q,
            k,
            v,
            g,
            beta,
            initial_state=state,
            cu_seqlens=bounds.on_device,
            cu_seqlens_cpu=bounds.on_cpu,
            **options,
        )
    repeats = v.shape[2] // k.shape[2]
    q = q.repeat_interleave(repeats, dim=2)
    k = k.repeat_interleave(repeats, dim=2)
    found: list[tuple[Tensor, Any]] = []
    parts = zip(*(x.split(bounds.lengths, dim=1) for x in (q, k, v, g, beta)))
    for number, part in enumerate(parts):
        before = None if state is None else state[number : number + 1]
        found.append(_torch_rule()(*part, initial_state=before, **options))
    out = torch.cat([of_piece for of_piece, _ in found], dim=1)
    return out, None if state is None else torch.cat([after for _, after in found])


@functools.cache
def _torch_rule() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """transformers' plain torch code, without the kernels that it may choose itself."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    return inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)


def _kernels(x: Tensor) -> tuple[Callable, Callable] | None:
    """flash-linear-attention's convolution and gated delta rule; None where they cannot run."""
    if not x.is_cuda or x.dtype == torch.float64:
        return None
    return _import_kernels()


@functools.cache
def _import_kernels() -> tuple[Callable, Callable] | None:
    try:
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        logger.warning(
            "linear attention runs through plain torch code, which is slow: flash-linear-attention "
            'cannot be imported (%s); pip install "titan-sparse[hybrid]"',
            error,
        )
        return None
    return causal_conv1d, chunk_gated_delta_rule
