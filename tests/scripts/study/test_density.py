"""The study's density tool: what it measures against brute force, and what it writes."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.benchmarks import provenance
from scripts.study import real_model
from scripts.study.density import __main__ as program
from scripts.study.density import kernels, measure, oracles, picture
from scripts.study.density.inputs import Inputs, RealModel, rope_of_length
from scripts.study.density.mass import BLOCK, Kept, attention_mass, kept, pairs_by_key
from scripts.study.density.patterns import SPECS, Spec
from scripts.study.density.report import at_recall, means, table
from scripts.study.density.texts import CHATS, KINDS, Text, read_chats, text_of
from scripts.study.save_attention import queries_and_keys
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns import MoBA, VerticalSlash, XAttention

SEQ_LEN = 512
CAUSAL_PAIRS = SEQ_LEN * (SEQ_LEN + 1) / 2
JOINT = Spec("joint", VerticalSlash, {"budget": "joint", "local_diagonals": 1, "sinks": 1})


def _random(seq_len: int = SEQ_LEN) -> tuple[Tensor, Tensor]:
    """q [1, 4, S, 16] and k [1, 2, S, 16] whose attention has a few large keys."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, seq_len, 16, generator=generator)
    k = torch.randn(1, 2, seq_len, 16, generator=generator)
    return 2 * q, k


def _softmax(q: Tensor, k: Tensor) -> Tensor:
    """fp64 [Hq, S, S], causal. q: [1, Hq, S, D], k: [1, Hkv, S, D]."""
    heads, seq_len, head_dim = q.shape[1:]
    group = heads // k.shape[1]
    # [Hq, S, D]
    queries = q[0].double()
    keys = k[0].double().repeat_interleave(group, dim=0)
    scores = queries @ keys.mT * head_dim**-0.5
    is_later = torch.ones(seq_len, seq_len, dtype=torch.bool).triu(1)
    return scores.masked_fill(is_later, -torch.inf).softmax(-1)


@pytest.mark.parametrize(
    "pattern",
    [
        VerticalSlash(recall=0.6, local_diagonals=1, sinks=2),
        VerticalSlash(recall=0.8, budget="joint", local_diagonals=1, max_columns=40),
        XAttention(threshold=0.6),
        MoBA(chunk_size=128, top_k=2),
        MoBA(chunk_size=256, top_k=1),
    ],
    ids=lambda pattern: pattern.key,
)
def test_recall_and_density_are_those_of_the_dense_mask(pattern):
    q, k = _random()
    index = pattern.select(q, k, Causal(), block_size=BLOCK)
    found = kept(index, attention_mass(q[0], k[0]))
    # [Hq, S, S]
    chosen = index.dense(Causal())[0]
    density = chosen.sum((1, 2)).double() / CAUSAL_PAIRS
    assert 0 < density.mean() < 1
    recall = (_softmax(q, k) * chosen).sum((1, 2)) / SEQ_LEN
    torch.testing.assert_close(found.recall, recall, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.density, density, rtol=1e-9, atol=0)


def test_best_keys_are_those_above_the_price():
    q, k = _random()
    (point,) = oracles.best_keys(q[0], k[0], [0.01])
    # Every eighth row is looked at.
    rows = torch.arange(7, SEQ_LEN, 8)
    attention = _softmax(q, k)[:, rows]
    is_worth = attention > 0.01
    held = (attention * is_worth).sum().item()
    heads = 4
    assert point.recall == pytest.approx(held / (heads * len(rows)))
    pairs = (rows + 1).sum().item()
    assert point.density == pytest.approx(is_worth.sum().item() / (heads * pairs))


def _planted() -> tuple[Tensor, Tensor]:
    """by_key [1, Q, S], and what it was planted on: two keys, and what is two blocks back."""
    blocks = SEQ_LEN // BLOCK
    held = torch.zeros(blocks, SEQ_LEN, dtype=torch.bool)
    held[:, [5, 200]] = True
    for block in range(blocks):
        held[block, block * BLOCK : (block + 1) * BLOCK] = True
        if block >= 2:
            held[block, (block - 2) * BLOCK : (block - 1) * BLOCK] = True
    pairs = pairs_by_key(SEQ_LEN, torch.device("cpu"))
    return (pairs * held)[None], pairs * held


