"""Record every call of a process group, whoever makes it."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch.distributed as dist

KINDS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "recv": "receive",
    "recv_anysource": "receive",
}
"""Methods of a process group, in torch 2.11 and in 2.13, and what they are called here."""


class Said(NamedTuple):
    """One call. ranks: global ranks of its group."""

    kind: str
    ranks: tuple[int, ...]


def counts(said: list[Said]) -> Counter[str]:
    return Counter(call.kind for call in said)


@contextlib.contextmanager
def collectives() -> Iterator[list[Said]]:
    """Record all calls inside. It wraps process groups, below all of torch.distributed."""
    said: list[Said] = []

    def recorded(method: Callable, kind: str) -> Callable:
        @functools.wraps(method)
        def call(group: dist.ProcessGroup, *args, **kwargs):
            ranks = tuple(dist.get_process_group_ranks(group))
            said.append(Said(kind, ranks))
            return method(group, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, kind in KINDS.items():
            if hasattr(dist.ProcessGroup, name):
                method = getattr(dist.ProcessGroup, name)
                patch.setattr(dist.ProcessGroup, name, recorded(method, kind))
        yield said
