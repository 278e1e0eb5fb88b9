"""train_configs/: in every file no query sees another document, the claims of the comments hold."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from titan_sparse.attention.patterns import Dense, MoBA, VerticalSlash, XAttention
from titan_sparse.commands import train
from titan_sparse.config import load, load_and_check
from titan_sparse.training.attention import build_pattern

FOLDER = Path(__file__).parents[2] / "train_configs"
ALL_FILES = sorted(FOLDER.rglob("*.toml"))


def test_no_file_lets_a_query_see_another_document():
    for path in ALL_FILES:
        config, _ = load(["--config", str(path)])
        masks = ("documents", "causal") if config.data.sequences != "packed" else ("documents",)
        assert config.attention.mask in masks, path


# The model of demo_chat.toml, as far as a dry run reads it.
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


@pytest.fixture
def folder_with_the_model(monkeypatch, tmp_path) -> None:
    """The current folder: train_configs, and the config.json that
    scripts.study.real_model writes."""
    (tmp_path / "train_configs").symlink_to(FOLDER)
    (tmp_path / "outputs/smollm2").mkdir(parents=True)
    (tmp_path / "outputs/smollm2/config.json").write_text(json.dumps(SMOLLM2_135M))
    monkeypatch.chdir(tmp_path)


def _claims(path: Path) -> list[tuple[float, str]]:
    """The percentages in the comments of a file, and of what."""
    text = path.read_text().replace("\n# ", " ")
    found = re.findall(r"([\d.]+) % of the (keys|causal pairs)", text)
    assert len(found) == text.count(" % of the "), path
    return [(float(share), what) for share, what in found]


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda path: path.name)
def test_a_file_is_accepted_and_its_comments_are_right(folder_with_the_model, capsys, path):
    """A ready one fits into the GPUs that are named in its first lines: H200s, 139.8 GiB."""
    words = ["--config", str(path)]
    config, _ = load(words)
    report = ["--dry-run", "--ranks", str(config.parallelism.cp), "--device-memory", "139.8"]
    assert train.main([*words, *report]) == 0 or path.parent != FOLDER
    printed = capsys.readouterr().out
    assert "fit" in printed and "PFLOP dense" in printed
    most = 100 * config.attention.vertical_slash.max_verticals / config.training.seq_len
    for share, what in _claims(path):
        if what == "keys":
            assert share == pytest.approx(most, abs=0.05)
        else:
            density = float(re.search(r"density ([\d.]+) %", printed)[1])
            assert share == pytest.approx(density, abs=0.3)


def test_comments_claim_something():
    assert sum(len(_claims(path)) for path in ALL_FILES) == 11


FILES = [path for path in ALL_FILES if path.parent == FOLDER / "variants"]
PUBLISHED = VerticalSlash(
    recall=0.95,
    budget="independent",
    probe=64,
    probe_rows="last",
    sinks=30,
    count_sinks=True,
    local_slashes=2,
)
ROWS = {
    "mtraining": (PUBLISHED, "striped", "double_ring"),
    "mtraining_without_hierarchy": (PUBLISHED, "striped", "ring"),
    "mtraining_zigzag": (PUBLISHED, "zigzag", "ring"),
    "mtraining_xattention": (XAttention(stride=16, threshold=0.9), "striped", "double_ring"),
    "xattention": (XAttention(stride=16, threshold=0.9), "zigzag", "ring"),
    "moba": (MoBA(chunk_size=4096, top_k=12), "zigzag", "ring"),
    "minference": (
        replace(PUBLISHED, min_verticals=1000, max_verticals=1000, min_slashes=48, max_slashes=48),
        "striped",
        "double_ring",
    ),
    "dense_zigzag": (Dense(), "zigzag", "ring"),
    "dense_striped": (Dense(), "striped", "ring"),
    "burst_engine": (Dense(), "striped", "double_ring"),
    "packed": (PUBLISHED, "striped", "double_ring"),
    "magi_attention": (Dense(), "balanced", "group_cast"),
}


def test_every_variant_is_listed():
    assert {path.stem for path in FILES} == set(ROWS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_variant_says_what_was_published(path):
    config, _ = load_and_check(["--config", str(path)], 32, 8)
    attention = config.attention
    assert (build_pattern(attention), attention.layout, attention.schedule) == ROWS[path.stem]
    has_documents = path.stem in ("packed", "magi_attention")
    assert attention.mask == ("documents" if has_documents else "causal")
    sizes = (config.training.seq_len, config.parallelism.cp, config.model.rope_factor)
    assert sizes == (524288, 32, 32.0)
    assert Path(config.training.output_dir).name == path.stem
