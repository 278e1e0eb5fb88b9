"""How a rank's part of a save is shared out among its files."""

from torch.distributed.checkpoint.metadata import MetadataIndex

from titan_sparse.training.checkpoint.planning import share_out

SIZES = {MetadataIndex(name): size for name, size in [("a", 3), ("b", 5), ("c", 4), ("d", 3)]}


def test_files_get_about_as_many_bytes():
    parts = share_out(SIZES, 2)
    assert sorted(sum(SIZES[index] for index in part) for part in parts) == [7, 8]
    assert sorted(index.fqn for part in parts for index in part) == ["a", "b", "c", "d"]


def test_no_file_is_empty():
    assert sorted(len(part) for part in share_out(SIZES, 6)) == [1, 1, 1, 1]
    assert share_out({}, 2) == []


def test_one_file_takes_all():
    [part] = share_out(SIZES, 1)
    assert set(part) == set(SIZES)
