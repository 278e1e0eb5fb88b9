"""In which order KV meets Q: pure integers, no process groups.

A schedule lists, for one rank, windows of steps; a step is the rank whose KV is computed on. Inside a window KV moves
one inner hop per step; from one window to the next it moves one outer hop. A plain ring is one window over all ranks,
so that ring and double ring are driven by the same code (context_parallel.py).
"""

Windows = list[list[int]]


def local(inter: int, intra: int, rank: int) -> Windows:
    """Own KV only. ValueError with several ranks, since the rest of the sequence would be ignored."""
    if inter * intra != 1:
        raise ValueError(f'schedule "local" cannot serve {inter * intra} context-parallel ranks; write "ring"')
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


def column_steps(computes: list[bool], blocks: int, backward: bool = False) -> list[int]:
    """The steps that meet a part of the gathered columns, in order: part i is every n-th of their `blocks` blocks from
    the i-th on. computes: by step, whether the rank computes at all.

    The forward leaves out its first step and the backward its last one, behind which the columns' exchange hides; where
    blocks are few, more are left out."""
    steps = [step for step, computing in enumerate(computes) if computing]
    parts = min(max(len(steps) - 1, 1), blocks)
    return steps[:parts] if backward else steps[len(steps) - parts :]


SCHEDULES = {"local": local, "all_gather": all_gather, "ring": ring, "double_ring": double_ring}


def choose(inter: int, intra: int) -> str:
    """What schedule = "auto" means: nothing to move for one rank, all_gather inside a node, where it is the fastest
    (docs/benchmarks.md), two rings across nodes, one ring over nodes of one rank each."""
    if inter == 1:
        return "local" if intra == 1 else "all_gather"
    return "double_ring" if intra > 1 else "ring"
