"""Who writes what: DCP's plan of a save, made once and used for all saves of the same tensors."""

import heapq
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.utils import find_state_dict_object


@dataclass
class Plan:
    """What this rank writes."""

    sources: dict[str, Tensor]
    """the tensors of model and optimizer that it was made for, by name"""
    value_names: tuple[str, ...]
    """of everything else that is saved, by any rank"""
    tensors: dict[MetadataIndex, Tensor]
    """parts of model and optimizer that this rank writes: its shards, on their devices"""
    values: list[MetadataIndex]
    """everything else that this rank writes"""
    metadata: Metadata | None
    """of the whole save, on rank 0; the places in files are still missing"""

    def fits(self, tensors: dict[str, Tensor], value_names: tuple[str, ...]) -> bool:
        """Whether it is the plan of a save of these, the very same tensors."""
        return (
            self.sources.keys() == tensors.keys()
            and all(tensors[name] is source for name, source in self.sources.items())
            and self.value_names == value_names
        )


def make_plan(tensors: dict[str, Tensor], values: dict[str, Any]) -> Plan:
    """Share the work out among the ranks, each part to one of those that have it.

    Collective. tensors: of model and optimizer. values: name of a part -> its state.
    """
    planner = DefaultSavePlanner()
    rank = dist.get_rank()
    planner.set_up_planner({**tensors, **values}, is_coordinator=rank == 0)
    gathered: list[SavePlan | None] | None = None
    if rank == 0:
        gathered = [None] * dist.get_world_size()
    dist.gather_object(planner.create_local_plan(), gathered, dst=0)
    metadata = None
    if gathered is not None:
        gathered, metadata = planner.create_global_plan(gathered)
    received: list[SavePlan | None] = [None]
    dist.scatter_object_list(received, gathered, src=0)
    own = planner.finish_plan(received[0])

    indices = [item.index for item in own.items]
    return Plan(
        sources=dict(tensors),
        value_names=tuple(name for name in planner.state_dict if name not in tensors),
        tensors={
            index: find_state_dict_object(tensors, index).detach()
            for index in indices
            if index.fqn in tensors
        },
        values=[index for index in indices if index.fqn not in tensors],
        metadata=metadata,
    )


def share_out(sizes: dict[MetadataIndex, int], files: int) -> list[list[MetadataIndex]]:
    """Parts for each of at most `files` files, about as many bytes in each. sizes: bytes."""
    heap: list[tuple[int, int]] = [(0, number) for number in range(files)]
    parts: list[list[MetadataIndex]] = [[] for _ in range(files)]
    for index in sorted(sizes, key=sizes.__getitem__, reverse=True):
        total, number = heap[0]
        parts[number].append(index)
        heapq.heapreplace(heap, (total + sizes[index], number))
    return [part for part in parts if part]