def test_the_best_static_choice_finds_verticals_and_diagonals():
    by_key, pairs = _planted()
    (point,) = oracles.best_static(by_key, [0.5])
    assert point.density == pytest.approx(pairs.sum().item() / CAUSAL_PAIRS)
    assert point.recall == pytest.approx(by_key.sum().item() / SEQ_LEN)
    # At a high price nothing but each block's own tokens.
    (dear,) = oracles.best_static(by_key, [2.0])
    own = (SEQ_LEN // BLOCK) * BLOCK * (BLOCK + 1) / 2
    assert dear.density == pytest.approx(own / CAUSAL_PAIRS)


def test_the_best_tiles_are_single_ones_with_verticals_beside_them():
    by_key, pairs = _planted()
    # One tile of a diagonal is worth nothing, so that the diagonal is not on as a whole.
    keys = torch.ones(SEQ_LEN)
    keys[[5, 200]] = 0
    by_key[0, 2, :BLOCK] *= 1 - keys[:BLOCK]
    (point,) = oracles.best_verticals_and_tiles(by_key, [0.5])
    taken = pairs.sum() - pairs[2, :BLOCK].sum() + pairs[2, 5]
    assert point.density == pytest.approx(taken.item() / CAUSAL_PAIRS)
    assert point.recall == pytest.approx(by_key.sum().item() / SEQ_LEN)
    # Without verticals the key at 200 is lost, and that at 5 where its tile is not on.
    (tiles,) = oracles.best_tiles(by_key, [0.5])
    lost = by_key[0, 1:, 5].sum() + by_key[0, 2, 200]
    assert tiles.recall == pytest.approx(point.recall - lost.item() / SEQ_LEN)


def test_values_are_read_off_between_two_measurements():
    assert oracles.value_at(0.9, [0.95, 0.85], [30.0, 10.0]) == pytest.approx(20.0)
    assert oracles.value_at(0.8, [0.95, 0.85], [30.0, 10.0]) == pytest.approx(10.0)
    assert oracles.value_at(0.96, [0.95, 0.85], [30.0, 10.0]) is None
    assert oracles.value_at(0.9, [], []) is None


def test_times_are_taken_next_to_the_recalls_wanted():
    recalls = [0.5, 0.97, 0.88, 0.93, 0.99]
    assert kernels.worth_timing(recalls, [0.9]) == {2, 3}
    assert kernels.worth_timing(recalls, [0.9, 0.95]) == {1, 2, 3}
    assert kernels.worth_timing(recalls, [0.3]) == {0}
    assert kernels.worth_timing(recalls, [0.995]) == set()


def test_longer_texts_are_read_by_yarn(tiny):
    rope = RealModel(tiny, torch.device("cpu"), torch.float32).config.rope
    assert rope_of_length(rope, 256, 256) == rope
    longer = rope_of_length(rope, 256, 512)
    assert (longer.scaling, longer.factor, longer.original_length) == ("yarn", 2.0, 256)


def test_inputs_are_those_of_the_layers_asked_for(tiny):
    model = RealModel(tiny, torch.device("cpu"), torch.float32)
    tokens = torch.arange(256)[None] % 300
    # A longer text must not leave its YaRN behind.
    longer = model.inputs(tokens.repeat(1, 2), [1])
    inputs = model.inputs(tokens, [1])
    q, k = queries_and_keys(tiny, tokens)[1]
    torch.testing.assert_close(inputs.q, q)
    torch.testing.assert_close(inputs.k, k)
    assert not torch.allclose(longer.k[:, :, :256], k, rtol=1e-2)
    logits = real_model.load_decoder(tiny, real_model.causal_attention)(
        tokens, real_model.positions_of(tokens), None
    )
    loss = F.cross_entropy(logits[0, :-1], tokens[0, 1:])
    assert inputs.cross_entropy == pytest.approx(loss.item(), rel=1e-5)


def test_layers_are_measured_apart():
    """A batch of layers gives the rows that each gives alone."""
    q, k = _random()
    layers = [Inputs(q, k, 0.0), Inputs(q.flip(2), k.flip(2), 0.0)]
    both = Inputs(
        q=torch.cat([layer.q for layer in layers]),
        k=torch.cat([layer.k for layer in layers]),
        cross_entropy=0.0,
    )
    rows = measure.measure(both, [JOINT], None)["rows"]
    for number, layer in enumerate(layers):
        rows_alone = measure.measure(layer, [JOINT], None)["rows"]
        for row, alone in zip(rows, rows_alone, strict=True):
            assert row["recall_by_layer"][number] == alone["recall_by_layer"][0]
            assert row["density_by_layer"][number] == alone["density_by_layer"][0]
    first, second = rows[0]["recall_by_layer"]
    assert first != second
    assert rows[0]["verticals"] >= 1
    assert rows[0]["diagonals"] >= 1


def test_a_row_tells_means_and_the_worst_head():
    # Two layers of two heads.
    density = torch.tensor([0.1, 0.3], dtype=torch.float64)
    first = Kept(torch.tensor([0.9, 0.5], dtype=torch.float64), density)
    second = Kept(torch.tensor([0.7, 0.9], dtype=torch.float64), density)
    q, k = _random()
    choice = measure.choices([JOINT], Inputs(q, k, 0.0))[0]
    row = measure._row(choice, [first, second])
    assert row["recall"] == 0.75
    assert row["density"] == 0.2
    assert row["recall_by_layer"] == [0.7, 0.8]
    assert row["density_by_layer"] == [0.2, 0.2]
    assert row["recall_of_worst_head"] == 0.5
    assert row["recall_of_5_percent_of_heads"] == pytest.approx(0.53)


def test_layers_reach_a_recall_each_by_itself():
    rows = []
    for recall, by_layer in ((0.75, (0.7, 0.8)), (0.95, (0.9, 1.0))):
        point = {"name": "joint", "recall": recall, "density": recall / 10}
        densities = [value - 0.5 for value in by_layer]
        rows.append(point | {"recall_by_layer": by_layer, "density_by_layer": densities})
    found = {row["at_recall"]: row for row in at_recall({"rows": rows, "oracles": []})}
    assert found[0.9]["density"] == pytest.approx(0.09)
    assert found[0.9]["density_each_layer"] == pytest.approx(0.4)
    # The second layer keeps 0.8 at the least, the first one never 0.95.
    assert found[0.8]["density_each_layer"] == pytest.approx(0.3)
    assert found[0.95]["density_each_layer"] is None


@pytest.fixture
def clock(monkeypatch) -> list[Tensor]:
    """A clock for a CPU, by which each step takes 1 ms; what the timed steps returned."""
    outs = []

    def times(steps, repeats, lead):
        outs.extend(step() for step in steps)
        return [1.0] * len(steps)

    def training_call(call, leaves, d_out):
        return [lambda: call(*leaves)] * 2

    monkeypatch.setattr(kernels, "times", times)
    monkeypatch.setattr(kernels, "training_call", training_call)
    monkeypatch.setattr(kernels, "names_of_backends", lambda: ["eager"])
    monkeypatch.setattr(kernels, "dense_times", lambda tensors, repeats: {})
    return outs


def test_attention_is_timed_with_the_index_given(clock):
    q, k = _random()
    tensors = kernels.draw(q, k)
    pattern = JOINT.pattern(0.5)
    # Not what it would choose for these queries.
    index = pattern.select(q.flip(1), k.flip(1), Causal(), block_size=BLOCK)
    kernels.pattern_times(pattern, index.tensors(), tensors, 1)
    # Softmax over what was chosen: [Hq, S, S].
    attention = _softmax(q, k) * index.dense(Causal())[0]
    attention /= attention.sum(-1, keepdim=True)
    values = tensors[2][0].detach().double().repeat_interleave(2, dim=0)
    out = clock[-1][0].double()
    torch.testing.assert_close(out, attention @ values, rtol=1e-4, atol=1e-4)


def test_times_are_read_off_between_two_settings(clock):
    q, k = _random()
    measured = measure.measure(Inputs(q, k, 0.0), [JOINT], measure.Timing((0.9,), 1))
    timed = [row for row in measured["rows"] if "kernel_ms" in row]
    assert len(timed) == 2
    assert timed[0]["recall"] <= 0.9 <= timed[1]["recall"]
    rows = [row for row in at_recall(measured) if row["name"] == "joint"]
    (read_off,) = [row for row in rows if row["at_recall"] == 0.9]
    assert read_off["kernel_ms"] == {"eager": 2.0} and read_off["selection_ms"] == 1.0
    assert timed[0]["density"] <= read_off["density"] <= timed[1]["density"]


def _options(tiny: Path, out: Path, *words: str) -> list[str]:
    given = ["--model", str(tiny), "--out", str(out), "--lengths", "256", "--texts", "1"]
    # A needle and its question do not fit in 256 tokens of a small vocabulary.
    return [*given, "--needles", "0", "--patterns", "joint", *words]


def test_a_run_goes_on_with_texts_that_are_missing(tiny, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out" / "density.json"
    assert program.main(_options(tiny, out, "--kinds", "code")) == 0
    first = json.loads(out.read_text())
    assert provenance.problems(first) == []
    (text,) = first["texts"].values()
    assert text["kind"] == "code" and text["source"] == "argparse.py" and text["tokens"] == 256
    assert text["yarn_factor"] == 1.0 and text["dtype"] == "float32"
    assert len(text["sha256"]) == 64 and 0 < text["cross_entropy"] < 20
    row = text["rows"][0]
    assert row["name"] == "joint" and row["knob"] == "recall" and row["value"] == 0.3
    assert 0 < row["recall_of_worst_head"] <= row["recall_of_5_percent_of_heads"] <= row["recall"]
    assert len(row["recall_by_layer"]) == len(row["density_by_layer"]) == 2
    assert {row["name"] for row in text["oracles"]} == set(oracles.ORACLES)
    capsys.readouterr()

    measured = []
    monkeypatch.setattr(program, "measure_text", lambda *words: measured.append(words) or {**text})
    assert program.main(_options(tiny, out, "--kinds", "code", "prose")) == 0
    assert len(measured) == 1
    told = capsys.readouterr().out
    assert "code 0, 256 tokens: is in" in told
    assert "256 tokens, mean of 2 texts" in told
    assert f"joint: asked 0.9, kept {text['rows'][4]['recall']:.3f}" in told
    second = json.loads(out.read_text())["texts"]
    assert list(second) == ["code 0, 256 tokens", "prose 0, 256 tokens"]
    assert second["code 0, 256 tokens"] == text


def test_other_patterns_do_not_go_into_the_same_file(tiny, tmp_path, capsys):
    out = tmp_path / "density.json"
    options = {"layers": None, "patterns": ["joint"], "also": []}
    out.write_text(json.dumps({"options": options, "texts": {}}))
    assert program.main(_options(tiny, out, "--also", "spare", "sinks=4")) == 2
    assert "was written with other --also; write another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "200"], "--lengths: write multiples of 128"),
        (["--timed", "256"], "--timed needs a CUDA GPU"),
        (["--model", "nowhere"], "--model nowhere has no config.json; write the folder of"),
    ],
    ids=["lengths", "timed", "model"],
)
def test_refusals(tiny, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        program.main(_options(tiny, tmp_path / "x", *words))
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "2"], "--layers: write numbers from 0 to 1"),
        (["--also", "joint", "sinks=4"], "--also joint is in the table; write another name"),
        (["--also", "spare", "sink=4"], "--also spare: .*unexpected keyword argument 'sink'"),
    ],
    ids=["layers", "name", "parameter"],
)
def test_what_the_model_and_patterns_do_not_have_is_refused(tiny, tmp_path, capsys, words, message):
    assert program.main(_options(tiny, tmp_path / "x", *words)) == 2
    assert re.search(message, capsys.readouterr().err)


