"""Masks of slices with what they see, written pair by pair from the definition of each type."""

import random

import torch
from torch import Tensor

from titan_sparse.attention.masks.slices import (
    KINDS,
    Slices,
    block_causal,
    dilated,
    documents,
    prefix_lm,
    shared_question,
    sliding_window,
)

SEQ_LEN = 192

Slice = tuple[int, int, int, int, str]
"""q_start, q_stop, k_start, k_stop, type."""


def counts(slices: list[Slice], seq_len: int = SEQ_LEN) -> Tensor:
    """int64 [S, S]: in how many slices each pair is.

    Query i sees key j of a slice with sq queries and sk keys if: full, always; causal,
    j <= i + (sk - sq); inv_causal, j >= i; bi_causal, both.
    """
    count = torch.zeros(seq_len, seq_len, dtype=torch.int64)
    for q_start, q_stop, k_start, k_stop, kind in slices:
        sq = q_stop - q_start
        sk = k_stop - k_start
        # [sq, 1] against [sk]
        i = torch.arange(sq)[:, None]
        j = torch.arange(sk)
        causal = j <= i + (sk - sq)
        inv_causal = j >= i
        if kind == "full":
            sees = torch.ones(sq, sk, dtype=torch.bool)
        elif kind == "causal":
            sees = causal
        elif kind == "inv_causal":
            sees = inv_causal
        else:
            sees = causal & inv_causal
        count[q_start:q_stop, k_start:k_stop] += sees
    return count


def random_legal(seed: int, wanted: int, seq_len: int = SEQ_LEN) -> list[Slice]:
    """At most `wanted` slices of any shape and type.

    Their ranges overlap in queries and in keys, but they share no pair.
    """
    generator = random.Random(seed)
    edges = range(seq_len + 1)
    slices = []
    total = torch.zeros(seq_len, seq_len, dtype=torch.int64)
    for _ in range(6 * wanted):
        q_start, q_stop = sorted(generator.choices(edges, k=2))
        k_start, k_stop = sorted(generator.choices(edges, k=2))
        kind = generator.choice(KINDS)
        if len(slices) == wanted:
            break
        new = (q_start, q_stop, k_start, k_stop, kind)
        with_new = total + counts([new], seq_len)
        if with_new.max() <= 1:
            slices.append(new)
            total = with_new
    return slices


def cut_square(seq_len: int = SEQ_LEN) -> list[Slice]:
    """A full square cut into strips of queries, each cut once more at some key: 128 slices."""
    strips = 64
    slices = []
    for strip in range(strips):
        q_start = seq_len * strip // strips
        q_stop = seq_len * (strip + 1) // strips
        middle = seq_len * (7 * strip % 31) // 31
        slices.append((q_start, q_stop, 0, middle, "full"))
        slices.append((q_start, q_stop, middle, seq_len, "full"))
    return slices


# By name, the slices of a mask over SEQ_LEN tokens.
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
        (0, 13, 0, 13, "causal"),
        (13, 70, 0, 70, "causal"),
        (70, 71, 0, 71, "causal"),
        (71, 140, 0, 140, "causal"),
        (140, 192, 0, 192, "causal"),
    ],
    "stripes of keys": [
        (0, 192, 0, 5, "full"),
        (0, 192, 9, 40, "full"),
        (0, 192, 40, 41, "full"),
        (0, 192, 100, 192, "full"),
    ],
    "128 slices make a square": cut_square(),
    "document that sees nothing": [(0, 60, 0, 60, "causal"), (110, 192, 110, 192, "causal")],
    "keys that nobody sees": [(0, 192, 0, 30, "full"), (0, 192, 90, 192, "inv_causal")],
    "last token only": [(0, 191, 0, 191, "bi_causal"), (191, 192, 0, 192, "full")],
    "far future": [
        (0, 64, 128, 192, "causal"),
        (64, 128, 0, 64, "inv_causal"),
        (128, 192, 64, 128, "full"),
    ],
}
for _seed in range(14):
    WRITTEN[f"random {_seed}"] = random_legal(_seed, 3 + _seed)


def _by_token(values: list[int], lengths: list[int]) -> Tensor:
    """int64 [S]: each value for as many tokens as its length says."""
    return torch.repeat_interleave(torch.tensor(values), torch.tensor(lengths))


# Four documents, and 14 tokens of padding behind them.
_LENGTHS = [45, 3, 70, 60]
# [S], of each token: its document, the first token of the document, and the one behind its prefix.
_DOCUMENT = _by_token([0, 1, 2, 3, -1], [*_LENGTHS, 14])
_START = _by_token([0, 45, 48, 118, 0], [*_LENGTHS, 14])
_PREFIX = _START + _by_token([10, 3, 0, 33, 0], [*_LENGTHS, 14])
# [S], the frame of each token, or its question or answer. None goes over the end of a document.
_FRAME = _by_token(list(range(9)), [20, 25, 3, 30, 30, 10, 60, 13, 1])
# Queries [S, 1] against keys [S].
_Q = torch.arange(SEQ_LEN)[:, None]
_K = torch.arange(SEQ_LEN)
_SAME = (_DOCUMENT[:, None] == _DOCUMENT) & (_DOCUMENT >= 0)

# Masks that functions of the library make, and bool [S, S] of what they have to see.
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
