"""Device meshes, and how a decoder is put on them: activation checkpointing, then compile, then FSDP2."""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from titan_sparse.config import ActivationCheckpoint, Compile, Parallelism
from titan_sparse.models.decoder import Decoder
from titan_sparse.training.activation_checkpoint import checkpointed
from titan_sparse.training.job_store import refuse_differences, store_of_this_start
from titan_sparse.training.stacks import record_collectives


class Meshes(NamedTuple):
    """The meshes of a run. Ranks count dp_replicate, dp_shard, cp_inter, cp_intra from the outside in,
    so that cp_intra stays in a node."""

    fsdp: DeviceMesh
    """axis ("dp_shard_cp",): parameters are sharded over all data- and context-parallel ranks. With
    replicas ("dp_replicate", "dp_shard_cp"), which fully_shard reads as HSDP"""
    cp: DeviceMesh
    """axes ("cp_inter", "cp_intra")"""
    dp_size: int
    """data-parallel ranks"""
    dp_rank: int
    """the ranks of one context-parallel group share it and read the same data"""


def choose_device(name: str) -> torch.device:
    """Return the device that training.device names, and make a GPU the current one of this process.

    Under torchrun it is the GPU of LOCAL_RANK. Otherwise it is the one that the program has chosen
    with torch.cuda.set_device(), which is number 0 by default. Raises ValueError if there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError('training.device = "cuda", but torch sees no GPU; write "cpu" or "auto"')
    if "LOCAL_RANK" in os.environ:
        index = int(os.environ["LOCAL_RANK"])
    else:
        index = torch.cuda.current_device()
    count = torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"this node has {count} GPUs; start at most as many processes on it")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def init_distributed(
    device: torch.device, timeout_seconds: int, alike: Mapping[str, str] | None = None
) -> None:
    """Join torchrun's process group, or make one of this process alone; one that exists is kept.

    alike: what must be the same on all ranks, by name. Counters travel by gloo, tensors on GPUs by
    NCCL. All groups made later meet in the same store, which no earlier attempt of torchrun has used.
    Raises Refusal on all ranks, before any of them has sent another a tensor, if `alike` differs.
    """
    store, rank, world_size = store_of_this_start(timeout_seconds)
    refuse_differences(store, rank, world_size, alike or {})
    if dist.is_initialized():
        return
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        record_collectives()
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=timeout_seconds),
        store=store,
        rank=rank,
        world_size=world_size,
    )


def leave_distributed() -> None:
    """The end of a distributed program: no process group is left."""
    dist.destroy_process_group()


def build_meshes(parallelism: Parallelism, cp_intra: int, device_type: str) -> Meshes:
    """The meshes of the running world.

    World size = dp_replicate * dp_shard * cp, which config.check() has seen to.
    """
    world_size = dist.get_world_size()
    cp = parallelism.cp
    replicas = parallelism.dp_replicate
    dp_size = world_size // cp
    # Two meshes over the same ranks: one mesh cannot name dp_shard x cp as a single axis and its
    # parts too.
    sharding = init_device_mesh(
        device_type,
        (replicas, world_size // replicas),
        mesh_dim_names=("dp_replicate", "dp_shard_cp"),
    )
    sequence = init_device_mesh(
        device_type,
        (dp_size, cp // cp_intra, cp_intra),
        mesh_dim_names=("dp", "cp_inter", "cp_intra"),
    )
    fsdp = sharding if replicas > 1 else sharding["dp_shard_cp"]
    return Meshes(
        fsdp=fsdp,
        cp=sequence["cp_inter", "cp_intra"],
        dp_size=dp_size,
        dp_rank=dist.get_rank() // cp,
    )


def parallelize(
    model: Decoder,
    fsdp: DeviceMesh,
    dtype: torch.dtype,
    reshard_after_forward: bool,
    activation_checkpoint: ActivationCheckpoint,
    compile: Compile,
    offload: bool = False,
) -> None:
    """Checkpoint, compile and shard every block, then shard the rest. In place; parameter names do not
    change.

    dtype: of the forward and backward. Gradients are reduced in fp32 (fp64 for fp64) and summed, not
    averaged: the loss is already divided by the global number of tokens.
    offload: sharded parameters and gradients live on the CPU.
    """
    policy = CPUOffloadPolicy(pin_memory=fsdp.device_type == "cuda") if offload else OffloadPolicy()
    mixed = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.promote_types(dtype, torch.float32),
        cast_forward_inputs=False,  # the RoPE tables stay fp32
    )
    if compile.enable:
        # Only where asked for: it loads inductor, which takes a second.
        from titan_sparse.training.compiling import compile_layer
    for name, block in model.layers.items():
        block = checkpointed(block, activation_checkpoint.mode)
        if compile.enable:
            compile_layer(block, compile.backend)
        model.layers[name] = fully_shard(
            block,
            mesh=fsdp,
            mp_policy=mixed,
            offload_policy=policy,
            reshard_after_forward=reshard_after_forward,
        )
    # Embedding, norm and head belong to the root: the head's weight is read in the root's forward,
    # tied or not.
    fully_shard(model, mesh=fsdp, mp_policy=mixed, offload_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
