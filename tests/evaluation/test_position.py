"""Loss by position: windows score each token once, and the sums are those of a plain forward on any mesh."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.distributed import run_processes
from tests.evaluation.helpers import plain_decoder, plain_logits, scorer_of
from tests.runs import tiny_config, write_texts
from titan_sparse.config import Data
from titan_sparse.data.documents import open_documents
from titan_sparse.data.preparing import prepare
from titan_sparse.data.recipe import Recipe
from titan_sparse.data.tokenizer import ByteTokenizer, Encoded
from titan_sparse.evaluation.haystack import Haystack
from titan_sparse.evaluation.position import first_windows, position_loss, windows
from titan_sparse.training.metrics import json_ready

LENGTH, BUCKETS, WINDOWS = 150, 4, 9


@pytest.mark.parametrize("stride", [7, 3, 1])
def test_windows_score_each_token_once_with_context(stride):
    texts = [np.arange(n) + 100 * n for n in (1, 2, 7, 8, 23)]
    seen = []
    for tokens, labels in windows(map(Encoded, texts), 7, stride):
        assert len(tokens) == len(labels) <= 7
        for place in np.flatnonzero(labels != -100):
            # The next token of the same document. A later window adds only tokens with long context.
            assert labels[place] == tokens[place] + 1
            assert place >= 7 - stride or tokens[0] % 100 == 0
            seen.append(labels[place])
    assert sorted(seen) == sorted(token for text in texts for token in text[1:])


def test_windows_score_only_what_is_learned_of_a_chat():
    """Of tokens 0 to 19, only 8 to 11 and 19 are scored. The window in between has nothing to score."""
    learned = np.isin(np.arange(20), [8, 9, 10, 11, 19])
    found = list(windows([Encoded(np.arange(20), learned)], 5, 5))
    assert [window.tokens.tolist() for window in found] == [
        [5, 6, 7, 8, 9],
        [10, 11, 12, 13, 14],
        [15, 16, 17, 18, 19],
    ]
    assert [window.labels.tolist() for window in found] == [
        [-100, -100, 8, 9, 10],
        [11, -100, -100, -100, -100],
        [-100, -100, -100, 19, -100],
    ]


def test_bad_windows_are_refused():
    for stride in (0, 8):
        with pytest.raises(ValueError, match="write 1 to 7"):
            next(windows([Encoded(np.arange(9))], 7, stride))


def test_prepared_tokens_give_the_windows_and_haystack_of_their_texts(tmp_path):
    write_texts(tmp_path / "texts")
    (tmp_path / "texts/00.txt").write_text("")  # left out of both
    recipe = Recipe(str(tmp_path / "texts"), shard_rows=5)
    prepare(recipe, str(tmp_path / "out"), 1, lambda done, shards: None)
    tokenizer = ByteTokenizer()
    windows_of = []
    haystacks = []
    for name in ("texts", "out"):
        documents = open_documents(Data(source=str(tmp_path / name)), tokenizer)
        windows_of.append(first_windows(documents, 50, LENGTH, 100, 30))
        haystacks.append(Haystack(documents, tokenizer).tokens(40, 6000))
    for one, other in zip(*windows_of, strict=True):
        assert (one.tokens == other.tokens).all() and (one.labels == other.labels).all()
    assert (haystacks[0] == haystacks[1]).all()


def _compare(folder, cp: int, layout: str, schedule: str) -> None:
    config = tiny_config(
        folder,
        "run",
        parallelism__cp=cp,
        attention__pattern="dense",
        attention__layout=layout,
        attention__schedule=schedule,
    )
    scorer, documents = scorer_of(config)
    plain = plain_decoder(scorer.model)
    for stride in (LENGTH, 40):
        found = first_windows(documents, 0, LENGTH, stride, WINDOWS)
        sums, counts = np.zeros(BUCKETS), np.zeros(BUCKETS, dtype=int)
        for tokens, labels in found:
            logits = plain_logits(plain, tokens)
            losses = F.cross_entropy(logits, torch.from_numpy(labels), reduction="none")
            for place in np.flatnonzero(labels != -100):
                sums[int(place / LENGTH * BUCKETS)] += losses[place]
                counts[int(place / LENGTH * BUCKETS)] += 1
        got = position_loss(scorer, found, LENGTH, BUCKETS)
        buckets = got["buckets"]
        assert [part["tokens"] for part in buckets] == counts.tolist()
        losses = [part["loss"] for part in buckets]
        np.testing.assert_allclose(losses, sums / counts, rtol=1e-9)
        assert got["tokens"] == counts.sum()
        assert got["loss"] == pytest.approx(sums.sum() / counts.sum(), rel=1e-9)
        assert got["perplexity"] == pytest.approx(np.exp(got["loss"]))
        assert [part["start"] for part in buckets] == [0, 38, 75, 113]
        assert [part["stop"] for part in buckets] == [38, 75, 113, 150]


def _uneven(folder) -> None:
    """Fewer windows than ranks, and a position range without tokens."""
    scorer, documents = scorer_of(tiny_config(folder, "run"))
    text = documents.tokens(0)[:30].astype(np.int64)
    got = position_loss(scorer, windows([Encoded(text)], LENGTH, LENGTH), LENGTH, BUCKETS)
    first, second, *_ = got["buckets"]
    assert got["tokens"] == 29 and first["loss"] == pytest.approx(got["loss"])
    assert second == {"start": 38, "stop": 75, "tokens": 0, "loss": None, "perplexity": None}


def test_what_json_has_not_is_null():
    assert json_ready({"loss": math.nan, "buckets": [{"perplexity": math.inf, "tokens": 3}]}) == {
        "loss": None,
        "buckets": [{"perplexity": None, "tokens": 3}],
    }


def _on_two_ranks(folder) -> None:
    _compare(folder, 1, "striped", "auto")  # an odd number of windows over two ranks
    # Two ranks share each window.
    _compare(folder, 2, "striped", "auto")
    _compare(folder, 2, "balanced", "group_cast")
    _uneven(folder)


def test_sums_are_those_of_a_plain_forward(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(2, _on_two_ranks, tmp_path)
