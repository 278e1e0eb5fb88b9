"""When a plan still fits, and how a rank's part is shared out among its files."""

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from titan_sparse.training.checkpoint.planning import Plan, share_out

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


def test_a_plan_fits_the_very_same_tensors_and_the_same_values():
    weight, bias = torch.ones(3), torch.ones(3)
    tensors = {"weight": weight, "bias": bias}
    plan = Plan(dict(tensors), ("step", "seed"), {}, [], None)
    assert plan.fits(tensors, ("step", "seed"))
    assert not plan.fits(tensors, ("step",))
    assert not plan.fits(tensors | {"bias": bias.clone()}, ("step", "seed"))
    assert not plan.fits(tensors | {"other": bias}, ("step", "seed"))
    assert not plan.fits({"weight": weight}, ("step", "seed"))
