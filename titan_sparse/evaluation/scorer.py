"""Scorer: one sequence through a decoder without gradients, whatever the mesh; what all evaluations are made of."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from titan_sparse.attention import ContextParallel
from titan_sparse.config import padding_multiple
from titan_sparse.data.packing import IGNORED_LABEL
from titan_sparse.data.tokenizer import Tokenizer
from titan_sparse.from_config import build_mask
from titan_sparse.loss import answer_scores, token_cross_entropy
from titan_sparse.models.decoder import Decoder, run_blocks

if TYPE_CHECKING:
    from titan_sparse.config import Config

T = TypeVar("T")


class Sequence(NamedTuple):
    """One sequence in global order. tokens int64 [n]. labels int64 [n], already shifted; -100 where nothing is scored."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]


class Scorer:
    """Runs sequences of one document through `model`, in the attention that `config` says.

    Every method is collective over the world: each data-parallel rank brings a sequence of its own (`own` shares them
    out), the ranks of a context-parallel group the same one.
    """

    def __init__(
        self,
        model: Decoder,
        config: "Config",
        cp: ContextParallel,
        device: torch.device,
        tokenizer: Tokenizer,
        dp_rank: int,
        dp_size: int,
    ) -> None:
        self.model, self.attention, self.cp, self.device, self.tokenizer = (
            model,
            config.attention,
            cp,
            device,
            tokenizer,
        )
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.multiple, self.chunk_tokens = (
            padding_multiple(config),
            config.training.loss_chunk_tokens,
        )

    def own(self, items: Iterable[T]) -> Iterator[tuple[int, T | None]]:
        """(number, item) of the items that are this data-parallel rank's; None where others have one more than this rank,
        which must take part in their forward all the same."""
        for round_number, group in enumerate(_batched(items, self.dp_size)):
            item = group[self.dp_rank] if self.dp_rank < len(group) else None
            yield round_number * self.dp_size + self.dp_rank, item

    def token_losses(self, sequence: Sequence | None, length: int) -> tuple[Tensor, Tensor]:
        """Cross-entropy of this rank's labels that count, [N] fp32 (fp64 for fp64), and their positions, int64 [N].

        length: what to pad to, tokens; the same on all ranks."""
        sequence = self._nothing() if sequence is None else sequence
        losses, labels, positions = self._forward(sequence, length, token_cross_entropy)
        counts = labels != IGNORED_LABEL
        return losses[counts], positions[counts]

    def answer(self, sequence: Sequence | None, length: int) -> tuple[Tensor, Tensor]:
        """Of the N labels that count, in global order and on every rank of the context-parallel group: cross-entropy,
        float64 [N], and the most likely token, int64 [N]."""
        sequence = self._nothing() if sequence is None else sequence
        where = np.flatnonzero(sequence.labels != IGNORED_LABEL)
        (losses, predicted), labels, positions = self._forward(sequence, length, answer_scores)
        slots = torch.searchsorted(
            torch.from_numpy(where).to(self.device), positions[labels != IGNORED_LABEL]
        )
        gathered = torch.zeros(2, len(where), dtype=torch.float64, device=self.device)
        # Token ids are exact in float64.
        gathered[:, slots] = torch.stack([losses.double(), predicted.double()])
        gathered = self.cp.all_reduce(gathered)
        return gathered[0], gathered[1].long()

    def release(self) -> None:
        """Free parameters that FSDP keeps gathered after a forward that no backward follows."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def padded_length(self, length: int) -> int:
        """Tokens of a sequence of `length` tokens once padded to whole blocks of every rank."""
        return length + -length % self.multiple

    def _nothing(self) -> Sequence:
        return Sequence(np.array([self.tokenizer.end_of_document]), np.array([IGNORED_LABEL]))

    @torch.no_grad()
    def _forward(
        self, sequence: Sequence, length: int, loss: Callable[..., Any]
    ) -> tuple[Any, Tensor, Tensor]:
        """What `loss` returns; this rank's labels and positions [1, S_local]."""
        count, total = len(sequence.tokens), self.padded_length(length)
        if count > total:
            raise ValueError(f"a sequence of {count} tokens does not fit in {total}")
        tokens = np.pad(sequence.tokens, (0, total - count), constant_values=self.tokenizer.padding)
        labels = np.pad(sequence.labels, (0, total - count), constant_values=IGNORED_LABEL)
        rows = self.cp.balance(build_mask(self.attention, [[count]]).rows(total, self.device))
        tokens, labels, positions = (
            self.cp.shard(torch.from_numpy(x.astype(np.int64))[None], 1, rows.table).to(self.device)
            for x in (tokens, labels, np.arange(total))
        )
        kept, self.model.run_blocks = (
            self.model.run_blocks,
            run_blocks,
        )  # no backward: nothing is kept, nothing to offload
        try:
            result = self.model(tokens, positions, rows, labels, self.chunk_tokens, 0.0, loss)
        finally:
            self.model.run_blocks = kept
        return result, labels, positions


def _batched(items: Iterable[T], size: int) -> Iterator[tuple[T, ...]]:
    iterator = iter(items)  # itertools.batched came with Python 3.12
    while group := tuple(itertools.islice(iterator, size)):
        yield group
