"""titan_sparse.models.initialization: weights that depend on the seed and the name only."""

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.models.helpers import TINY, build, dense_attend, pretended_rank
from titan_sparse.config import ActivationCheckpoint, Compile
from titan_sparse.models.decoder import Decoder
from titan_sparse.models.flavours import FLAVOURS
from titan_sparse.models.initialization import initialize
from titan_sparse.training.build_model import parallelize

torch.set_num_threads(1)


def test_same_seed_same_weights_other_seed_other_weights() -> None:
    first, again, other = (build(TINY, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name, x in first.items() if x.ndim == 2]
    assert len(drawn) == 1 + 7 * TINY.layers
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    assert not torch.equal(
        first["layers.0.mlp.up_proj.weight"], first["layers.1.mlp.up_proj.weight"]
    )


def test_distributions() -> None:
    config = FLAVOURS["debug"]
    for name, x in build(config).state_dict().items():
        if name.endswith("norm.weight"):
            assert torch.all(x == 1)
        elif name.endswith("bias"):
            assert torch.all(x == 0)
        else:
            std = 0.02 / math.sqrt(8) if "o_proj" in name or "down_proj" in name else 0.02
            assert x.std().item() == pytest.approx(std, rel=0.05) and x.abs().max() <= 3 * std


def test_wrappers_do_not_change_the_weights() -> None:
    plain, wrapped = build(TINY, seed=1), build(TINY, seed=2)
    wrapped.layers["0"] = torch.compile(wrapped.layers["0"], backend="eager")
    initialize(wrapped, 1, TINY)
    assert any("_orig_mod" in name for name, _ in wrapped.named_parameters())
    for (_, a), (_, b) in zip(plain.named_parameters(), wrapped.named_parameters(), strict=True):
        assert torch.equal(a, b)


def test_meta_parameters_are_refused() -> None:
    with torch.device("meta"):
        model = Decoder(TINY, dense_attend)
    with pytest.raises(ValueError, match="to_empty"):
        initialize(model, 0, TINY)


@pytest.mark.parametrize("rank", [0, 5])
def test_shards_are_cut_from_the_same_weights(rank: int) -> None:
    """37, 24, 40 and 8 rows over 3 ranks are ragged shards."""
    full = dict(build(TINY, seed=5).named_parameters())
    with pretended_rank(rank, 6):
        # names of its own per rank: DTensor caches by mesh equality, which does not see who is asking
        names = (f"replicate_of_{rank}", f"shard_of_{rank}")
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=names)
        with torch.device("meta"):
            model = Decoder(TINY, dense_attend).double()
        parallelize(model, mesh, torch.float64, True, ActivationCheckpoint("none"), Compile())
        model.to_empty(device="cpu")
        initialize(model, 5, TINY)
        for name, p in model.named_parameters():
            shards = list(full[name].chunk(3)) + [full[name][:0]] * 3
            assert isinstance(p, DTensor)
            assert torch.equal(p.to_local(), shards[rank % 3]), name
