"""What is read of a Hugging Face checkpoint: headers, and of each tensor this rank's rows."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.models.helpers import TINY, dense_attend, pretended_rank
from titan_sparse.config import ActivationCheckpoint, Compile
from titan_sparse.models import huggingface
from titan_sparse.models.decoder import Decoder
from titan_sparse.models.huggingface import check_weights, huggingface_name, load_weights
from titan_sparse.training.build_model import parallelize


class Counted:
    """A file of safetensors, or a tensor in it, that counts the elements that are read."""

    elements = 0

    def __init__(self, inner: Any, **_: str):
        self.inner = safe_open(inner, framework="pt") if isinstance(inner, Path) else inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __enter__(self) -> "Counted":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get_slice(self, name: str) -> "Counted":
        return Counted(self.inner.get_slice(name))

    def __getitem__(self, part: Any) -> Tensor:
        tensor = self.inner[part]
        Counted.elements += tensor.numel()
        return tensor


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Tensor]]:
    """The weights in tmp_path by the decoder's names, with a count of what is read."""
    torch.manual_seed(0)
    weights = Decoder(TINY, dense_attend).state_dict()
    by_name = {huggingface_name(name): weight for name, weight in weights.items()}
    save_file(by_name, tmp_path / "model.safetensors")
    monkeypatch.setattr(huggingface, "safe_open", Counted)
    Counted.elements = 0
    yield weights


@pytest.mark.parametrize("rank, shape", [(2, (3,)), (30, (31,)), (4, (2, 3))])
def test_each_rank_reads_its_own_rows(saved, tmp_path, rank, shape):
    """Shards are ragged over 3 ranks, and some of 31 have no rows. (2, 3) is HSDP."""
    ranks = shape[-1]
    with pretended_rank(rank, math.prod(shape)):
        with torch.device("meta"):
            model = Decoder(TINY, dense_attend)
        # torch remembers what it knows of a mesh by its ranks and its name, not by this rank.
        names = [f"axis_{axis}_of_{rank}_{shape}" for axis in range(len(shape))]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        parallelize(model, mesh, torch.float32, True, ActivationCheckpoint("none"), Compile())
        model.to_empty(device="cpu")
        load_weights(model, str(tmp_path), TINY)
        # torch.chunk() deals out the rows; by hand, not by what the model holds.
        rows = {name: -(-len(weight) // ranks) for name, weight in saved.items()}
        wanted = 0
        for name, parameter in model.named_parameters():
            begin = rank % ranks * rows[name]
            own = saved[name][begin : begin + rows[name]]
            assert torch.equal(parameter.to_local(), own), name
            wanted += own.numel()
    assert Counted.elements == wanted


def test_a_check_reads_headers_only(saved, tmp_path):
    check_weights(str(tmp_path), TINY)
    assert Counted.elements == 0
