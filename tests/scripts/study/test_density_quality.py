"""The study's density tool: what the model says with a pattern in all of its layers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.study import real_model
from scripts.study.density import __main__ as program
from scripts.study.density import picture
from scripts.study.density.inputs import RealModel, next_tokens, rope_of_length
from scripts.study.density.mass import BLOCK
from scripts.study.density.patterns import SPECS, Spec
from scripts.study.density.quality import Needles, hide_needles, measure_quality, quality
from scripts.study.density.report import (
    at_density,
    means_at_density,
    quality_table,
    value_within,
)
from scripts.study.density.texts import text_of
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns import Dense, MoBA, Pattern, VerticalSlash, XAttention
from titan_sparse.data.packing import IGNORED_LABEL
from titan_sparse.data.tokenizer import Tokenizer, load_tokenizer
from titan_sparse.models.rope import inverse_frequencies

SEQ_LEN = 512
"""Twice what the toy model was trained at, so that it is read by YaRN."""
CAUSAL_PAIRS = SEQ_LEN * (SEQ_LEN + 1) / 2
CODE = text_of("code", 0)
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


@pytest.fixture
def model(tiny) -> RealModel:
    return RealModel(tiny, torch.device("cpu"), torch.float32)


@pytest.fixture
def tokenizer(tiny) -> Tokenizer:
    return load_tokenizer(str(tiny))


def test_dense_attention_has_the_loss_of_the_model(model, tokenizer):
    tokens = CODE.tokens(tokenizer, SEQ_LEN)
    found = quality(model, tokens, None, Dense())
    loss = model.inputs(tokens, [0]).cross_entropy
    assert found == {"loss": pytest.approx(loss, abs=1e-5), "density": 1.0, "recall": 1.0}


class BruteForce:
    """The toy model with scores masked by what a pattern selects; what it keeps, of each layer."""

    def __init__(self, folder: Path, pattern: Pattern) -> None:
        self.pattern = pattern
        self.densities: list[float] = []
        self.recalls: list[float] = []
        self.decoder = real_model.load_decoder(folder, self.attend)
        config = RealModel(folder, torch.device("cpu"), torch.float32).config
        rope = rope_of_length(config.rope, config.max_positions, SEQ_LEN)
        frequencies = inverse_frequencies(rope, config.head_dim)
        self.decoder.inv_freq, self.decoder.attention_factor = frequencies

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        chosen = self.pattern.select(q, k, Causal(), block_size=BLOCK).dense(Causal())
        group = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        is_later = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).triu(1)
        attention = scores.masked_fill(is_later, -torch.inf).softmax(-1)
        pairs = chosen.sum((2, 3)).double().mean()
        self.densities.append(pairs.item() / CAUSAL_PAIRS)
        self.recalls.append((attention * chosen).sum(-1).mean().item())
        return scores.masked_fill(~chosen, -torch.inf).softmax(-1) @ v

    @torch.no_grad()
    def losses(self, tokens: Tensor, labels: Tensor) -> float:
        logits = self.decoder(tokens, real_model.positions_of(tokens), None)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()


@pytest.mark.parametrize(
    "pattern",
    [VerticalSlash(recall=0.6), XAttention(threshold=0.4), MoBA(chunk_size=128, top_k=2)],
    ids=lambda pattern: pattern.name,
)
def test_a_pattern_is_in_all_layers(tiny, model, tokenizer, pattern):
    tokens = CODE.tokens(tokenizer, SEQ_LEN)
    needles = hide_needles(CODE, tokenizer, SEQ_LEN, 2)
    found = quality(model, tokens, needles, pattern)
    brute = BruteForce(tiny, pattern)
    assert found["loss"] == pytest.approx(brute.losses(tokens, next_tokens(tokens)), abs=2e-5)
    layers = 2
    assert len(brute.densities) == layers
    assert found["density"] == pytest.approx(sum(brute.densities) / layers, abs=1e-5)
    assert found["recall"] == pytest.approx(sum(brute.recalls) / layers, abs=1e-5)
    assert found["needle_loss"] == pytest.approx(brute.losses(*needles), abs=2e-5)
    # What is compared tells patterns from dense attention.
    dense = quality(model, tokens, needles, Dense())
    assert abs(found["loss"] - dense["loss"]) > 1e-3
    assert abs(found["needle_loss"] - dense["needle_loss"]) > 1e-3
    assert found["recall"] < 0.95


def test_needles_lie_at_their_depths_and_are_asked_for(tokenizer):
    needles = hide_needles(CODE, tokenizer, SEQ_LEN, 4)
    assert needles.tokens.shape == needles.labels.shape == (4, SEQ_LEN)
    places = []
    for tokens, labels in zip(needles.tokens, needles.labels):
        answer = labels[labels != IGNORED_LABEL]
        number = tokenizer.decode(answer).strip(" .")
        assert re.fullmatch(r"\d{7}", number)
        # The prompt's text, and the answer behind its last word.
        text = tokenizer.decode(tokens)
        assert text.endswith(f"mentioned in the provided text is {number}.")
        places.append(text.index(f"is: {number}.") / len(text))
    assert places == sorted(places) and len(set(places)) == 4
    assert hide_needles(CODE, tokenizer, SEQ_LEN, 0) is None


class Planted:
    """In place of the real model: says the next token that it reads, but for some."""

    dtype = torch.float32

    def __init__(self, wrong: list[tuple[int, int]]) -> None:
        self.wrong = wrong

    def run(self, tokens: Tensor, labels: Tensor, attend: Any, loss: Any = None) -> Any:
        vocabulary = torch.eye(331)
        if loss is None:
            # The text: one layer of attention, and no loss.
            q = torch.zeros(1, 1, tokens.shape[1], 16)
            attend(q, q, q, None)
            return torch.zeros(())
        said = tokens.roll(-1, dims=1)
        for row, place in self.wrong:
            said[row, place] += 1
        return loss(20 * vocabulary[said], vocabulary, labels, 4096, 0.0)


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_needles_score_the_tokens_that_are_right(tokenizer, wrong):
    needles = hide_needles(CODE, tokenizer, SEQ_LEN, 2)
    places = (needles.labels[1] != IGNORED_LABEL).nonzero().flatten().tolist()
    # One of the prompt, which must not count, and the first ones of the second answer.
    planted = Planted([(0, 40)] + [(1, place) for place in places[:wrong]])
    found = quality(planted, CODE.tokens(tokenizer, SEQ_LEN), needles, Dense())
    answers = int((needles.labels != IGNORED_LABEL).sum())
    assert found["needles"] == pytest.approx(1 - wrong / answers, abs=1e-5)
    # 20 nats, less what the other tokens take.
    assert found["needle_loss"] == pytest.approx(20 * wrong / answers, abs=1e-3)


def test_losses_are_told_apart_from_dense(model, tokenizer):
    specs = [Spec("joint", VerticalSlash, {"budget": "joint"}, values=(0.5, 0.9))]
    tokens = CODE.tokens(tokenizer, SEQ_LEN)
    dense, (sparse, fuller) = measure_quality(model, tokens, None, specs)
    assert sparse["density"] < fuller["density"] < dense["density"] == 1
    for found in (sparse, fuller):
        assert found["above_dense"] == pytest.approx(found["loss"] - dense["loss"], abs=1e-5)
    assert sparse["above_dense"] != fuller["above_dense"]


def test_values_are_read_off_within_a_density():
    assert value_within(0.1, [0.15, 0.05], [0.1, 0.3]) == pytest.approx(0.2)
    assert value_within(0.3, [0.15, 0.05], [0.1, 0.3]) == pytest.approx(0.1)
    assert value_within(0.04, [0.15, 0.05], [0.1, 0.3]) is None


def _row(density: float, above_dense: float, **more) -> dict:
    found = {"density": density, "above_dense": above_dense, **more}
    # On dense queries and keys, other ones.
    return {"name": "joint", "recall": 0.9, "density": 0.5, "in_all_layers": found}


def test_losses_and_needles_at_equal_density():
    rows = [_row(0.06, 0.4, needles=0.1), _row(0.16, 0.2, needles=0.5)]
    found = list(at_density({"rows": rows}))
    assert [row["at_density"] for row in found] == [0.05, 0.1, 0.15, 0.2]
    losses = [row["above_dense"] for row in found]
    assert losses == [None, pytest.approx(0.32), pytest.approx(0.22), 0.2]
    assert [row["needles"] for row in found] == [None, 0.26, 0.46, 0.5]
    lines = quality_table("a text", found).splitlines()
    assert lines[1].split() == [
        *("loss", "above", "dense", "at", "5%", "at", "10%", "at", "15%", "at", "20%"),
        *("needles", "5%", "needles", "10%", "needles", "15%", "needles", "20%"),
    ]
    assert lines[2].split() == [
        *("joint", "-", "0.3200", "0.2200", "0.2000"),
        *("-", "26.00", "46.00", "50.00"),
    ]


def test_means_at_equal_density_are_over_the_texts_that_have_them():
    texts = [{"at_density": list(at_density({"rows": [_row(0.1, loss)]}))} for loss in (0.2, 0.4)]
    older: dict = {"at_recall": []}
    rows = means_at_density([texts[0], older, texts[1]])
    assert [row["above_dense"] for row in rows] == [None, 0.3, 0.3, 0.3]
    assert "needles" not in rows[0]
    assert means_at_density([older]) == []


@pytest.fixture
def two_settings(monkeypatch) -> None:
    """One pattern of two settings, so that a run is short."""
    spec = Spec("joint", VerticalSlash, {"budget": "joint"}, values=(0.5, 0.9))
    monkeypatch.setattr(program, "SPECS", (spec,))


def _options(tiny: Path, out: Path, *words: str) -> list[str]:
    given = ["--model", str(tiny), "--out", str(out), "--kinds", "code", "--texts", "1"]
    return [*given, "--lengths", "512", "--needles", "1", *words]


def test_a_run_writes_and_tells_losses_and_needles(tiny, tmp_path, two_settings, capsys):
    out = tmp_path / "density.json"
    # Queries and keys of one layer; losses are of all.
    assert program.main(_options(tiny, out, "--layers", "1")) == 0
    (text,) = json.loads(out.read_text())["texts"].values()
    assert text["dense"]["loss"] == pytest.approx(text["cross_entropy"], abs=1e-4)
    assert text["yarn_factor"] == 2.0
    for row in text["rows"]:
        assert len(row["recall_by_layer"]) == 1
        found = row["in_all_layers"]
        assert found["above_dense"] == pytest.approx(found["loss"] - text["dense"]["loss"])
        assert 0 <= found["needles"] <= 1 and found["needle_loss"] > 0
    told = capsys.readouterr().out
    assert f"512 tokens, dense attention {text['dense']['loss']:.4f} nats a token, " in told
    assert len(re.findall(r"loss above dense +at 5% .* needles 20%", told)) == 2


def test_texts_of_an_older_version_are_done_anew(tiny, tmp_path, two_settings, monkeypatch, capsys):
    out = tmp_path / "density.json"
    row = {"name": "joint", "at_recall": 0.9, "density": 0.1, "density_each_layer": 0.1}
    older = {"tokens": 512, "rows": [], "at_recall": [row]}
    options = {"layers": None, "patterns": ["joint"], "also": []}
    texts = {"code 0, 512 tokens": older, "chat 0, 512 tokens": older}
    out.write_text(json.dumps({"options": options, "texts": texts}))
    newer = older | {"dense": {"loss": 1.0}, "cross_entropy": 1.0}
    newer["at_density"] = list(at_density({"rows": [_row(0.1, 0.25)]}))
    measured = []
    monkeypatch.setattr(program, "measure_text", lambda *words: measured.append(words) or newer)
    assert program.main(_options(tiny, out)) == 0
    assert len(measured) == 1
    # The mean of losses is over the text that has one.
    assert capsys.readouterr().out.splitlines()[-1].split() == ["joint", "-", *3 * ["0.2500"]]
    # Now it is done, and the chat, which was not asked for, is as it was.
    assert program.main(_options(tiny, out)) == 0
    assert len(measured) == 1
    texts = json.loads(out.read_text())["texts"]
    assert texts["chat 0, 512 tokens"] == older


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "128"], "a needle and its question do not fit in 128 tokens; write"),
        (["--needles", "2"], "was written with other --needles; write another --out"),
    ],
    ids=["length", "needles"],
)
def test_needles_that_do_not_fit_are_refused(tiny, tmp_path, two_settings, capsys, words, message):
    out = tmp_path / "density.json"
    options = {"layers": None, "patterns": ["joint"], "also": [], "needles": 1}
    out.write_text(json.dumps({"options": options, "texts": {}}))
    assert program.main(_options(tiny, out, *words)) == 2
    assert message in capsys.readouterr().err


def test_fewer_needles_than_none_are_refused(tiny, tmp_path, capsys):
    with pytest.raises(SystemExit):
        program.main(_options(tiny, tmp_path / "x", "--needles", "-1"))
    assert "--needles -1: write 0 or more" in capsys.readouterr().err


def _text(kind: str, loss: float) -> dict:
    """Of two patterns, as the picture takes it."""
    rows = [_row(0.2, loss), _row(0.1, loss + 0.1)]
    rows += [row | {"name": "layer"} for row in rows]
    best = [{"name": name, "recall": 0.9, "density": 0.1} for name in picture.ORACLES]
    return {"kind": kind, "rows": rows, "oracles": best, "at_density": []}


def _older(text: dict) -> dict:
    """The same, as a version without losses wrote it."""
    rows = []
    for row in text["rows"]:
        rows.append({key: row[key] for key in ("name", "recall", "density")})
    return {"kind": text["kind"], "rows": rows, "oracles": text["oracles"]}


def test_the_picture_has_losses_below():
    texts = [_text("code", 0.1), _text("code", 0.3), _text("chat", 0.1)]
    densities, losses = picture.loss_curve(texts[:2], "joint")
    assert densities == pytest.approx([0.1, 0.2]) and losses == pytest.approx([0.3, 0.2])
    figure = picture.draw(texts, ["layer", "joint"])
    assert [panel.get_title() for panel in figure.axes] == ["code", "chat", "", ""]
    above, _, below, _ = figure.axes
    assert [line.get_label() for line in below.lines] == ["dense", "layer", "joint"]
    assert list(below.lines[0].get_ydata()) == [0, 0]
    assert list(below.lines[2].get_ydata()) == losses
    # A pattern has one color above and below.
    colors = {line.get_label(): line.get_color() for line in above.lines}
    assert all(line.get_color() == colors[line.get_label()] for line in below.lines[1:])


def test_the_picture_takes_texts_without_losses():
    older = _older(_text("code", 0.1))
    assert len(picture.draw([older], ["joint"]).axes) == 1
    # Beside one that has them, of one of the patterns.
    newer = _text("code", 0.2)
    newer["rows"] = [row for row in newer["rows"] if row["name"] == "joint"]
    figure = picture.draw([older, newer], ["layer", "joint"])
    below = figure.axes[1]
    assert [line.get_label() for line in below.lines] == ["dense", "joint"]
    assert list(below.lines[1].get_ydata()) == pytest.approx([0.3, 0.2])


def test_results_of_the_repository_are_read(tmp_path, capsys):
    """One is from before losses were measured."""
    for name in ("density_h200", "density_before_h200"):
        path = RESULTS / f"{name}.json"
        result = json.loads(path.read_text())
        program.report_means(result)
        assert "8192 tokens, mean of 3 texts" in capsys.readouterr().out
        names = dict.fromkeys(
            row["name"] for text in result["texts"].values() for row in text["rows"]
        )
        picture.draw(list(result["texts"].values()), list(names))
    out = tmp_path / "picture.png"
    assert picture.main([str(RESULTS / "density_h200.json"), "--out", str(out)]) == 0
    assert out.stat().st_size > 10_000


def test_defaults_can_be_chosen_by_loss():
    """Each budget is in the table with one local diagonal and with two."""
    specs = {spec.name: spec for spec in SPECS}
    names = {
        ("layer", 1): "layer",
        ("layer", 2): "layer, local 2",
        ("joint", 1): "joint, spread, sinks 4, local 1",
        ("joint", 2): "joint, spread, sinks 4, local 2",
    }
    for (budget, diagonals), name in names.items():
        common: dict[str, Any] = {"recall": 0.9, "probe_rows": "spread", "sinks": 4}
        common["count_sinks"] = True
        expected = VerticalSlash(budget=budget, local_diagonals=diagonals, **common)
        assert specs[name].pattern(0.9) == expected
    assert specs["joint, behind sinks, both"].pattern(0.9) == VerticalSlash(), "the default"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pattern", [Dense(), VerticalSlash(recall=0.6)], ids=["dense", "sparse"])
def test_a_gpu_says_what_a_cpu_says(tiny, model, tokenizer, pattern):
    tokens = CODE.tokens(tokenizer, SEQ_LEN)
    needles: Needles | None = hide_needles(CODE, tokenizer, SEQ_LEN, 2)
    expected = quality(model, tokens, needles, pattern)
    fast = RealModel(tiny, torch.device("cuda"), torch.bfloat16)
    found = quality(fast, tokens, needles, pattern)
    for key in ("loss", "needle_loss", "recall"):
        assert found[key] == pytest.approx(expected[key], rel=0.02)
    # In bf16 other blocks may be chosen.
    assert found["density"] == pytest.approx(expected["density"], rel=0.1)
