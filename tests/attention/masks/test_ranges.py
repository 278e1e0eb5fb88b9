"""Row ranges of every mask against a dense mask written pair by pair from its definition."""

import itertools

import numpy as np
import pytest
import torch

from tests.refusals import refused
from titan_sparse.attention import attend
from titan_sparse.attention.masks import Dilated
from titan_sparse.attention.masks.ranges import Causal, Documents, Full, Mask, SlidingWindow

SEQ_LEN = 37
PACKED = [[5, 1, 20], [SEQ_LEN], [], [1] * SEQ_LEN]


def _document_of(lengths: list[int], token: int) -> int:
    """Number of the document that holds a token, -1 on padding."""
    ends = list(itertools.accumulate(lengths))
    return next((number for number, end in enumerate(ends) if token < end), -1)


def _documents_see(lengths: list[int], i: int, j: int) -> bool:
    return j <= i and _document_of(lengths, i) == _document_of(lengths, j) != -1


# Each mask with what its documentation says: one rule (i, j) -> seen for each sequence.
DEFINITIONS = {
    "full": (Full(), [lambda i, j: True]),
    "causal": (Causal(), [lambda i, j: j <= i]),
    "valid": (Causal(valid=(0, 30, 37, 1)), [lambda i, j, n=n: j <= i < n for n in (0, 30, 37, 1)]),
    "window 1": (SlidingWindow(1), [lambda i, j: i == j]),
    "window 8": (SlidingWindow(8), [lambda i, j: i - 8 < j <= i]),
    "window 99": (SlidingWindow(99), [lambda i, j: j <= i]),
    "window 2**40": (SlidingWindow(2**40), [lambda i, j: j <= i]),
    "dilated": (Dilated(8, 3), [lambda i, j: i - 8 < j <= i and (i - j) % 3 == 0]),
    # The window is a multiple of the rate: the key `window` back is not seen.
    "dilated 8 2": (Dilated(8, 2), [lambda i, j: i - 8 < j <= i and (i - j) % 2 == 0]),
    "dilated 12 4": (Dilated(12, 4), [lambda i, j: i - 12 < j <= i and (i - j) % 4 == 0]),
    "dilated 5 5": (Dilated(5, 5), [lambda i, j: i == j]),
    "dilated 7 1": (Dilated(7, 1), [lambda i, j: i - 7 < j <= i]),
    "dilated 99": (Dilated(99, 36), [lambda i, j: j <= i and (i - j) % 36 == 0]),
    "documents": (Documents([3, 17, 2]), [lambda i, j: _documents_see([3, 17, 2], i, j)]),
    "packed": (Documents(PACKED), [lambda i, j, d=d: _documents_see(d, i, j) for d in PACKED]),
}


def _brute(name: str) -> torch.Tensor:
    rules = DEFINITIONS[name][1]
    return torch.tensor(
        [[[rule(i, j) for j in range(SEQ_LEN)] for i in range(SEQ_LEN)] for rule in rules]
    )


def _check_rows(mask: Mask) -> None:
    start, stop, documents = mask.rows(SEQ_LEN)[:3]
    assert start.shape == stop.shape and start.shape[1] == SEQ_LEN
    for x in (start, stop) if documents is None else (start, stop, documents):
        assert x.dtype == torch.int32
    assert (start.diff() >= 0).all() and (stop.diff() >= 0).all(), "rows are not nondecreasing"
    assert (0 <= start).all() and (start <= stop).all() and (stop <= SEQ_LEN).all()


@pytest.mark.parametrize("name", DEFINITIONS)
def test_rows_are_the_definition(name):
    mask, want = DEFINITIONS[name][0], _brute(name)
    _check_rows(mask)
    assert torch.equal(mask.dense(SEQ_LEN), want)
    assert mask.rows(SEQ_LEN).causal == (not want.triu(1).any())


@pytest.mark.parametrize(
    "mask, plain",
    [
        (Causal(), True),
        (Causal(valid=(37, 37)), True),
        (Causal(valid=(37, 36)), False),
        (Full(), False),
        (Documents([37]), False),
        (Documents([36]), False),
        (SlidingWindow(8), False),
        (Causal() & SlidingWindow(8), False),
    ],
)
def test_plain_is_causal_and_nothing_else(mask, plain):
    assert mask.rows(37).plain == plain