def test_means_are_over_texts():
    def text(density: float, **times) -> dict:
        row = {"name": "joint", "at_recall": 0.9, "density": density, "density_each_layer": None}
        return {"at_recall": [row | times]}

    timed = text(0.2, selection_ms=1.0, kernel_ms={"triton": 3.0, "flex": 2.0})
    (row,) = means([timed, text(0.4)])
    assert row["density"] == pytest.approx(0.3) and row["density_each_layer"] is None
    assert row["kernel_ms"] == {"triton": 3.0, "flex": 2.0} and row["selection_ms"] == 1.0
    assert table("both", [row]).splitlines()[-1].split() == ["joint", "30.00", "-", "2.00"]


def test_a_variant_is_named_on_the_command_line(tiny, tmp_path):
    words = _options(tiny, tmp_path / "x", "--also", "spare", "sinks=5", "budget=layer")
    *_, spec = program.chosen_specs(program.parse([*words, "count_sinks=false"]))
    assert spec.name == "spare"
    wanted = VerticalSlash(recall=0.5, sinks=5, budget="layer", count_sinks=False)
    assert spec.pattern(0.5) == wanted


def test_every_pattern_of_the_table_is_one():
    names = [spec.name for spec in SPECS]
    assert len(set(names)) == len(names)
    for spec in SPECS:
        for value in spec.values:
            assert getattr(spec.pattern(value), spec.knob) == value


