"""Contiguous tokens on each rank, for layers with a state that runs along the sequence.

A state that a rank receives is S = A S' + B,
where S' is the state that the rank before received. A and B follow from that rank's own tokens, so
that one all-gather of A and B gives every rank its state.
"""

from typing import Any

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel.comm import Communicator


class Move:
    """Moves hidden states between contiguous tokens and another layout, each way by one all-to-all.

    table: the other layout's, int64 [ranks, n] on the CPU.
    """

    def __init__(self, table: Tensor, block_size: int, comm: Communicator, device: torch.device):
        own = table.shape[1]
        first = comm.rank * own
        self.comm = comm
        self.block_size = block_size
        # The rank that holds each of this rank's blocks in the contiguous order.
        home = table[comm.rank] // own
        self.receives = torch.bincount(home, minlength=comm.size).tolist()
        # Where each block that arrives belongs: ranks send in the order of the layout.
        self.arriving = home.argsort(stable=True).to(device)
        wanted = table.flatten()
        is_own = (wanted >= first) & (wanted < first + own)
        self.sends = is_own.view(table.shape).sum(1).tolist()
        self.leaving = (wanted[is_own] - first).to(device)

    def to_layout(self, x: Tensor) -> Tensor:
        """x [B, S_local, D] of contiguous tokens -> the same of the other layout's tokens."""
        return _Moved.apply(x, self, True)

    def to_contiguous(self, x: Tensor) -> Tensor:
        """The inverse of to_layout()."""
        return _Moved.apply(x, self, False)

    def exchange(self, x: Tensor, to_layout: bool) -> Tensor:
        """to_layout() or to_contiguous(), without a gradient."""
        sends, receives = self.sends, self.receives
        order, place = self.leaving, self.arriving
        if not to_layout:
            sends, receives = receives, sends
            order, place = place, order
        # [blocks, B, block_size, D]
        blocks = x.unflatten(1, (-1, self.block_size)).transpose(0, 1)
        leaving = blocks.index_select(0, order)
        arrived = torch.empty_like(leaving)
        arrived = self.comm.start_exchange(leaving, sends, receives, "collectives", arrived).wait()
        out = torch.empty_like(arrived)
        out[place] = arrived
        return out.transpose(0, 1).flatten(1, 2)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Move, to_layout: bool) -> Tensor:
        ctx.move = move
        ctx.to_layout = to_layout
        return move.exchange(x, to_layout)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.move.exchange(gradient, not ctx.to_layout), None, None


def previous_tokens(x: Tensor, count: int, comm: Communicator) -> Tensor:
    """The last `count` tokens of the rank before, [B, count, D]; 0 on the first rank.

    x: [B, S_local, D], with S_local >= count. Collective, forward and backward.
    """
    return _PreviousTokens.apply(x, count, comm)


class _PreviousTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, comm: Communicator) -> Tensor:
        ctx.shape = x.shape
        ctx.comm = comm
        last = x[:, x.shape[1] - count :]
        of_ranks = comm.all_gather(last.contiguous())
        return of_ranks[comm.rank - 1] if comm.rank else torch.zeros_like(last)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_ranks = ctx.comm.all_gather(gradient.contiguous())
        d_x = gradient.new_zeros(ctx.shape)
        if ctx.comm.rank + 1 < ctx.comm.size:
            d_x[:, d_x.shape[1] - gradient.shape[1] :] = of_ranks[ctx.comm.rank + 1]
        return d_x, None, None


def entering_state(leaving: Tensor, enters: Tensor, comm: Communicator) -> Tensor:
    """The state that enters this rank, [B, H, K, V]; 0 where none does.

    leaving: [B, H, K, V + K], B and A of this rank's last tokens. enters: bool [ranks, B], whether
    a state enters a rank. Collective, forward and backward.
    """
    return _EnteringState.apply(leaving, enters, comm)


class _EnteringState(torch.autograd.Function):
    """Outside of torch.autocast, which would round states to 16 bits between ranks."""

    @staticmethod
    def forward(ctx: Any, leaving: Tensor, enters: Tensor, comm: Communicator) -> Tensor:
        # [ranks, B, H, K, V + K]
        of_ranks = comm.all_gather(leaving.contiguous())
        keys = leaving.shape[-2]
        local, transition = of_ranks.split([leaving.shape[-1] - keys, keys], dim=-1)
        factor = enters[..., None, None, None].to(leaving.dtype)
        state = torch.zeros_like(local[0])
        states = [state]
        with torch.autocast(leaving.device.type, enabled=False):
            for rank in range(comm.size - 1):
                state = (transition[rank] @ state + local[rank]) * factor[rank + 1]
                states.append(state)
        ctx.comm = comm
        ctx.save_for_backward(transition, factor, states[comm.rank])
        return states[comm.rank]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        transition, factor, state = ctx.saved_tensors
        # [ranks, B, H, K, V]: of the state that enters each rank, through that rank's tokens.
        of_ranks = ctx.comm.all_gather(gradient.contiguous())
        # Of the state that leaves this rank.
        d_leaving = torch.zeros_like(gradient)
        with torch.autocast(gradient.device.type, enabled=False):
            for rank in range(ctx.comm.size - 1, ctx.comm.rank, -1):
                whole = of_ranks[rank] + transition[rank].mT @ d_leaving
                d_leaving = whole * factor[rank]
            d_transition = d_leaving @ state.mT
        return torch.cat([d_leaving, d_transition], dim=-1), None, None
