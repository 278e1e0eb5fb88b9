"""Device meshes, and how a decoder is put on them: activation checkpointing, then compile, then FSDP2."""

import os
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

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

from titan_sparse.attention import ContextParallel
from titan_sparse.attention.context_parallel.group import forget_contexts
from titan_sparse.config import resolve_overlap_stages
from titan_sparse.from_config import schedule_named
from titan_sparse.models.decoder import Decoder
from titan_sparse.training.activation_checkpoint import checkpointed

if TYPE_CHECKING:
    from titan_sparse.config import ActivationCheckpoint, Attention, Compile, Parallelism


class Meshes(NamedTuple):
    """Ranks count dp_replicate, dp_shard, cp_inter, cp_intra from the outside in, so that cp_intra stays in a node.

    fsdp: axis ("dp_shard_cp",), parameters sharded over all data- and context-parallel ranks; with replicas
    ("dp_replicate", "dp_shard_cp"), which fully_shard reads as HSDP. cp: axes ("cp_inter", "cp_intra").
    dp_size, dp_rank: data-parallel ranks; those of one context-parallel group share dp_rank and read the same data.
    """

    fsdp: DeviceMesh
    cp: DeviceMesh
    dp_size: int
    dp_rank: int


def choose_device(name: str) -> torch.device:
    """The device of this process: config training.device, on GPUs the one of LOCAL_RANK. ValueError if there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError('training.device = "cuda", but torch sees no GPU; write "cpu" or "auto"')
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"this node has {torch.cuda.device_count()} GPUs; start at most as many processes on it"
        )
    return torch.device("cuda", local_rank)


def init_distributed(device: torch.device, timeout_seconds: int) -> None:
    """Join torchrun's process group, or make one of this process alone. Counters travel by gloo, tensors by NCCL."""
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_seconds)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1
        )


def leave_distributed() -> None:
    """The end of a distributed program: no process group is left, those of context parallelism first."""
    forget_contexts()
    dist.destroy_process_group()


def build_meshes(parallelism: "Parallelism", cp_intra: int, device_type: str) -> Meshes:
    """The meshes of the running world; world size = dp_replicate * dp_shard * cp, which config.check() has seen to."""
    cp, replicas = parallelism.cp, parallelism.dp_replicate
    dp_size = dist.get_world_size() // cp
    # Two meshes over the same ranks, since one cannot name both dp_shard x cp as a single axis and its parts.
    names = ("dp_replicate", "dp_shard_cp")
    sharding = init_device_mesh(
        device_type, (replicas, dist.get_world_size() // replicas), mesh_dim_names=names
    )
    sequence = init_device_mesh(
        device_type,
        (dp_size, cp // cp_intra, cp_intra),
        mesh_dim_names=("dp", "cp_inter", "cp_intra"),
    )
    fsdp = sharding if replicas > 1 else sharding["dp_shard_cp"]
    return Meshes(fsdp, sequence["cp_inter", "cp_intra"], dp_size, dist.get_rank() // cp)


def build_context_parallel(attention: "Attention", mesh: DeviceMesh) -> ContextParallel:
    """What the [attention] section says about the ranks of the mesh that share a sequence; collective over it."""
    # float32 is also what says nothing: gradients travel as they are summed, in float64 for float64.
    gradient_dtype = (
        None if attention.gradient_dtype == "float32" else getattr(torch, attention.gradient_dtype)
    )
    inter, intra = mesh.shape if mesh.ndim == 2 else (1, mesh.size())
    return ContextParallel(
        mesh,
        attention.layout,
        schedule_named(attention, inter, intra),
        attention.block_size,
        attention.backward_circulates,
        gradient_dtype,
        resolve_overlap_stages(attention, inter),
    )


def parallelize(
    model: Decoder,
    fsdp: DeviceMesh,
    dtype: torch.dtype,
    reshard_after_forward: bool,
    activation_checkpoint: "ActivationCheckpoint",
    compile: "Compile",
    offload: bool = False,
) -> None:
    """Checkpoint, compile and shard every block, then shard the rest. In place; parameter names do not change.

    dtype: of the forward and backward. Gradients are reduced in fp32 (fp64 for fp64) and summed, not averaged: the loss
    is already divided by the global number of tokens. offload: sharded parameters and gradients live on the CPU.
    """
    policy = CPUOffloadPolicy(pin_memory=fsdp.device_type == "cuda") if offload else OffloadPolicy()
    mixed = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.promote_types(dtype, torch.float32),
        cast_forward_inputs=False,  # the RoPE tables stay fp32
    )
    for name, block in model.layers.items():
        block = checkpointed(block, activation_checkpoint.mode)
        if compile.enable:
            block.compile(backend=compile.backend, fullgraph=True)
        model.layers[name] = fully_shard(
            block,
            mesh=fsdp,
            mp_policy=mixed,
            offload_policy=policy,
            reshard_after_forward=reshard_after_forward,
        )
    # Embedding, norm and head belong to the root: the head's weight is read in the root's forward, tied or not.
    fully_shard(model, mesh=fsdp, mp_policy=mixed, offload_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