def test_the_picture_has_a_curve_for_each_pattern():
    def text(kind: str, recall: float) -> dict:
        rows = []
        for name in ("joint", *picture.ORACLES):
            rows.append({"name": name, "recall": recall, "density": 0.2})
            rows.append({"name": name, "recall": recall - 0.2, "density": 0.1})
        return {"kind": kind, "rows": rows, "oracles": []}

    texts = [text("code", 0.8), text("code", 0.9), text("chat", 0.7)]
    recalls, densities = picture.curve(texts[:2], "joint")
    assert recalls == pytest.approx([0.65, 0.85]) and densities == pytest.approx([0.1, 0.2])
    figure = picture.draw(texts, ["joint"])
    assert [panel.get_title() for panel in figure.axes] == ["code", "chat"]
    assert [len(panel.lines) for panel in figure.axes] == [3, 3]
    with pytest.raises(ValueError, match='--patterns: no text has "moba"'):
        picture.draw(texts, ["moba"])
    with pytest.raises(ValueError, match="no text has --length tokens"):
        picture.draw([], ["joint"])


def test_two_texts_of_each_kind_are_there():
    for kind in KINDS:
        first = text_of(kind, 0).content
        second = text_of(kind, 1).content
        assert first[:1000] != second[:1000]
        # About three characters make a token of code, more one of prose.
        assert min(len(first), len(second)) > 3.5 * 16384


