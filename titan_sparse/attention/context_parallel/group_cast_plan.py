"""Who sends which blocks to whom, and when, under the schedule group_cast: pure integers, no process groups.

A rank needs some of the other ranks' blocks of keys. Each goes once to every node that needs it, to the rank there with
its owner's local number (`outer`), and from that rank to those of the node that need it (`inner`). A node's own blocks
make the second hop alone. Gradients go the same way back. All ranks know the needs, so all work this out alike.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LINK = 12
"""Bytes that a GPU's memory moves while a link inside a node moves one: some 3.5 TB/s against 0.28 (H200, NVLink)."""


class Exchange(NamedTuple):
    """What this rank does in one all-to-all.

    rows: int64 [n], which rows of its memory it sends, by destination. sends, receives: how many to and from each member.
    """

    rows: Tensor
    sends: list[int]
    receives: list[int]


class Stage(NamedTuple):
    """A part of the remote blocks. outer, inner: its exchanges between and inside nodes, None where no member sends.

    relayed: rows of this rank's memory, from and to before, where lies what outer brings. k_blocks: int64 [n], the global
    blocks that inner brings, in their order.
    """

    outer: Exchange | None
    inner: Exchange | None
    relayed: tuple[int, int]
    k_blocks: Tensor


class Plan(NamedTuple):
    """memory: blocks that this rank has to send on, its own first."""

    stages: list[Stage]
    memory: int

    def to(self, device: torch.device) -> "Plan":
        """The same with its tensors on a device, in one copy."""
        held = [x for stage in self.stages for x in (stage.outer, stage.inner) if x]
        tensors = [x.rows for x in held] + [stage.k_blocks for stage in self.stages]
        if not tensors:
            return self
        moved = iter(torch.cat(tensors).to(device).split([len(x) for x in tensors]))
        exchange = lambda x: x and x._replace(rows=next(moved))
        stages = [
            stage._replace(outer=exchange(stage.outer), inner=exchange(stage.inner))
            for stage in self.stages
        ]
        return self._replace(stages=[stage._replace(k_blocks=next(moved)) for stage in stages])


class Traffic(NamedTuple):
    """Blocks that each rank sends in each stage, inside its node and across to others; int64 [W, stages]."""

    inside: Tensor
    across: Tensor


def plan(needed: Tensor, table: Tensor, inter: int, intra: int, rank: int, stages: int) -> Plan:
    """The plan of one rank of inter x intra. needed: bool [W, blocks], rank r needs global block b (its own do not
    matter); table: int64 [W, n], the blocks that each rank owns. All on the CPU."""
    (node, local), n = divmod(rank, intra), table.shape[1]
    wanted = wanted_blocks(needed, table, inter, intra)
    stage, here = assign_stages(wanted, stages), wanted[node]
    owned = table.reshape(inter, intra, n).transpose(0, 1)
    # Where this rank has the blocks [inter, n] of those with its local number: its own, and others once they have come.
    rows, memory, found = torch.arange(n).repeat(inter, 1), n, []
    elsewhere = ~torch.eye(inter, dtype=torch.bool)[..., None]
    for number in range(stages):
        crossing = (stage[:, :, local] == number) & elsewhere  # [to node, from node, n]
        coming = crossing[node]
        relayed = (memory, memory + int(coming.sum()))
        memory = relayed[1]
        rows[coming] = torch.arange(*relayed)
        handed = here & (stage[node] == number)  # [to rank, from node, by rank, n]
        got = handed[local].transpose(0, 1)
        found.append(
            Stage(
                _exchange(crossing[:, node], coming, torch.arange(n), bool(crossing.any())),
                _exchange(handed[:, :, local], got, rows, bool(handed.any())),
                relayed,
                owned[got],
            )
        )
    return Plan(found, memory)


def _exchange(sent: Tensor, received: Tensor, rows: Tensor, anybody: bool) -> Exchange | None:
    """sent: bool [members, ...], which of the `rows` [...] go to each member. received: alike, for their numbers alone."""
    count = lambda x: x.flatten(1).sum(1).tolist()
    return Exchange(rows.expand_as(sent)[sent], count(sent), count(received)) if anybody else None


def blocks_before_others(
    own: int, remote: int, heads: int, kv_heads: int, element_bytes: int, nodes: int
) -> int:
    """How many of `own` blocks a backward computes before those of others: half, the rest while the gradients of `remote` blocks
    go home, but all inside a node where that would cost more than it hides.

    Another pass reads q and d_out, and reads and writes dq in fp32.
    """
    gradients, another_pass = remote * kv_heads * 2 * 4, own * heads * 2 * (element_bytes + 4)
    return own if nodes == 1 and LINK * gradients <= another_pass else (own + 1) // 2


def wanted_blocks(needed: Tensor, table: Tensor, inter: int, intra: int) -> Tensor:
    """bool [inter, intra, inter, intra, n]: the rank of the first two dims needs the n-th block of that of the next two;
    no rank wants its own."""
    wanted = needed[:, table] & ~torch.eye(len(table), dtype=torch.bool)[..., None]
    return wanted.view(inter, intra, inter, intra, -1)


def assign_stages(wanted: Tensor, stages: int) -> Tensor:
    """int64 [inter, inter, intra, n]: the stage in which a node (first dim) gets a block; -1 if it does not.

    A node's blocks are shared out evenly, first its own ranks', so that those from other nodes have the longer time to
    come; among them every rank gives the same share of what it has to give to each stage.
    """
    some, nodes = wanted.any(1), torch.arange(len(wanted))
    place = (some.cumsum(-1) - 0.5) / some.sum(-1, keepdim=True).clamp(min=1)
    place = (
        (place + (nodes[:, None] != nodes)[..., None, None])
        .masked_fill(~some, torch.inf)
        .flatten(1)
    )
    order = place.argsort(stable=True, dim=1).argsort(1)
    stage = order * stages // some.flatten(1).sum(1, keepdim=True).clamp(min=1)
    return stage.view_as(some).masked_fill(~some, -1)


def traffic(wanted: Tensor, stages: int, backward: bool = False) -> Traffic:
    """Blocks that each rank sends: of keys, or (backward) of gradients, which go where the keys came from. What a rank
    sends in the one it receives in the other."""
    (inter, intra), found = wanted.shape[:2], []
    stage = assign_stages(wanted, stages)
    for number in range(stages):
        some = stage == number
        # [to node, from node, by rank], [node, to rank, by rank]
        crossing = some.sum(-1) * ~torch.eye(inter, dtype=torch.bool)[..., None]
        handed = (wanted & some[:, None]).sum((2, 4)) * ~torch.eye(intra, dtype=torch.bool)
        found.append(
            (
                handed.sum(2 if backward else 1).flatten(),
                crossing.sum(1 if backward else 0).flatten(),
            )
        )
    return Traffic(*(torch.stack(x, dim=1) for x in zip(*found)))
