"""Scorer: sequences through a decoder without gradients, on any mesh. All evaluations use it."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titan_sparse.attention import ContextParallel
from titan_sparse.config import Config, padding_multiple
from titan_sparse.data.endings import text_ends
from titan_sparse.data.tokenizer import Tokenizer
from titan_sparse.loss import IGNORE_INDEX, answer_scores, token_cross_entropy
from titan_sparse.models.config import DecoderConfig
from titan_sparse.models.decoder import Decoder

T = TypeVar("T")
R = TypeVar("R")


class Sequence(NamedTuple):
    """One sequence in global order: int64 [n].

    labels: already shifted; -100 where nothing is scored. [k, n]: k answers to the same text.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]


class ScoredBatch(NamedTuple):
    """This rank's part of padded sequences, as the model takes it: int64 [B, S_local] each.

    labels: a row for each answer. positions: global.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    masks: Any


class Interrupted(Exception):
    """An evaluation ends without a result, because the process is asked to stop."""


@dataclass(eq=False)
class Scorer:
    """Runs sequences of one document through `model`, with the attention of `config`.

    Every method is collective over the world. Each data-parallel rank brings a sequence of its own
    (own() distributes them). The ranks of a context-parallel group bring the same one.
    """

    model: Decoder
    model_config: DecoderConfig
    config: Config
    cp: ContextParallel
    device: torch.device
    tokenizer: Tokenizer
    masks: Callable[[list[list[int]], int], tuple[Any, Tensor | None]]
    """masks(lengths, seq_len): what the model takes as its mask, and which
    rank owns which blocks"""
    shard: Callable[..., Tensor]
    """shard(x, dim, table): this rank's part"""
    dp_rank: int
    dp_size: int
    must_stop: Callable[[], bool] = lambda: False
    """asked before each forward, on all ranks with the same answer"""

    def __post_init__(self) -> None:
        self.attention = self.config.attention
        self.multiple = padding_multiple(self.config)

    @functools.cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end a text. Raises ValueError as text_ends() does."""
        return frozenset(text_ends(self.config, self.tokenizer))

    def own(self, items: list[T]) -> Iterator[tuple[int, T | None]]:
        """(number, item) of the items of this data-parallel rank.

        The item is None where other ranks have one more than this rank, which must take part in
        their forward anyway.
        """
        for number in range(self.dp_rank, len(items) + self.dp_rank, self.dp_size):
            yield number, items[number] if number < len(items) else None

    def results(self, items: list[T], compute: Callable[[int, T | None], R]) -> list[R]:
        """compute(number, item) of each item, in order and the same on all ranks, which bring the
        same items. What it returns for None, as in own(), is dropped."""
        found = {number: compute(number, item) for number, item in self.own(items)}
        self.release()
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, found)
        merged = {number: result for found in of_ranks for number, result in found.items()}
        return [merged[number] for number in range(len(items))]

    def token_losses(self, sequence: Sequence | None, length: int) -> tuple[Tensor, Tensor]:
        """Cross-entropy of this rank's labels that count, [N] fp32 (fp64 for fp64), and their
        positions, int64 [N]. length: tokens to pad to, the same on all ranks."""
        batch = self.batch([sequence], length)
        losses = self.run(batch, token_cross_entropy)
        # Tokens without a label are not scored.
        counts = batch.labels != IGNORE_INDEX
        return losses[counts], batch.positions[counts]

    def answers(self, sequences: list[Sequence | None], length: int) -> list[tuple[Tensor, Tensor]]:
        """Cross-entropy, float64 [N], and the most likely token, int64 [N], of the N labels that
        count.

        A pair for each row of labels of the sequences, which go through the model together: in
        global order, and on every rank of the context-parallel group.
        """
        batch = self.batch(sequences, length)
        nothing = np.array([IGNORE_INDEX])
        answers = [np.atleast_2d(s.labels if s else nothing) for s in sequences]
        repeats = torch.tensor([len(of_text) for of_text in answers], device=self.device)
        text_of_row = torch.arange(len(answers), device=self.device).repeat_interleave(repeats)
        rows, columns = (batch.labels != IGNORE_INDEX).nonzero(as_tuple=True)

        def scores(hidden: Tensor, weight: Tensor, labels: Tensor, *rest: Any) -> Any:
            wanted = hidden[text_of_row[rows], columns]
            return answer_scores(wanted, weight, labels[rows, columns], *rest)

        losses, predicted = self.run(batch, scores)
        # Each rank has some of the labels. It puts its results at their positions; a sum over ranks
        # then fills in the rest. Token ids are exact in float64.
        shape = (2, len(batch.labels), length + -length % self.multiple)
        table = torch.zeros(shape, dtype=torch.float64, device=self.device)
        places = batch.positions[text_of_row[rows], columns]
        table[:, rows, places] = torch.stack([losses.double(), predicted.double()])
        table = self.cp.all_reduce(table)
        results = []
        for row, labels in enumerate(itertools.chain(*answers)):
            losses, predicted = table[:, row, np.flatnonzero(labels != IGNORE_INDEX)]
            results.append((losses, predicted.long()))
        return results

    def release(self) -> None:
        """Free the parameters that FSDP keeps gathered after a forward without a backward."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def batch(self, sequences: list[Sequence | None], length: int) -> ScoredBatch:
        """This rank's part of the sequences, padded to `length` tokens or the few more that all
        ranks' blocks hold. None: nothing to score, of a rank that only takes part."""
        end = np.array([self.tokenizer.end_of_document])
        nothing = Sequence(end, np.array([IGNORE_INDEX]))
        sequences = [sequence or nothing for sequence in sequences]
        total = length + -length % self.multiple
        lengths = [[len(sequence.tokens)] for sequence in sequences]
        if max(lengths) > [total]:
            raise ValueError(f"a sequence of {max(lengths)[0]} tokens does not fit in {total}")
        masks, table = self.masks(lengths, total)

        def local(rows: list[NDArray[np.integer]], padding: int) -> Tensor:
            """This rank's part of rows [n] or [k, n] once padded to [total]: int64 [B, S_local]."""
            padded = []
            for row in itertools.chain(*map(np.atleast_2d, rows)):
                padded.append(np.pad(row, (0, total - len(row)), constant_values=padding))
            whole = torch.from_numpy(np.stack(padded).astype(np.int64))
            return self.shard(whole, 1, table).to(self.device)

        return ScoredBatch(
            tokens=local([sequence.tokens for sequence in sequences], self.tokenizer.padding),
            labels=local([sequence.labels for sequence in sequences], IGNORE_INDEX),
            positions=local([np.arange(total)] * len(sequences), 0),
            masks=masks,
        )

    @torch.no_grad()
    def run(self, batch: ScoredBatch, loss: Callable[..., Any]) -> Any:
        """The result of `loss`, a function of titan_sparse.loss, for a
        batch. Raises Interrupted."""
        if self.must_stop():
            self.release()
            raise Interrupted
        chunk_tokens = self.config.training.loss_chunk_tokens
        # Without a seed in the masks, probes use fixed rows: results do not depend on the step.
        return self.model(
            batch.tokens, batch.positions, batch.masks, batch.labels, chunk_tokens, 0.0, loss
        )


@contextlib.contextmanager
def attention_replaced(
    model: nn.Module, replace: Callable[[int, Callable[..., Tensor]], Callable[..., Tensor]]
) -> Iterator[None]:
    """Inside, layer n of `model` attends by replace(n, its own attend)."""
    layers = [module for module in model.modules() if "attend" in vars(module)]
    plain = [layer.attend for layer in layers]
    for number, layer in enumerate(layers):
        layer.attend = replace(number, layer.attend)
    try:
        yield
    finally:
        for layer, attend in zip(layers, plain):
            layer.attend = attend
