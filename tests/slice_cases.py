"""Masks of slices with what they see, written pair by pair from the definition of each type."""

import random

import torch
from torch import Tensor

from titan_sparse.attention.masks.packed import (
    block_causal,
    dilated,
    documents,
    prefix_lm,
    shared_question,
    sliding_window,
)
from titan_sparse.attention.masks.slices import KINDS, Slices

SEQ_LEN = 192
Slice = tuple[int, int, int, int, str]


def counts(slices: list[Slice], seq_len: int = SEQ_LEN) -> Tensor:
    """int64 [S, S]: in how many slices each pair is. Query i and key j of a slice with sq queries and sk keys: causal
    j <= i + (sk - sq), inv_causal j >= i, bi_causal both."""
    count = torch.zeros(seq_len, seq_len, dtype=torch.int64)
    for q_start, q_stop, k_start, k_stop, kind in slices:
        i, j = torch.arange(q_stop - q_start)[:, None], torch.arange(k_stop - k_start)
        right, left = j <= i + len(j) - len(i), j >= i
        kept = {
            "full": right | True,
            "causal": right,
            "inv_causal": left,
            "bi_causal": left & right,
        }[kind]
        count[q_start:q_stop, k_start:k_stop] += kept
    return count


def random_legal(seed: int, wanted: int, seq_len: int = SEQ_LEN, least: int = 0) -> list[Slice]:
    """Slices of any shape and type whose ranges overlap in queries and in keys, but that share no pair."""
    g, kept, total = random.Random(seed), [], torch.zeros(seq_len, seq_len, dtype=torch.int64)
    for _ in range(6 * wanted):
        q, k = (sorted(g.choices(range(seq_len + 1), k=2)) for _ in range(2))
        new = (*q, *k, g.choice(KINDS))
        if (
            len(kept) < wanted
            and k[1] - k[0] >= least
            and (total + (one := counts([new], seq_len))).max() <= 1
        ):
            kept.append(new)
            total += one
    return kept


