"""The plan of the schedule group_cast: who sends which blocks to whom, and when. No process groups.

A rank needs some of the other ranks' blocks of keys. Each block goes once to every node that needs
it, to the rank there with its owner's local number (`outer`). From that rank it goes to those
ranks of the node that need it (`inner`). A node's own blocks make the second hop alone. Gradients
go the same way back. All ranks know the needs, so all of them compute the same plan.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel.ring_routing import Traffic

LINK = 12
"""Bandwidth of a GPU's memory over that of a link inside a node: 3.5 and 0.28
TB/s (H200, NVLink)."""


class Exchange(NamedTuple):
    """One all-to-all, as this rank sees it.

    rows: int64 [n], which rows of its memory it sends, sorted by destination.
    sends, receives: how many rows it sends to each member, and receives from each.
    """

    rows: Tensor
    sends: list[int]
    receives: list[int]


class Stage(NamedTuple):
    """One stage of the remote blocks.

    outer, inner: its exchanges between nodes and inside them, None where no member sends anything.
    relayed: first and last + 1 row of this rank's memory that outer fills.
    k_blocks: int64 [n], the global blocks that inner brings, in their order.
    """

    outer: Exchange | None
    inner: Exchange | None
    relayed: tuple[int, int]
    k_blocks: Tensor


class CastPlan(NamedTuple):
    """The plan of one rank. memory: blocks that this rank holds to send on, its own first."""

    stages: list[Stage]
    memory: int


def plan(
    needed: Tensor,
    table: Tensor,
    inter: int,
    intra: int,
    rank: int,
    stages: int,
    device: torch.device | str = "cpu",
) -> CastPlan:
    """The plan of one rank of inter x intra, for data on `device`. Tensors come on the CPU.

    needed: bool [W, blocks], rank r needs global block b. What it says of a rank's own blocks does
    not matter. table: int64 [W, n], the blocks that each rank owns.
    """
    node, local_rank = divmod(rank, intra)
    n = table.shape[1]
    wanted = wanted_blocks(needed, table, inter, intra)
    wanted_here = wanted[node]  # [to rank, from node, by rank, n]
    stage_of = assign_stages(wanted, stages)  # [to node, from node, by rank, n]
    owned = table.reshape(inter, intra, n).transpose(0, 1)  # [by rank, from node, n]
    other_node = ~torch.eye(inter, dtype=torch.bool)[..., None]
    own_rows = torch.arange(n, device="cpu")
    # [from node, n]: where in its memory this rank has the blocks of the ranks with its local
    # number. Its own are there from the beginning, the others once they have come.
    rows = own_rows.repeat(inter, 1)
    memory = n
    planned = []
    for number in range(stages):
        # [to node, from node, n]: what ranks with this local number send between nodes
        in_stage = stage_of[:, :, local_rank] == number
        crossing = in_stage & other_node
        outgoing = crossing[:, node]
        arriving = crossing[node]
        # What arrives lies behind all that is in memory so far.
        first_relayed = memory
        memory += int(arriving.sum())
        rows[arriving] = torch.arange(first_relayed, memory, device="cpu")
        outer = None
        if crossing.any():
            outer = _exchange(outgoing, arriving, own_rows, device)

        # [to rank, from node, by rank, n]: what ranks of this node send inside it
        handed_on = wanted_here & (stage_of[node] == number)
        sent = handed_on[:, :, local_rank]
        # [by rank, from node, n]
        received = handed_on[local_rank].transpose(0, 1)
        inner = None
        if handed_on.any():
            inner = _exchange(sent, received, rows, device)

        k_blocks = owned[received].to(device)
        planned.append(Stage(outer, inner, (first_relayed, memory), k_blocks))
    return CastPlan(planned, memory)


def _exchange(sent: Tensor, received: Tensor, rows: Tensor, device: torch.device | str) -> Exchange:
    """sent: bool [members, ...], which of `rows` [...] go to each member.
    received: bool [members, ...], what comes from each member. Only the counts matter.
    """
    return Exchange(
        # Member after member, as boolean indexing goes along the first dim first.
        rows=rows.expand_as(sent)[sent].to(device),
        sends=sent.flatten(1).sum(1).tolist(),
        receives=received.flatten(1).sum(1).tolist(),
    )


def blocks_before_others(
    own: int, remote: int, heads: int, kv_heads: int, element_bytes: int, nodes: int
) -> int:
    """The number of its `own` blocks that a rank computes before those of others, in a backward.

    Half of them; the rest follows while the gradients of the `remote` blocks go home. Inside one
    node it is all of them where a second pass over the queries would cost more than it hides.
    """
    # Bytes per token of a block and dim of a head: dk and dv in fp32, ...
    gradients = remote * kv_heads * 2 * 4
    # ... and q and d_out, which a second pass reads, and dq in fp32, which it reads and writes.
    second_pass = own * heads * 2 * (element_bytes + 4)
    if nodes == 1 and LINK * gradients <= second_pass:
        return own
    return (own + 1) // 2


def wanted_blocks(needed: Tensor, table: Tensor, inter: int, intra: int) -> Tensor:
    """bool [inter, intra, inter, intra, n]: a rank needs the n-th block of another rank.

    The first two dims are the rank that needs it, the next two the rank that owns it. No rank wants
    its own. needed, table: as for plan().
    """
    # [W, W, n]: the blocks of each rank that each rank needs
    needed_of_ranks = needed[:, table]
    other_rank = ~torch.eye(len(table), dtype=torch.bool)
    wanted = needed_of_ranks & other_rank[..., None]
    return wanted.view(inter, intra, inter, intra, -1)


def assign_stages(wanted: Tensor, stages: int) -> Tensor:
    """int64 [inter, inter, intra, n]: the stage in which a node (first dim) gets a block, or -1.

    -1 is for blocks that the node does not want. The blocks that it wants are shared out evenly
    over the stages. Those of its own ranks come first, so that those from other nodes have more
    time to come. Among them, every rank gives the same share of what it has to give to each stage.

    wanted: as from wanted_blocks().
    """
    # [to node, from node, by rank, n]
    by_node = wanted.any(1)
    node = torch.arange(len(wanted), device="cpu")
    # Where a block stands among those that its owner gives: from 0 to 1 in its own node, from 1 to
    # 2 in others, so that those come later.
    given = by_node.sum(-1, keepdim=True)
    place = by_node.cumsum(-1) - 0.5
    share = place / given.clamp(min=1)
    # [to node, from node, 1, 1]
    from_other_node = (node[:, None] != node)[..., None, None]
    share = share + from_other_node
    share = share.masked_fill(~by_node, torch.inf)
    # [to node, blocks of all nodes]: the argsort of an argsort is the place in the order.
    by_share = share.flatten(1).argsort(stable=True, dim=1)
    order = by_share.argsort(1)
    total = by_node.flatten(1).sum(1, keepdim=True)
    stage = order * stages // total.clamp(min=1)
    stage = stage.view_as(by_node)
    return stage.masked_fill(~by_node, -1)


def traffic(wanted: Tensor, stages: int, backward: bool) -> Traffic:
    """Blocks that each rank sends in each stage, int64 [W, stages].

    wanted: as from wanted_blocks(). The blocks are of keys, or with `backward` of gradients, which
    go to where the keys came from. What a rank sends in the one it receives in the other.
    """
    inter, intra = wanted.shape[:2]
    # [inter, inter, 1] and [intra, intra]
    other_node = ~torch.eye(inter, dtype=torch.bool)[..., None]
    other_rank = ~torch.eye(intra, dtype=torch.bool)
    stage_of = assign_stages(wanted, stages)
    inside = []
    across = []
    for number in range(stages):
        in_stage = stage_of == number
        # [to node, from node, by rank]
        crossing = in_stage.sum(-1) * other_node
        # [node, to rank, by rank]
        wanted_now = wanted & in_stage[:, None]
        handed_on = wanted_now.sum((2, 4)) * other_rank
        # Keys: sum over those who get them. Gradients: over those who gave the keys.
        inside.append(handed_on.sum(2 if backward else 1).flatten())
        across.append(crossing.sum(1 if backward else 0).flatten())
    return Traffic(inside=torch.stack(inside, dim=1), across=torch.stack(across, dim=1))