COMPATIBLE = [
    pair
    for pair in itertools.product(DEFINITIONS, repeat=2)
    if not set(pair) <= {"documents", "packed"}
]


@pytest.mark.parametrize("names", COMPATIBLE, ids=" & ".join)
def test_intersection_sees_what_both_see(names):
    first, second = (DEFINITIONS[name][0] for name in names)
    both = first & second
    _check_rows(both)
    assert torch.equal(both.dense(SEQ_LEN), _brute(names[0]) & _brute(names[1]))
    assert both.rows(SEQ_LEN).causal == (first.rows(SEQ_LEN).causal or second.rows(SEQ_LEN).causal)


def test_document_starts():
    documents = Documents([[2, 3], [4]]).rows(7).document_start
    assert documents.tolist() == [[0, 0, 2, 2, 2, -1, -1], [0, 0, 0, 0, -1, -1, -1]]
    assert torch.equal((Documents([[2, 3], [4]]) & Causal()).rows(7).document_start, documents)
    assert Causal(valid=(3,)).rows(7).document_start is None


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
def test_numbers_of_tokens_in_a_list_a_tensor_or_an_array(kind):
    mask = Causal(valid=kind([30, 37]))
    assert mask == Causal(valid=(30, 37)) and hash(mask) == hash(Causal(valid=(30, 37)))
    assert mask.rows(SEQ_LEN).plain is False
    size = kind([8])[0]
    assert SlidingWindow(size).rows(SEQ_LEN).window == 8
    assert {SlidingWindow(size), Dilated(size, size)} == {SlidingWindow(8), Dilated(8, 8)}


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: SlidingWindow(0), "window"),
        (lambda: Documents([3, 0, 2]), "1 or more, not 0"),
        (lambda: Documents([[3], [2, -1]]), "1 or more, not -1"),
        (lambda: Documents([3, 35]).rows(SEQ_LEN), "38 tokens"),
        (lambda: Causal(valid=(3, 38)).rows(SEQ_LEN), "valid"),
        (lambda: Causal(valid=(-1,)).rows(SEQ_LEN), "valid"),
        (lambda: Causal(valid=(3.5, 4)), r"valid=\(3.5, 4\).*whole number"),
        (lambda: Causal(valid=3), "valid=3.*for each sequence"),
        (lambda: Causal(valid=()), "for each sequence"),
        (lambda: (Documents([3]) & Documents([2, 1])).rows(SEQ_LEN), "finer"),
        (lambda: (Causal(valid=(1, 2, 3)) & Causal(valid=(1, 2))).rows(SEQ_LEN), "sequences"),
        (lambda: Dilated(0, 1), "both are whole numbers"),
        (lambda: Dilated(1.5, 1), "both are whole numbers"),
        (lambda: SlidingWindow(1.5), "window=1.5.* whole number"),
        (lambda: Documents([3.7]), "whole number of tokens, .* not 3.7"),
        (lambda: Documents([[3], [2, 1.0]]), "whole number of tokens, .* not 1.0"),
        (lambda: Documents([[3], 5]), "mixes numbers and lists"),
        (lambda: Documents([5, torch.tensor([3])]), "mixes numbers and lists"),
        (lambda: Documents(5), r"is not a list; write Documents\(\[300, 500\]\)"),
    ],
)
def test_refusals(make, words):
    with refused(words):
        make()


@pytest.mark.parametrize("lengths", [[3, 5], [[3], [5]], [[3, 1], [2, 2]]])
@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_lengths_may_be_tensors_and_arrays(lengths, kind):
    """Also of one document for each sequence, which are numbers to Python."""
    wanted = Documents(lengths).lengths
    assert Documents(kind(lengths)).lengths == wanted
    assert Documents([kind(row) for row in lengths]).lengths == wanted


def test_masks_are_made_inside_of_compiled_functions(fresh_compiler):
    q = torch.randn(1, 2, SEQ_LEN, 8)

    def attention(q: torch.Tensor) -> torch.Tensor:
        masks = [Dilated(9, 2), SlidingWindow(7), Documents([]), Documents([9, 20])]
        # One document alone is of a length that torch would have to read.
        masks += [Documents([SEQ_LEN]), Documents([20]) & SlidingWindow(7)]
        return sum(attend(q, q, q, mask) for mask in masks)

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), attention(q))
