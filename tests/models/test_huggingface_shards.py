"""What is read of a Hugging Face checkpoint: headers, and of each tensor this rank's rows."""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

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


class CountedFile:
    """A file of safetensors that counts the elements that it is asked for."""

    elements = 0

    def __init__(self, path: Path, framework: str):
        self.file = safe_open(path, framework=framework)

    def __enter__(self) -> "CountedFile":
        self.file.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.file.__exit__(kind, error, trace)

    def keys(self) -> list[str]:
        return self.file.keys()

    def get_tensor(self, name: str) -> Tensor:
        return _counted(self.file.get_tensor(name))

    def get_slice(self, name: str) -> "CountedSlice":
        return CountedSlice(self.file.get_slice(name))


class CountedSlice:
    """A tensor whose header is free."""

    def __init__(self, header) -> None:
        self.header = header

    def get_shape(self) -> list[int]:
        return self.header.get_shape()

    def get_dtype(self) -> str:
        return self.header.get_dtype()

    def __getitem__(self, part) -> Tensor:
        return _counted(self.header[part])


def _counted(tensor: Tensor) -> Tensor:
    CountedFile.elements += tensor.numel()
    return tensor


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Tensor]]:
    """The weights in tmp_path by the decoder's names, with a count of what is read."""
    torch.manual_seed(0)
    weights = Decoder(TINY, dense_attend).state_dict()
    by_name = {huggingface_name(name): weight for name, weight in weights.items()}
    save_file(by_name, tmp_path / "model.safetensors")
    monkeypatch.setattr(huggingface, "safe_open", CountedFile)
    CountedFile.elements = 0
    yield weights


@pytest.mark.parametrize("rank, ranks", [(0, 1), (0, 2), (1, 2), (2, 3), (30, 31)])
def test_each_rank_reads_its_own_rows(saved, tmp_path, rank, ranks):
    with pretended_rank(rank, ranks):
        with torch.device("meta"):
            model = Decoder(TINY, dense_attend)
        # torch remembers what it knows of a mesh by its ranks and its name, not by this rank.
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=(f"shard_{rank}_of_{ranks}",))
        parallelize(model, mesh, torch.float32, True, ActivationCheckpoint("none"), Compile())
        model.to_empty(device="cpu")
        load_weights(model, str(tmp_path), TINY)
        # torch.chunk() deals out the rows; by hand, not by what the model holds.
        rows = {name: -(-len(weight) // ranks) for name, weight in saved.items()}
        wanted = 0
        for name, parameter in model.named_parameters():
            weight = saved[name]
            own = weight[rank * rows[name] : (rank + 1) * rows[name]]
            assert torch.equal(parameter.to_local(), own), name
            wanted += own.numel()
    assert CountedFile.elements == wanted


def test_a_check_reads_headers_only(saved, tmp_path):
    check_weights(str(tmp_path), TINY)
    assert CountedFile.elements == 0
