"""How a decoder is put on devices: what FSDP does with its weights, and where they live."""

from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.attention.collectives import collectives, counts
from tests.fake_step import fake_world
from tests.models.helpers import TINY, causal, dense_attend, sample
from titan_sparse.config import ActivationCheckpoint, Compile, Parallelism
from titan_sparse.models.decoder import Decoder
from titan_sparse.training.build_model import parallelize
from titan_sparse.training.distributed import build_meshes

BLOCKS = TINY.layers


def _decoder(mesh: DeviceMesh, reshards: bool = True, compile: Compile | None = None) -> Decoder:
    """TINY with weights of 0.01, on rank 0 of a world whose collectives do nothing."""
    with torch.device("meta"):
        model = Decoder(TINY, dense_attend)
    parallelize(
        model,
        mesh,
        torch.float32,
        reshards,
        ActivationCheckpoint("none"),
        compile or Compile(),
    )
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


@pytest.mark.parametrize("replicas", [1, 2])
def test_meshes_by_hand(replicas):
    """Eight ranks, four to a sequence, on two nodes of two: seen from rank 0."""
    with fake_world(8):
        meshes = build_meshes(Parallelism(dp_replicate=replicas, cp=4), 2, "cpu")
        assert meshes.cp.mesh.tolist() == [[0, 1], [2, 3]]
        assert meshes.cp.mesh_dim_names == ("cp_inter", "cp_intra")
        assert (meshes.dp_size, meshes.dp_rank) == (2, 0)
        if replicas == 1:
            assert meshes.fsdp.mesh.tolist() == list(range(8))
        else:
            assert meshes.fsdp.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


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
