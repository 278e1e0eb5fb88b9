"""In which order KV meets Q: pure integers, no process groups.

A schedule lists, for one rank, windows of steps; a step is the rank whose KV is computed on. Inside a window KV moves
one inner hop per step; from one window to the next it moves one outer hop. A plain ring is one window over all ranks,
so that ring and double ring are driven by the same code (context_parallel.py).
"""

import math

Windows = list[list[int]]


def local(inter: int, intra: int, rank: int) -> Windows:
    """Own KV only. ValueError with several ranks, since the rest of the sequence would be ignored."""
    if inter * intra != 1:
        raise ValueError(
            f'schedule "local" cannot serve {inter * intra} context-parallel ranks; write "ring"'
        )
    return [[rank]]


def all_gather(inter: int, intra: int, rank: int) -> Windows:
    """The KV of all ranks is gathered, a KV head at a time (gathered.py); the list is in ring order."""
    return ring(inter, intra, rank)


def ring(inter: int, intra: int, rank: int) -> Windows:
    """Step t computes on the KV of rank - t."""
    size = inter * intra
    return [[(rank - step) % size for step in range(size)]]


def double_ring(inter: int, intra: int, rank: int) -> Windows:
    """`inter` windows of `intra` steps (MTraining 4.2): window o works inside the node on the KV that started o nodes back."""
    node, local_rank = divmod(rank, intra)
    return [
        [(node - window) % inter * intra + (local_rank - step) % intra for step in range(intra)]
        for window in range(inter)
    ]


def backward_order(windows: int, steps: int) -> list[int]:
    """The order in which a backward takes steps, which are counted as in the forward: of the first window only the
    first, then the other windows, then the rest of the first (transport.circulate_backward)."""
    return [0, *range(steps // windows, steps), *range(1, steps // windows)]


def vertical_steps(
    computes: list[bool], blocks: int, backward: bool = False, windows: int = 1
) -> list[int]:
    """The steps that meet a part of the gathered verticals, in order: part i is every n-th of their `blocks` blocks from
    the i-th on. computes: by step, in the forward's order, whether the rank computes at all. windows: of the schedule.

    The forward leaves out its first step and the backward its last one, behind which the verticals' exchange hides; where
    blocks are few, more are left out."""
    order = backward_order(windows, len(computes)) if backward else range(len(computes))
    steps = [step for step in order if computes[step]]
    parts = min(max(len(steps) - 1, 1), blocks)
    return steps[:parts] if backward else steps[len(steps) - parts :]


def group_cast(inter: int, intra: int, rank: int) -> Windows:
    """Blocks go only to the ranks that need them, in stages (group_cast_plan.py); the list is in ring order."""
    return ring(inter, intra, rank)


SCHEDULES = {
    "local": local,
    "all_gather": all_gather,
    "ring": ring,
    "double_ring": double_ring,
    "group_cast": group_cast,
}


def choose(inter: int, intra: int, backward_circulates: str = "auto") -> str:
    """What schedule = "auto" means: nothing to move for one rank, all_gather inside a node, where it is the fastest
    (docs/benchmarks.md), or a ring if what circulates is chosen; two rings across nodes, one over nodes of one rank each."""
    if inter == 1:
        several = "all_gather" if backward_circulates == "auto" else "ring"
        return "local" if intra == 1 else several
    return "double_ring" if intra > 1 else "ring"


def head_groups(kv_heads: int, windows: int) -> int:
    """Equal groups of KV heads that travel on their own: one, but in a double ring up to four (transport.circulate)."""
    return math.gcd(kv_heads, 4) if windows > 1 else 1