def test_a_text_that_is_too_short_is_named():
    class Letters:
        def encode(self, text):
            return torch.arange(len(text)).int().numpy()

    text = Text("chat", 0, "chats.jsonl", "abc")
    assert text.tokens(Letters(), 2).tolist() == [[0, 1]]
    with pytest.raises(ValueError, match="chat 0 .* has 3 tokens; write --lengths up to that"):
        text.tokens(Letters(), 4)


def test_chats_are_small_and_answered():
    assert CHATS.stat().st_size < 100_000
    for chat in read_chats():
        roles = [message["role"] for message in chat]
        assert roles == ["user", "assistant"] * (len(chat) // 2)
        assert all(message["content"].strip() for message in chat)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_times_on_a_gpu():
    q, k = _random(1024)
    # Heads of 64, as the real model has.
    q = F.pad(q, (0, 48)).cuda().bfloat16()
    k = F.pad(k, (0, 48)).cuda().bfloat16()
    measured = measure.measure(Inputs(q, k, 0.0), SPECS, measure.Timing((0.9, 0.95), 1))
    assert set(measured["dense_ms"]) >= {"cudnn", "flash", "ours, triton"}
    timed = [row for row in measured["rows"] if "kernel_ms" in row]
    names = {row["name"] for row in timed}
    assert names >= {"joint", "xattention, stride 16", "moba, chunk 128"}
    for row in timed:
        assert row["kernel_ms"]["triton"]["backward_ms"] > 0
