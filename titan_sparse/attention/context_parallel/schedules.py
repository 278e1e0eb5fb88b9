"""The table of schedules: what travels between ranks, how much at once, and in which order."""

import enum
import math
from dataclasses import dataclass


class Moves(enum.Enum):
    """The kind of data that travels between ranks."""

    NOTHING = enum.auto()
    CHUNKS = enum.auto()
    """A rank's keys and values, from neighbor to neighbor."""
    HEADS = enum.auto()
    """The keys and values of all ranks, some KV heads at a time."""
    BLOCKS = enum.auto()
    """The blocks that a rank needs, from their owners."""
    TOKENS = enum.auto()
    """Queries, keys, values and out: every rank gets all tokens of its node, of some heads."""


@dataclass(frozen=True)
class Schedule:
    """The facts about a schedule that other modules need.

    moves: what travels between ranks.
    has_node_axis: it uses separate communicators inside nodes and between them.
    needs_node_axis: it makes no sense on a mesh without the axes ("cp_inter", "cp_intra").
    """

    name: str
    moves: Moves
    has_node_axis: bool = False
    needs_node_axis: bool = False

    def rings(self, inter: int, intra: int) -> tuple[int, int]:
        """Ranks of the outer and of the inner ring, on `inter` nodes of `intra` ranks.

        Raises ValueError for "local" with several ranks, since the rest of the sequence would be
        ignored.
        """
        if self.moves is Moves.NOTHING and inter * intra > 1:
            raise ValueError(
                f'schedule "local" cannot serve {inter * intra} context-parallel ranks; write "ring"'
            )
        if self.needs_node_axis:
            return inter, intra
        if self.moves is Moves.TOKENS:
            return 1, inter
        return 1, inter * intra

    def step_sources(self, inter: int, intra: int) -> list[list[int]]:
        """By rank and step, the rank whose keys and values are computed on."""
        rings = self.rings(inter, intra)
        return [sum(ring_windows(*rings, rank), []) for rank in range(inter * intra)]


def ring_windows(inter: int, intra: int, rank: int) -> list[list[int]]:
    """`inter` windows of `intra` steps, each the rank whose keys and values are computed on.

    Inside a window, chunks make one inner hop a step, and from one window to the next one outer hop
    (MTraining, section 4.2). A plain ring is one window: `ring_windows(1, 4, 1)` is `[[1, 0, 3,
    2]]`, and `ring_windows(2, 2, 0)` is `[[0, 1], [2, 3]]`.
    """
    node, local_rank = divmod(rank, intra)
    windows = []
    for window in range(inter):
        # Nodes in descending order, and in each its ranks.
        first_rank = (node - window) % inter * intra
        windows.append([first_rank + (local_rank - step) % intra for step in range(intra)])
    return windows


LOCAL = Schedule("local", Moves.NOTHING)
ALL_GATHER = Schedule("all_gather", Moves.HEADS)
RING = Schedule("ring", Moves.CHUNKS)
DOUBLE_RING = Schedule("double_ring", Moves.CHUNKS, has_node_axis=True, needs_node_axis=True)
GROUP_CAST = Schedule("group_cast", Moves.BLOCKS, has_node_axis=True)
ULYSSES = Schedule("ulysses", Moves.TOKENS, has_node_axis=True)

SCHEDULES = {
    schedule.name: schedule
    for schedule in (LOCAL, ALL_GATHER, RING, DOUBLE_RING, GROUP_CAST, ULYSSES)
}


def choose(
    inter: int, intra: int, backward_circulates: str = "auto", needs_few_blocks: bool = False
) -> Schedule:
    """The schedule that "auto" means on `inter` nodes of `intra` ranks (docs/benchmarks.md).

    One rank has nothing to move. Where the mask makes a rank need only a few blocks of the others
    (`needs_few_blocks`: documents or a window over the layout "balanced"), group_cast sends just
    those. Inside a node all_gather is the fastest; where the user says what circulates in the
    backward it is a ring. Across nodes it is two rings, or one if nodes have one rank each.
    """
    if inter * intra == 1:
        return LOCAL
    if needs_few_blocks and backward_circulates == "auto":
        return GROUP_CAST
    if inter > 1 and intra > 1:
        return DOUBLE_RING
    if inter == 1 and backward_circulates == "auto":
        return ALL_GATHER
    return RING


def circulates_queries(
    setting: str, heads: int, kv_heads: int, head_dim: int, width: int, gradient_width: int
) -> bool:
    """True if queries travel in the backward of a ring, instead of keys and values.

    setting: what the user says, "q" or "kv", or "auto" for whichever sends fewer bytes a token:
    keys and values with their gradients, or queries, d_out, dq, and two sums a row, lse and d_out
    times out (BurstEngine, section 3.2). width, gradient_width: bytes of an element of the inputs,
    and of gradients between ranks.
    """
    if setting != "auto":
        return setting == "q"
    width_of_sums = max(width, 4)
    kv_bytes = kv_heads * head_dim * (2 * width + 2 * gradient_width)
    query_bytes = heads * (head_dim * (2 * width + gradient_width) + 2 * width_of_sums)
    return query_bytes < kv_bytes


def kv_copies(heads: int, kv_heads: int, ranks: int) -> int:
    """The number of ranks that each KV head is sent to when `ranks` share the query heads equally.

    Raises ValueError if they cannot. Every rank gets a KV head for each run of its query heads that
    share one: with 12 query heads, 4 KV heads and 6 ranks of two heads, a KV head has 3 queries,
    and is sent to 3 ranks, once for each.
    """
    if heads % ranks:
        divisors = [count for count in range(1, ranks) if math.gcd(heads, ranks) % count == 0]
        raise ValueError(
            f'schedule "ulysses" cannot deal {heads} query heads out to {ranks} ranks of a node; '
            f"write a mesh with a cp_intra among {divisors}, or "
            'schedule="all_gather"'
        )
    group = heads // kv_heads
    return group // math.gcd(heads // ranks, group)


def head_groups(kv_heads: int, windows: int) -> int:
    """Equal groups of KV heads that travel on their own (context_parallel/ring.py)."""
    if windows == 1:
        return 1
    return max(count for count in range(1, 5) if kv_heads % count == 0)


_GATHERED_BYTES = 32 << 20
"""Keys and values that all_gather brings in one group of heads, at least. Fewer arrive sooner than
the host queues what is to be computed on them."""


def heads_gathered(kv_heads: int, head_bytes: int) -> int:
    """The number of KV heads that all_gather gathers together; the last group of
    heads may have fewer.

    head_bytes: keys and values of one head, of all ranks.

    There are two groups at least, where there are two heads: one is computed on while the next one
    arrives.
    """
    wanted = -(-_GATHERED_BYTES // head_bytes)
    groups = max(2, -(-kv_heads // wanted))
    return -(-kv_heads // groups)
