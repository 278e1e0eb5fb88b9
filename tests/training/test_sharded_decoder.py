"""Where a run's tensors live: its device, its process group, its meshes, what FSDP does with weights,
and what is compiled. GPUs and other ranks are stand-ins."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor
from torch._inductor.choices import InductorChoices
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.attention.collectives import collectives, counts
from tests.fake_step import fake_world
from tests.models.helpers import TINY, causal, dense_attend, sample
from titan_sparse.config import ActivationCheckpoint, Compile, Parallelism
from titan_sparse.models.decoder import Decoder
from titan_sparse.training import distributed
from titan_sparse.training.build_model import parallelize
from titan_sparse.training.compiling import ChoicesWithoutRaces, compile_layer
from titan_sparse.training.distributed import build_meshes

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
        ("auto", 2, None, 1, "cuda:1"),
        ("cuda", 2, "1", 0, "cuda:1"),
        ("cuda", 0, None, 0, "torch sees no GPU; write"),
        ("cuda", 2, "2", 0, "^this node has 2 GPUs; start at most"),
    ],
)
def test_the_device_of_a_process(monkeypatch, name, gpus, local_rank, chosen, wanted):
    """On GPUs it becomes the current one. Without torchrun it is the one that the program has chosen."""
    _see_gpus(monkeypatch, gpus, local_rank)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen)
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    if ";" in wanted:
        with pytest.raises(ValueError, match=wanted):
            distributed.choose_device(name)
        return
    assert distributed.choose_device(name) == torch.device(wanted)
    assert current == ([torch.device(wanted)] if wanted != "cpu" else [])


@pytest.mark.parametrize(
    "parallelism, cp_intra, fsdp, cp, dp",
    [
        # Weights are sharded over one axis: with two, fully_shard would copy them.
        (Parallelism(cp=4), 2, list(range(8)), [[4, 5], [6, 7]], (2, 1)),
        (
            Parallelism(dp_replicate=2, cp=2),
            1,
            [[0, 1, 2, 3], [4, 5, 6, 7]],
            [[4], [5]],
            (4, 2),
        ),
    ],
)
def test_meshes_by_hand(parallelism, cp_intra, fsdp, cp, dp):
    """Rank 5 of 8."""
    with fake_world(8, rank=5):
        meshes = build_meshes(parallelism, cp_intra, "cpu")
        names = (
            ("dp_shard_cp",) if parallelism.dp_replicate == 1 else ("dp_replicate", "dp_shard_cp")
        )
        assert meshes.fsdp.mesh_dim_names == names
        assert meshes.fsdp.mesh.tolist() == fsdp
        assert meshes.cp.mesh_dim_names == ("cp_inter", "cp_intra")
        assert meshes.cp.mesh.tolist() == cp
        assert (meshes.dp_size, meshes.dp_rank) == dp


def _decoder(mesh: DeviceMesh, reshards: bool = True, compile: Compile | None = None) -> Decoder:
    """TINY with weights of 0.01, on rank 0 of a world whose collectives do nothing."""
    with torch.device("meta"):
        model = Decoder(TINY, dense_attend)
    kept = ActivationCheckpoint("none")
    parallelize(model, mesh, torch.float32, reshards, kept, compile or Compile())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    return model


def _loss(model: Decoder) -> torch.Tensor:
    tokens, positions = sample(TINY)
    return model(tokens, positions, causal(tokens.shape[1]), labels=tokens)


@pytest.mark.parametrize("reshards", [True, False])
def test_weights_are_given_back_after_the_forward(reshards):
    with fake_world(2):
        model = _decoder(init_device_mesh("cpu", (2,)), reshards)
        with collectives() as forward:
            loss = _loss(model)
        for block in model.layers.values():
            is_sharded = [isinstance(weight, DTensor) for weight in block.parameters()]
            assert set(is_sharded) == {reshards}
        with collectives() as backward:
            loss.backward()
    # The root, which holds embedding and head, is gathered once, and blocks again if given back.
    assert counts(forward) == {"all_gather": BLOCKS + 1}
    said = {"reduce_scatter": BLOCKS + 1}
    if reshards:
        said["all_gather"] = BLOCKS
    assert counts(backward) == said


def test_replicas_add_up_what_their_shards_hold():
    """Two replicas of two shards: sums over the shards, then of each part over the replicas."""
    with fake_world(4):
        meshes = build_meshes(Parallelism(dp_replicate=2, cp=2), 2, "cpu")
        model = _decoder(meshes.fsdp)
        loss = _loss(model)
        with collectives() as said:
            loss.backward()
    over_shards = [call.ranks for call in said if call.kind == "reduce_scatter"]
    over_replicas = [call.ranks for call in said if call.kind == "all_reduce"]
    assert over_shards == [(0, 1)] * (BLOCKS + 1)
    assert over_replicas == [(0, 2)] * (BLOCKS + 1)


@pytest.mark.parametrize("enable", [False, True])
def test_blocks_are_compiled_if_asked_for(fresh_compiler, enable):
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        compiled.append(graph)
        return graph.forward

    with fake_world(2), torch.no_grad():
        setting = Compile(enable=enable, backend=backend)
        _loss(_decoder(init_device_mesh("cpu", (2,)), compile=setting))
    # Blocks are alike: one graph serves all of them.
    assert len(compiled) == int(enable)


def test_inductor_takes_our_choices():
    """What they change is in kernels of GPUs: tests/gpu/test_compiling.py."""
    made_before = InductorChoices()  # what a thread keeps that has compiled something else
    compile_layer(nn.Linear(2, 2), "inductor")
    for choices in (made_before, inductor.inductor_choices_class()):
        function = choices.should_use_persistent_reduction
        assert function is ChoicesWithoutRaces.should_use_persistent_reduction
    assert not inductor.triton.mix_order_reduction
    # Without it, inductor would not cache what it compiles.
    assert inductor.inductor_choices_class().uuid() is not None