def cut_square(pieces: int, seq_len: int = SEQ_LEN) -> list[Slice]:
    """A full square cut into `pieces` ragged slices, every second one again along a diagonal."""
    edges = [seq_len * i // (pieces // 2) for i in range(pieces // 2 + 1)]
    middle = [(seq_len * (7 * i % 31)) // 31 for i in range(pieces // 2)]
    slices = []
    for a, b, m in zip(edges, edges[1:], middle):
        slices += [(a, b, 0, m, "full"), (a, b, m, seq_len, "full")]
    return slices


WRITTEN = {
    "nothing": [],
    "full": [(0, 192, 0, 192, "full")],
    "causal": [(0, 192, 0, 192, "causal")],
    "inv_causal": [(0, 192, 0, 192, "inv_causal")],
    "diagonal": [(0, 192, 0, 192, "bi_causal")],
    "causal, more keys": [(50, 150, 10, 190, "causal")],
    "causal, more queries": [(5, 190, 20, 101, "causal")],
    "inv_causal, more keys": [(50, 150, 10, 190, "inv_causal")],
    "inv_causal, more queries": [(5, 190, 20, 101, "inv_causal")],
    "bi_causal, more keys": [(3, 120, 1, 180, "bi_causal")],
    "bi_causal, more queries": [(3, 180, 1, 120, "bi_causal")],
    "no keys": [(0, 100, 40, 40, "full"), (100, 192, 0, 92, "causal")],
    "one query": [(77, 78, 0, 192, "full")],
    "one key": [(0, 192, 77, 78, "full")],
    "one pair": [(191, 192, 0, 1, "causal")],
    "triangles that make a square": [(0, 192, 0, 192, "causal"), (0, 191, 1, 192, "inv_causal")],
    "causal in ragged strips": [
        (a, b, 0, b, "causal") for a, b in ((0, 13), (13, 70), (70, 71), (71, 140), (140, 192))
    ],
    "stripes of keys": [(0, 192, a, b, "full") for a, b in ((0, 5), (9, 40), (40, 41), (100, 192))],
    "128 slices make a square": cut_square(128),
    "document that sees nothing": [(0, 60, 0, 60, "causal"), (110, 192, 110, 192, "causal")],
    "keys that nobody sees": [(0, 192, 0, 30, "full"), (0, 192, 90, 192, "inv_causal")],
    "last token only": [(0, 191, 0, 191, "bi_causal"), (191, 192, 0, 192, "full")],
    "far future": [
        (0, 64, 128, 192, "causal"),
        (64, 128, 0, 64, "inv_causal"),
        (128, 192, 64, 128, "full"),
    ],
}
WRITTEN |= {f"random {seed}": random_legal(seed, 3 + seed) for seed in range(14)}

_DOCUMENT = torch.repeat_interleave(
    torch.tensor([0, 1, 2, 3, -1]), torch.tensor([45, 3, 70, 60, 14])
)
_START = torch.tensor([0, 45, 48, 118, 0])[_DOCUMENT]
_Q, _K = torch.arange(SEQ_LEN)[:, None], torch.arange(SEQ_LEN)
_SAME = (_DOCUMENT[:, None] == _DOCUMENT) & (_DOCUMENT >= 0)
_LENGTHS = [45, 3, 70, 60]
_FRAME = torch.repeat_interleave(torch.arange(9), torch.tensor([20, 25, 3, 30, 30, 10, 60, 13, 1]))
_PREFIX = _START + torch.tensor([10, 3, 0, 33, 0])[_DOCUMENT]

FACTORIES: dict[str, tuple[Slices, Tensor]] = {
    "documents": (documents(_LENGTHS), _SAME & (_K <= _Q)),
    "full documents": (documents(_LENGTHS, causal=False), _SAME),
    "documents of both kinds": (
        documents(_LENGTHS, causal=[True, False, False, True]),
        _SAME & ((_K <= _Q) | (_DOCUMENT[:, None] == 1) | (_DOCUMENT[:, None] == 2)),
    ),
    "window": (sliding_window(_LENGTHS, 20), _SAME & (_K <= _Q) & (_K > _Q - 20)),
    "window with sinks": (
        sliding_window(_LENGTHS, 9, sinks=4),
        _SAME & (_K <= _Q) & ((_K > _Q - 9) | (_K < _START[:, None] + 4)),
    ),
    "window both ways": (
        sliding_window([192], 30, sinks=5, look_ahead=17),
        (_K <= _Q + 17) & ((_K > _Q - 30) | ((_K < 5) & (_K <= _Q))),
    ),
    "dilated": (
        dilated(_LENGTHS, 40, 3),
        _SAME & (_K <= _Q) & (_K > _Q - 40) & ((_Q - _K) % 3 == 0),
    ),
    "prefix": (
        prefix_lm(_LENGTHS, [10, 3, 0, 33]),
        _SAME & ((_K <= _Q) | ((_Q < _PREFIX[:, None]) & (_K < _PREFIX))),
    ),
    "frames": (
        block_causal([[20, 25], [3], [30, 30, 10], [60]]),
        _SAME & (_FRAME <= _FRAME[:, None]),
    ),
    "shared question": (
        shared_question([(20, [25]), (3, []), (30, [30, 10]), (0, [60])]),
        _SAME & (_K <= _Q) & ((_FRAME == _FRAME[:, None]) | (_FRAME == 0) | (_FRAME == 3)),
    ),
}


def mask_and_truth(name: str) -> tuple[Slices, Tensor]:
    """A mask and bool [S, S] of what it sees."""
    if name in FACTORIES:
        return FACTORIES[name]
    return Slices.of(WRITTEN[name]), counts(WRITTEN[name]) > 0


NAMES: list[str] = [*WRITTEN, *FACTORIES]
