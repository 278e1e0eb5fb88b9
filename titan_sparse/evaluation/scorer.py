"""Scorer: one sequence through a decoder without gradients, whatever the mesh.

All evaluations are made of it.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from titan_sparse.attention import ContextParallel
from titan_sparse.config import Config, padding_multiple
from titan_sparse.data.packing import IGNORED_LABEL
from titan_sparse.data.tokenizer import Tokenizer
from titan_sparse.from_config import build_layer_masks, build_mask
from titan_sparse.loss import answer_scores, token_cross_entropy
from titan_sparse.models.config import DecoderConfig
from titan_sparse.models.decoder import Decoder, run_blocks
from titan_sparse.training.probe_rows import fixed_probe_rows

T = TypeVar("T")


class Sequence(NamedTuple):
    """One sequence in global order."""

    tokens: NDArray[np.int64]
    """int64 [n]"""
    labels: NDArray[np.int64]
    """int64 [n], already shifted; -100 where nothing is scored"""


class Scorer:
    """Runs sequences of one document through `model`, with the attention of `config`.

    Every method is collective over the world. Each data-parallel rank brings a sequence of its own
    (own() shares them out), the ranks of a context-parallel group the same one.
    """

    def __init__(
        self,
        model: Decoder,
        model_config: DecoderConfig,
        config: Config,
        cp: ContextParallel,
        device: torch.device,
        tokenizer: Tokenizer,
        dp_rank: int,
        dp_size: int,
    ) -> None:
        self.model = model
        self.model_config = model_config
        self.attention = config.attention
        self.cp = cp
        self.device = device
        self.tokenizer = tokenizer
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.multiple = padding_multiple(config)
        self.chunk_tokens = config.training.loss_chunk_tokens

    def own(self, items: Iterable[T]) -> Iterator[tuple[int, T | None]]:
        """(number, item) of the items that are this data-parallel rank's.

        The item is None where other ranks have one more than this rank, which must take part in
        their forward all the same.
        """
        for round_number, group in enumerate(_batched(items, self.dp_size)):
            item = group[self.dp_rank] if self.dp_rank < len(group) else None
            yield round_number * self.dp_size + self.dp_rank, item

    def token_losses(self, sequence: Sequence | None, length: int) -> tuple[Tensor, Tensor]:
        """Cross-entropy of this rank's labels that count, [N] fp32 (fp64 for fp64), and their
        positions, int64 [N].

        length: tokens to pad to, the same on all ranks.
        """
        losses, labels, positions = self._forward(sequence, length, token_cross_entropy)
        counts = labels != IGNORED_LABEL
        return losses[counts], positions[counts]

    def answer(self, sequence: Sequence | None, length: int) -> tuple[Tensor, Tensor]:
        """Of the N labels that count: cross-entropy, float64 [N], and the most likely token, int64 [N].

        In global order, and on every rank of the context-parallel group.
        """
        if sequence is None:
            sequence = self._nothing()
        scores, labels, positions = self._forward(sequence, length, answer_scores)
        losses, predicted = scores
        # Each rank has some of the N labels. It puts its results where they belong; a sum over ranks
        # then fills in the rest.
        scored = torch.from_numpy(np.flatnonzero(sequence.labels != IGNORED_LABEL)).to(self.device)
        slots = torch.searchsorted(scored, positions[labels != IGNORED_LABEL])
        gathered = torch.zeros(2, len(scored), dtype=torch.float64, device=self.device)
        # Token ids are exact in float64.
        gathered[:, slots] = torch.stack([losses.double(), predicted.double()])
        gathered = self.cp.all_reduce(gathered)
        return gathered[0], gathered[1].long()

    def release(self) -> None:
        """Free the parameters that FSDP keeps gathered after a forward without a backward."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def padded_length(self, length: int) -> int:
        """Tokens of a sequence of `length` tokens once padded to whole blocks of every rank."""
        return length + -length % self.multiple

    def _nothing(self) -> Sequence:
        """A sequence without anything to score, for a rank that only takes part."""
        tokens = np.array([self.tokenizer.end_of_document])
        labels = np.array([IGNORED_LABEL])
        return Sequence(tokens, labels)

    @torch.no_grad()
    def _forward(
        self, sequence: Sequence | None, length: int, loss: Callable[..., Any]
    ) -> tuple[Any, Tensor, Tensor]:
        """What `loss` returns; this rank's labels and positions [1, S_local]."""
        if sequence is None:
            sequence = self._nothing()
        count = len(sequence.tokens)
        total = self.padded_length(length)
        if count > total:
            raise ValueError(f"a sequence of {count} tokens does not fit in {total}")
        lengths = [[count]]
        table = self.cp.balance(build_mask(self.attention, lengths).rows(total, self.device)).table
        masks = build_layer_masks(
            self.attention, self.model_config, lengths, total, self.cp, self.device, table
        )

        def local(values: NDArray[np.integer], padding: int) -> Tensor:
            """This rank's part of values [n] once padded to [total]: int64 [1, S_local]."""
            padded = np.pad(values, (0, total - len(values)), constant_values=padding)
            whole = torch.from_numpy(padded.astype(np.int64))[None]
            return self.cp.shard(whole, 1, table).to(self.device)

        tokens = local(sequence.tokens, self.tokenizer.padding)
        labels = local(sequence.labels, IGNORED_LABEL)
        positions = local(np.arange(total), 0)
        # No backward follows: nothing is kept for it, so there is nothing to offload.
        training_run_blocks = self.model.run_blocks
        self.model.run_blocks = run_blocks
        try:
            with fixed_probe_rows():
                result = self.model(tokens, positions, masks, labels, self.chunk_tokens, 0.0, loss)
        finally:
            self.model.run_blocks = training_run_blocks
        return result, labels, positions


def _batched(items: Iterable[T], size: int) -> Iterator[tuple[T, ...]]:
    """Tuples of `size` items, the last one of those that are left."""
    iterator = iter(items)  # itertools.batched came with Python 3.12
    group = tuple(itertools.islice(iterator, size))
    while group:
        yield group
        group = tuple(itertools.islice(iterator, size))
