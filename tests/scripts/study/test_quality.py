"""What the study measures, against brute force: density, loss, needles, and the loss of names."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.benchmarks import plots
from scripts.study import density as program
from scripts.study import real_model
from scripts.study.density import DEFAULT, SPECS, Spec
from scripts.study.quality import BLOCK, RealModel, hide_needles, next_tokens, quality, text_of
from scripts.study.real_model import standard_library_text, train_tokenizer
from scripts.study.work import DISTANCES, FAR, MIDDLE, NEAR, NEW, distances_of_names, name_losses
from tests.models.transformers_models import VOCAB, save_model
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns import Dense, MoBA, Pattern, VerticalSlash
from titan_sparse.data.tokenizer import ByteTokenizer, load_tokenizer
from titan_sparse.evaluation.scorer import Sequence
from titan_sparse.loss import IGNORE_INDEX

SEQ_LEN = 512
CAUSAL_PAIRS = SEQ_LEN * (SEQ_LEN + 1) / 2
CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[3] / "benchmarks/results"
SHORT = Spec("short", VerticalSlash, {"local_slashes": 1, "sinks": 1}, values=(0.5, 0.9))


@pytest.fixture
def tiny(tmp_path) -> Path:
    """A Llama of random weights for 256 tokens, with a tokenizer."""
    save_model(tmp_path, "llama")
    train_tokenizer(iter([standard_library_text("this.py")]), VOCAB, tmp_path / "tokenizer.json")
    return tmp_path


def _softmax(q: Tensor, k: Tensor) -> Tensor:
    """fp64 [Hq, S, S], causal. q: [1, Hq, S, D], k: [1, Hkv, S, D]."""
    keys = k[0].double().repeat_interleave(q.shape[1] // k.shape[1], dim=0)
    scores = q[0].double() @ keys.mT * q.shape[3] ** -0.5
    is_later = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).triu(1)
    return scores.masked_fill(is_later, -torch.inf).softmax(-1)


class BruteForce:
    """The model in PyTorch's own attention, with what a pattern chose as a mask in each layer."""

    def __init__(self, folder: Path, pattern: Pattern) -> None:
        self.pattern = pattern
        self.densities: list[float] = []
        self.recalls: list[float] = []
        self.model = real_model.load_decoder(folder, self.attend)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        chosen = self.pattern.select(q, k, Causal(), block_size=BLOCK).dense(Causal())
        if len(q) == 1:
            self.densities.append(chosen.sum((2, 3)).double().mean().item() / CAUSAL_PAIRS)
            self.recalls.append((_softmax(q, k) * chosen[0]).sum(-1).mean().item())
        return F.scaled_dot_product_attention(q, k, v, attn_mask=chosen, enable_gqa=True)

    @torch.no_grad()
    def losses(self, like: RealModel, tokens: Tensor, labels: Tensor) -> float:
        # YaRN of this length.
        self.model.inv_freq = like.decoder.inv_freq
        self.model.attention_factor = like.decoder.attention_factor
        logits = self.model(tokens, real_model.positions_of(tokens), None)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()


@pytest.mark.parametrize(
    "pattern",
    [VerticalSlash(recall=0.6), MoBA(chunk_size=128, top_k=2)],
    ids=lambda pattern: pattern.name,
)
def test_a_pattern_is_in_all_layers(tiny, pattern):
    tokenizer = load_tokenizer(str(tiny))
    model = RealModel(tiny, CPU, torch.float32)
    tokens = text_of("code", 0).tokens(tokenizer, SEQ_LEN)
    needles = hide_needles(text_of("code", 0), tokenizer, SEQ_LEN, 2)
    found = quality(model, tokens, needles, pattern)
    brute = BruteForce(tiny, pattern)
    wanted = brute.losses(model, tokens, next_tokens(tokens))
    assert found["loss"] == pytest.approx(wanted, abs=2e-5)
    assert found["density"] == pytest.approx(sum(brute.densities) / 2, abs=1e-5)
    assert found["recall"] == pytest.approx(sum(brute.recalls) / 2, abs=1e-5)
    assert found["needle_loss"] == pytest.approx(brute.losses(model, *needles), abs=2e-5)
    # The first layer is given the same queries and keys as in dense attention.
    alone = Spec("alone", lambda **_: pattern, {}, values=(0.0,))
    [row] = program.measure(*model.queries_and_keys(tokens), [alone])
    assert row["recall_by_layer"][0] == pytest.approx(brute.recalls[0], abs=1e-4)
    assert row["density_by_layer"][0] == pytest.approx(brute.densities[0], abs=1e-4)
    dense = quality(model, tokens, needles, Dense())
    assert abs(found["loss"] - dense["loss"]) > 1e-3 and found["recall"] < 0.95


