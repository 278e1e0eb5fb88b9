"""A training run without titan_sparse: tokens of a shard, a model of transformers,
torch.optim, a loop."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100


class Piece(NamedTuple):
    """What one forward of the reference sees."""

    tokens: Tensor
    """int64 [length]"""
    labels: Tensor
    """int64 [length]; -100 at the last token of a document"""


class Line(NamedTuple):
    loss: float
    grad_norm: float
    lr: float


def read_documents(shards: Path) -> list[np.ndarray]:
    """The documents of a folder of one shard, int64, with their end-of-document tokens."""
    tokens = np.fromfile(shards / "shard_00000.bin", dtype="<u2").astype(np.int64)
    offsets = np.load(shards / "shard_00000.idx.npy")
    return np.split(tokens, offsets[1:-1])


def ordered(
    documents: list[np.ndarray], epochs: int, shuffle_seed: int | None = None
) -> list[np.ndarray]:
    """The documents of so many epochs one after the other, shuffled anew in each."""
    stream = []
    for epoch in range(epochs):
        order = np.arange(len(documents))
        if shuffle_seed is not None:
            order = np.random.default_rng([shuffle_seed, epoch]).permutation(len(documents))
        stream += [documents[number] for number in order]
    return stream


def pack(documents: list[np.ndarray], seq_len: int, joined: bool = False) -> list[list[Piece]]:
    """The sequences that the documents fill, each as a list of pieces, or one piece if the
    documents see each other (`joined`). A rest is left out."""
    tokens = torch.from_numpy(np.concatenate(documents))
    owner = torch.from_numpy(np.repeat(np.arange(len(documents)), [len(d) for d in documents]))
    labels = tokens.roll(-1)
    labels[owner != owner.roll(-1)] = IGNORED
    sequences = []
    for start in range(0, len(tokens) - seq_len, seq_len):
        part = slice(start, start + seq_len)
        lengths = owner[part].unique_consecutive(return_counts=True)[1].tolist()
        if joined:
            lengths = [seq_len]
        pieces = zip(tokens[part].split(lengths), labels[part].split(lengths), strict=True)
        sequences.append([Piece(*piece) for piece in pieces])
    return sequences


def steps_of(
    shards: Path,
    steps: int,
    seq_len: int,
    per_step: int = 1,
    shuffle_seed: int | None = None,
    joined: bool = False,
    epochs: int = 1,
) -> list[list[Piece]]:
    """The pieces of each step, of so many sequences a step."""
    documents = ordered(read_documents(shards), epochs, shuffle_seed)
    sequences = pack(documents, seq_len, joined)
    starts = range(0, steps * per_step, per_step)
    return [sum(sequences[start : start + per_step], []) for start in starts]


def count_labels(pieces: Iterable[Piece]) -> int:
    return sum(int((piece.labels != IGNORED).sum()) for piece in pieces)


def loss_sum(model: nn.Module, piece: Piece, z_loss: float) -> Tensor:
    """Cross-entropy + z_loss * lse^2, summed over the labels; of a model of transformers."""
    logits = model(input_ids=piece.tokens[None], use_cache=False).logits[0].float()
    loss = F.cross_entropy(logits, piece.labels, ignore_index=IGNORED, reduction="sum")
    counted = logits[piece.labels != IGNORED]
    return loss + z_loss * counted.logsumexp(-1).square().sum()


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    is_vector = {
        name: name.endswith(("norm.weight", "bias")) for name, _ in model.named_parameters()
    }
    groups = []
    for vectors, decay in ((False, weight_decay), (True, 0.0)):
        chosen = [p for name, p in model.named_parameters() if is_vector[name] == vectors]
        groups.append({"params": chosen, "weight_decay": decay})
    return groups


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: list[list[Piece]],
    learning_rates: list[float],
    max_norm: float,
    z_loss: float,
    loss_of: Callable[[nn.Module, Piece, float], Tensor] = loss_sum,
) -> list[Line]:
    """One update for each list of pieces. Returns what each step has to log."""
    lines = []
    for pieces, learning_rate in zip(steps, learning_rates, strict=True):
        labels = count_labels(pieces)
        loss = 0.0
        for piece in pieces:
            share = loss_of(model, piece, z_loss) / labels
            share.backward()
            loss += share.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad()
        lines.append(Line(loss, norm.item(), learning_rate))
    return lines
