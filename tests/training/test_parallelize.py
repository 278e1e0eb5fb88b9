"""Where a run's tensors live: its device, its process group, its meshes, and what FSDP2 is asked for.

GPUs and other ranks are stand-ins. What sharding does to numbers is in test_trainer.py and
test_wiring.py.
"""

import pytest
import torch
import torch.distributed as dist

from tests.fake_step import fake_world
from tests.runs import TINY
from titan_sparse.config import Parallelism
from titan_sparse.training import distributed

BLOCKS = TINY.layers


def _see_gpus(monkeypatch, count: int, local_rank: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)


@pytest.mark.parametrize(
    "name, gpus, local_rank, chosen, wanted",
    [
        ("auto", 0, None, 0, "cpu"),
        ("auto", 2, None, 0, "cuda:0"),
        ("auto", 2, None, 1, "cuda:1"),
        ("cpu", 2, "1", 0, "cpu"),
        ("cuda", 2, "1", 0, "cuda:1"),
    ],
)
def test_the_device_of_a_process(monkeypatch, name, gpus, local_rank, chosen, wanted):
    """On GPUs it becomes the current one. Without torchrun it is the one that the program has chosen."""
    _see_gpus(monkeypatch, gpus, local_rank)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen)
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert distributed.choose_device(name) == torch.device(wanted)
    assert current == ([torch.device(wanted)] if wanted != "cpu" else [])


@pytest.mark.parametrize(
    "gpus, local_rank, reason",
    [(0, None, "torch sees no GPU; write"), (2, "2", "^this node has 2 GPUs; start at most")],
)
def test_a_device_that_is_not_there_is_refused(monkeypatch, gpus, local_rank, reason):
    _see_gpus(monkeypatch, gpus, local_rank)
    with pytest.raises(ValueError, match=reason):
        distributed.choose_device("cuda")


def test_a_process_alone_needs_no_launcher(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    distributed.init_distributed(torch.device("cpu"), 90)
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    distributed.leave_distributed()
    assert not dist.is_initialized()


def test_meshes_of_replicas():
    """Rank 5 of 8, in the second of two replicas, with rank 4 on the same sequences."""
    with fake_world(8, rank=5):
        meshes = distributed.build_meshes(Parallelism(dp_replicate=2, cp=2), 1, "cpu")
        assert meshes.fsdp.mesh_dim_names == ("dp_replicate", "dp_shard_cp")
        assert meshes.fsdp.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert meshes.cp.mesh_dim_names == ("cp_inter", "cp_intra")
        assert meshes.cp.mesh.tolist() == [[4], [5]]
        assert (meshes.dp_size, meshes.dp_rank) == (4, 2)


def test_meshes_without_replicas():
    """Weights are sharded over one axis: with two, fully_shard would copy them."""
    with fake_world(8, rank=5):
        meshes = distributed.build_meshes(Parallelism(cp=4), 2, "cpu")
        assert meshes.fsdp.mesh_dim_names == ("dp_shard_cp",)
        assert meshes.fsdp.mesh.tolist() == list(range(8))
        assert meshes.cp.mesh.tolist() == [[4, 5], [6, 7]]
        assert (meshes.dp_size, meshes.dp_rank) == (2, 1)
