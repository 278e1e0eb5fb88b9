"""--dry-run of models that run through transformers' own code: parameters, FLOPs, windows, and what it
says that it does not know."""

import json
import re
from pathlib import Path

import pytest

from titan_sparse.config import Config, load
from titan_sparse.estimate.dry_run import World, dry_run
from titan_sparse.estimate.flops import causal_pairs, flops_per_token
from titan_sparse.models.flavours import resolve

ROOT = Path(__file__).parents[2]
WORLD = World(1, 1, 139.8)
SIZES = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 65536,
}


def _config(folder: Path, model_type: str, **settings) -> Config:
    folder.mkdir(exist_ok=True)
    values = SIZES | {"model_type": model_type} | settings
    (folder / "config.json").write_text(json.dumps(values))
    config = Config()
    config.model.initial_hf = str(folder)
    config.training.seq_len = 65536
    config.attention.pattern = "dense"
    return config


def _petaflop(report: str) -> float:
    return float(re.search(r"([\d.,]+) PFLOP dense", report).group(1).replace(",", ""))


def test_windows_are_counted_layer_by_layer(tmp_path):
    config = _config(tmp_path, "olmo3", sliding_window=4096)
    report, fits = dry_run(config, WORLD)
    assert "a window of 4,096 in 6 of 8 layers" in report and fits
    assert "reckoned as of ours, and not measured" in report
    model = resolve(**vars(config.model))
    pairs = model.heads * (6 * causal_pairs(65536, 4096) + 2 * causal_pairs(65536)) / 65536
    assert _petaflop(report) == pytest.approx(
        65536 * flops_per_token(model, pairs) / 1e15, abs=5e-3
    )


@pytest.mark.parametrize("full_layers", [0, 2])
def test_a_pattern_saves_nothing_in_windows(tmp_path, full_layers):
    types = ["full_attention"] * full_layers + ["sliding_attention"] * (8 - full_layers)
    config = _config(tmp_path, "olmo3", sliding_window=512, layer_types=types)
    config.attention.pattern = "vertical_slash"
    config.attention.vertical_slash.max_verticals = 512
    config.attention.vertical_slash.max_slashes = 16
    report, _ = dry_run(config, WORLD)
    most = float(re.search(r"at most ([\d.,]+) PFLOP", report).group(1))
    dense = _petaflop(report)
    density = float(re.search(r"density ([\d.]+) %", report).group(1))
    if full_layers:
        assert most < dense and density < 20
    else:
        assert most == dense and density == 100


def test_active_parameters_of_a_mixture_of_experts():
    path = ROOT / "train_configs/qwen3_30b_a3b_64k.toml"
    config = load(["--config", str(path)])[0]
    report, _ = dry_run(config, World(8, 8, 139.8))
    assert "30,532.1 M parameters" in report
    assert "8 of 128 experts a token" in report
    active = float(re.search(r"([\d.,]+) M active", report).group(1).replace(",", ""))
    # The card's 3.3 B count the embedding too.
    assert active == pytest.approx(3042, abs=5)
    config.attention.sliding_window = 1
    without_attention = _petaflop(dry_run(config, World(8, 8, 139.8))[0])
    assert without_attention == pytest.approx(6 * active * 1e6 * 65536 / 1e15, abs=0.02)
