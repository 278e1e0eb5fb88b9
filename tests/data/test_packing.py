"""titan_sparse.data.packing: pieces of documents to one sequence."""

import numpy as np
import pytest

from tests.data.helpers import END, PADDING
from titan_sparse.data.packing import Piece, pack, pad_to_multiple


def test_pack_by_hand():
    first, second = np.array([10, 11, 12, END]), np.array([20, 21, 22, 23, END])
    packed = pack([Piece(first, 2, 4), Piece(second, 0, 3)], 7, PADDING)
    assert packed.tokens.tolist() == [12, END, 20, 21, 22, PADDING, PADDING]
    assert packed.labels.tolist() == [END, -100, 21, 22, 23, -100, -100]
    assert packed.positions.tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert packed.lengths == [2, 3]
    assert packed.tokens.dtype == packed.labels.dtype == packed.positions.dtype == np.int64


def test_pack_of_nothing_is_padding_and_of_too_much_is_refused():
    assert pack([], 2, PADDING).tokens.tolist() == [PADDING, PADDING]
    with pytest.raises(ValueError, match="do not fit"):
        pack([Piece(np.arange(5), 0, 5)], 4, PADDING)


@pytest.mark.parametrize(("multiple", "total"), [(1, 5), (4, 8), (5, 5), (8, 8)])
def test_pad_to_multiple(multiple, total):
    packed = pack([Piece(np.arange(9), 2, 7)], 5, PADDING)
    padded = pad_to_multiple(packed, multiple, PADDING)
    extra = total - 5
    assert padded.tokens.tolist() == [2, 3, 4, 5, 6] + [PADDING] * extra
    assert padded.labels.tolist() == [3, 4, 5, 6, 7] + [-100] * extra
    assert padded.positions.tolist() == [0, 1, 2, 3, 4] + [0] * extra
    assert padded.lengths == [5]
