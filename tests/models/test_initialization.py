"""Weights of a decoder, drawn or read: they depend on the seed and the name only, and each rank has its
own rows."""

import json
import math
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.fake_step import fake_world
from tests.models.helpers import build, dense_attend
from tests.runs import TINY
from titan_sparse.config import ActivationCheckpoint, Compile
from titan_sparse.models import huggingface
from titan_sparse.models.decoder import Decoder
from titan_sparse.models.flavours import FLAVOURS
from titan_sparse.models.huggingface import check_weights, huggingface_name, load_weights
from titan_sparse.models.initialization import initialize
from titan_sparse.training.model import parallelize


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


class Counted:
    """A tensor of an open file that counts the elements that are read."""

    elements = 0

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __getitem__(self, part: Any) -> Tensor:
        tensor = self.inner[part]
        Counted.elements += tensor.numel()
        return tensor


@contextmanager
def sharded_decoder(rank: int, shape: tuple[int, ...]):
    """A decoder without weights, in shards of this rank of a mesh."""
    with fake_world(math.prod(shape), rank):
        with torch.device("meta"):
            model = Decoder(TINY, dense_attend).double()
        with pytest.raises(ValueError, match="to_empty"):
            initialize(model, 0, TINY)
        # torch remembers what it knows of a mesh by its ranks and its name, not by this rank.
        names = [f"axis_{axis}_of_{rank}_{shape}" for axis in range(len(shape))]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        parallelize(model, mesh, torch.float64, True, ActivationCheckpoint("none"), Compile())
        yield model.to_empty(device="cpu")


@pytest.mark.parametrize("rank, shape", [(2, (3,)), (30, (31,)), (4, (2, 3))])
def test_each_rank_has_its_own_rows(tmp_path, monkeypatch, rank, shape) -> None:
    """Shards are ragged over 3 ranks, and some of 31 have no rows. (2, 3) is HSDP."""
    full = build(TINY, seed=5).state_dict()
    by_name = {huggingface_name(name): weight for name, weight in full.items()}
    save_file(by_name, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": TINY.vocab_size}))
    plain = huggingface.open_tensors

    def open_tensors(*words) -> dict[str, Callable[[], Counted]]:
        return {name: lambda open=open: Counted(open()) for name, open in plain(*words).items()}

    monkeypatch.setattr(huggingface, "open_tensors", open_tensors)
    Counted.elements = 0
    check_weights(str(tmp_path), TINY)
    # It reads headers only.
    assert Counted.elements == 0
    with sharded_decoder(rank, shape) as model:
        ranks = shape[-1]
        for is_read in (False, True):
            wanted = 0
            if is_read:
                load_weights(model, str(tmp_path), TINY)
            else:
                initialize(model, 5, TINY)
            for name, parameter in model.named_parameters():
                # torch.chunk() deals out the rows; by hand, not by what the model holds.
                rows = -(-len(full[name]) // ranks)
                begin = rank % ranks * rows
                own = full[name][begin : begin + rows]
                assert torch.equal(parameter.to_local(), own), name
                wanted += own.numel()
                torch.nn.init.zeros_(parameter)
    assert Counted.elements == wanted
