"""Memory for what other ranks send. It is kept from call to call."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 256
"""Bytes. Every tensor begins at a multiple of it, as kernels and copies like it best."""

Kind = tuple[Sequence[int], torch.dtype]
"""The shape and dtype of a tensor."""


class Buffers:
    """One piece of memory for each slot, as large as the most that the slot has held.

    A run that sees many lengths, such as an evaluation, keeps room for the longest of them and not
    for each. What lies in a slot is lost when the slot is asked for again.
    """

    def __init__(self):
        self._memory: dict[tuple[str, torch.device], Tensor] = {}

    def take(self, slot: str, kinds: Sequence[Kind], device: torch.device) -> list[Tensor]:
        """Contiguous tensors of these kinds, one behind the other in the memory of the slot."""
        begins = []
        end = 0
        for shape, dtype in kinds:
            begins.append(end)
            nbytes = math.prod(shape) * dtype.itemsize
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = self._at_least(end, slot, device)
        tensors = []
        for begin, (shape, dtype) in zip(begins, kinds, strict=True):
            nbytes = math.prod(shape) * dtype.itemsize
            part = memory[begin : begin + nbytes]
            tensors.append(part.view(dtype).view(shape))
        return tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(memory.nbytes for memory in self._memory.values())

    @property
    def addresses(self) -> dict[tuple[str, torch.device], int]:
        """Where the memory of each slot is."""
        return {key: memory.data_ptr() for key, memory in self._memory.items()}

    def _at_least(self, nbytes: int, slot: str, device: torch.device) -> Tensor:
        """uint8 [nbytes or more]: the memory of a slot, which grows where it is too small."""
        key = (slot, device)
        if key not in self._memory or self._memory[key].nbytes < nbytes:
            # The old memory goes first: both are never held at the same time.
            self._memory.pop(key, None)
            self._memory[key] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._memory[key]