def test_logits_are_compared_with_transformers(tiny, monkeypatch):
    assert "cross entropy" in real_model.check(tiny)
    # Attention that sees nothing but the token itself.
    monkeypatch.setattr(real_model, "dense_attention", lambda q, k, v, mask: q)
    with pytest.raises(ValueError, match="read differently"):
        real_model.check(tiny)


def test_longer_texts_are_read_by_yarn(tiny):
    """As transformers reads them, and shorter ones without it."""
    import transformers

    tokens = torch.arange(SEQ_LEN)[None] % 300
    model = RealModel(tiny, CPU, torch.float32)
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
    for length in (SEQ_LEN, 256):
        config = transformers.AutoConfig.from_pretrained(tiny)
        if length > 256:
            config.rope_parameters |= yarn
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            tiny, config=config, dtype=torch.float32
        )
        part = tokens[:, :length]
        wanted = reference(part, labels=part).loss.item()
        found = model.run(part, next_tokens(part), real_model.dense_attention)
        assert found.item() / (length - 1) == pytest.approx(wanted, rel=1e-5)


def test_a_run_continues_with_texts_that_are_missing(tiny, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out/density.json"
    words = ["--model", str(tiny), "--out", str(out), "--lengths", "512", "--texts", "1"]
    words += ["--patterns", DEFAULT, "--needles", "1", "--kinds", "code"]
    monkeypatch.setattr(program, "SPECS", (SHORT._replace(name=DEFAULT),))
    assert program.main(words) == 0
    first = json.loads(out.read_text())
    assert {"command", "commit", "date", "gpu", "versions"} <= first.keys()
    (text,) = first["texts"].values()
    assert text["yarn_factor"] == 2.0
    for row in text["rows"]:
        found = row["in_all_layers"]
        assert found["above_dense"] == pytest.approx(found["loss"] - text["dense"]["loss"])
    before = out.stat().st_mtime_ns
    assert program.main(words) == 0 and out.stat().st_mtime_ns == before
    assert program.main([*words, "chat"]) == 0
    second = json.loads(out.read_text())["texts"]
    assert list(second) == ["code 0, 512 tokens", "chat 0, 512 tokens"]
    assert second["code 0, 512 tokens"] == text
    assert "512 tokens, mean of 2 texts" in capsys.readouterr().out
    assert program.main([*words, "--needles", "2"]) == 2
    assert "was written with other --needles" in capsys.readouterr().err
    for more in (["--lengths", "200"], ["--model", "nowhere"], ["--needles", "-1"]):
        with pytest.raises(SystemExit):
            program.main([*words, *more])
        assert f"{more[0]} " in capsys.readouterr().err


def test_results_of_the_repository_are_drawn(tmp_path, capsys):
    out = tmp_path / "picture.png"
    for name in ("choose_h200", "density_h200"):
        assert plots.main([str(RESULTS / f"{name}.json"), "--out", str(out)]) == 0
        assert out.stat().st_size > 10_000
    with pytest.raises(SystemExit):
        plots.main([str(RESULTS / "density_h200.json"), "--out", str(out), "--patterns", "none"])
    assert "--patterns none was not measured; write some of" in capsys.readouterr().err
    [default] = [spec for spec in SPECS if spec.name == DEFAULT]
    assert default.patterns()[5] == VerticalSlash(recall=0.95)


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
