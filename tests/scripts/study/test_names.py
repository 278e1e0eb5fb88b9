"""The loss of names in code, by how far back they were seen last."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from scripts.study.work import DISTANCES, FAR, MIDDLE, NEAR, NEW, distances_of_names, name_losses
from titan_sparse.data.tokenizer import ByteTokenizer
from titan_sparse.evaluation.scorer import Sequence
from titan_sparse.loss import IGNORE_INDEX

FAR_TOKENS = 160  # near: at most 10
TEXT = (
    "def read_all(x): readAll\n"  # two names, not one: letters count
    "read_all readAll "
    + "filler " * 10
    + "read_all "
    + "filler " * 30
    + "_private read_all readAll"
)


def found(text: str) -> list[tuple[str, int]]:
    tokens = ByteTokenizer().encode(text).astype(np.int64)
    names = distances_of_names(tokens, ByteTokenizer(), FAR_TOKENS)
    return [(text[start:stop], distance) for start, stop, distance in names]


def test_distances_are_those_to_the_last_time():
    assert found(TEXT) == [
        ("read_all", NEW),
        ("readAll", NEW),
        ("read_all", MIDDLE),
        ("readAll", MIDDLE),
        ("read_all", MIDDLE),
        # 220 bytes after the last time; readAll even more. _private is a single word.
        ("read_all", FAR),
        ("readAll", FAR),
    ]
    assert found("a_b a_b") == [("a_b", NEW), ("a_b", NEAR)]
    assert found("a_b" + "-" * 157 + "a_b")[1] == ("a_b", MIDDLE)
    assert found("a_b" + "-" * 158 + "a_b")[1] == ("a_b", FAR)


def test_losses_are_those_of_the_names_alone():
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(TEXT).astype(np.int64)
    labels = np.append(tokens[1:], IGNORE_INDEX)

    def token_losses(sequence: Sequence, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.from_numpy(np.flatnonzero(sequence.labels != IGNORE_INDEX))
        # The loss of a token is the square of its place in the text.
        return (positions + 1.0) ** 2, positions

    scorer = SimpleNamespace(
        tokenizer=tokenizer, device="cpu", token_losses=token_losses, release=lambda: None
    )
    result = name_losses(scorer, [Sequence(tokens, labels)] * 2, len(tokens), FAR_TOKENS)
    places = [[] for _ in DISTANCES]
    for start, stop, distance in distances_of_names(tokens, tokenizer, FAR_TOKENS):
        places[distance] += range(start, stop)
    for name, of_distance in zip(DISTANCES, places):
        about = result["distances"][name]
        assert about["tokens"] == 2 * len(of_distance)
        if of_distance:
            assert about["loss"] == pytest.approx(np.mean(np.square(of_distance)))
    assert result["distances"]["far"]["names"] == 4 and result["windows"] == 2
    assert result["distances"]["near"]["loss"] is None
