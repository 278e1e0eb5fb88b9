"""Where a run's tensors live: its device, its process group, its meshes, and what FSDP2 is asked for.

GPUs and other ranks are stand-ins. What sharding does to numbers is in test_trainer.py and
test_wiring.py.
"""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._inductor import config as inductor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

from tests.fake_step import fake_world
from tests.runs import TINY
from titan_sparse.config import ActivationCheckpoint, Compile, Parallelism
from titan_sparse.models.decoder import Decoder
from titan_sparse.training import build_model, distributed

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


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """What joining a process group calls. Nothing is joined."""
    calls: list[tuple] = []

    def join(backend: str, **options) -> None:
        calls.append(("join", backend, options))

    monkeypatch.setattr(dist, "init_process_group", join)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("device", device)))
    monkeypatch.setattr(distributed, "record_collectives", lambda: calls.append(("record",)))
    monkeypatch.setattr(distributed, "refuse_differences", lambda *_: None)
    monkeypatch.setattr(
        distributed, "store_of_this_start", lambda seconds: (f"store for {seconds} s", 3, 8)
    )
    return calls


def test_a_process_alone_needs_no_launcher(monkeypatch):
    """And leaves no process group."""
    monkeypatch.delenv("RANK", raising=False)
    distributed.init_distributed(torch.device("cpu"), 90)
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    distributed.leave_distributed()
    assert not dist.is_initialized()


def test_a_process_of_torchrun_joins_on_its_gpu(monkeypatch, calls):
    """Its device is set first, and NCCL writes down what it does."""
    monkeypatch.setenv("RANK", "3")
    gpu = torch.device("cuda", 1)
    distributed.init_distributed(gpu, 90)
    assert calls == [
        ("device", gpu),
        ("record",),
        (
            "join",
            "cpu:gloo,cuda:nccl",
            {
                "timeout": timedelta(seconds=90),
                "store": "store for 90 s",
                "rank": 3,
                "world_size": 8,
            },
        ),
    ]


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


def _decoder() -> Decoder:
    with torch.device("meta"):
        return Decoder(TINY, lambda q, k, v, mask: q)


@pytest.mark.parametrize(
    "dtype, sums", [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]
)
@pytest.mark.parametrize("reshards", [True, False])
def test_what_is_sharded_and_how(monkeypatch, dtype, sums, reshards):
    """Every block by itself, then the rest. Gradients are summed, in float32 at least."""
    asked, factors, plain_sums, compiled = [], [], [], []
    shard = build_model.fully_shard

    def fully_shard(module: nn.Module, **options) -> nn.Module:
        asked.append(options)
        return shard(module, **options)

    monkeypatch.setattr(build_model, "fully_shard", fully_shard)
    monkeypatch.setattr(
        FSDPModule, "set_gradient_divide_factor", lambda _, factor: factors.append(factor)
    )
    monkeypatch.setattr(
        FSDPModule, "set_force_sum_reduction_for_comms", lambda _, plain: plain_sums.append(plain)
    )
    monkeypatch.setattr(nn.Module, "compile", lambda _, **options: compiled.append(options))
    model = _decoder()
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        build_model.parallelize(
            model, mesh, dtype, reshards, ActivationCheckpoint("none"), Compile()
        )
    rest = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=sums, cast_forward_inputs=False
        ),
        "offload_policy": OffloadPolicy(),
    }
    block = rest | {"reshard_after_forward": reshards}
    assert asked == [block] * BLOCKS + [rest]
    assert compiled == []
    assert all(isinstance(module, FSDPModule) for module in [*model.layers.values(), model])
    assert factors == [1.0] * (BLOCKS + 1)
    # gloo has no sum that is multiplied first.
    assert plain_sums == [True] * (BLOCKS + 1)


@pytest.mark.parametrize("device_type, pinned", [("cuda", True), ("cpu", False)])
def test_weights_on_the_cpu_are_pinned_for_a_gpu(monkeypatch, device_type, pinned):
    policies, compiled = [], []
    inductor.triton.mix_order_reduction = True

    def fully_shard(module: nn.Module, offload_policy: OffloadPolicy, **_) -> nn.Module:
        policies.append(offload_policy)
        return module

    monkeypatch.setattr(build_model, "fully_shard", fully_shard)
    monkeypatch.setattr(nn.Module, "compile", lambda _, **options: compiled.append(options))
    build_model.parallelize(
        _decoder(),
        SimpleNamespace(device_type=device_type),
        torch.bfloat16,
        True,
        ActivationCheckpoint("none"),
        Compile(enable=True, backend="aot_eager"),
        offload=True,
    )
    assert policies == [CPUOffloadPolicy(pin_memory=pinned)] * (BLOCKS + 1)
    assert compiled == [{"backend": "aot_eager", "fullgraph": True}] * BLOCKS
    assert not inductor.triton.mix_order_reduction, "its gradients can be wrong: compiling.py"
