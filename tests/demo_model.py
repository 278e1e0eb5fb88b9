"""The model of train_configs/demo_chat.toml, as far as a dry run reads it: its config.json."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = "outputs/smollm2"
"""Where scripts.study.real_model puts the model."""

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


def in_a_folder_with_the_model(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make `folder` the current one, with the model's config.json and train_configs in it."""
    (folder / "train_configs").symlink_to(ROOT / "train_configs")
    model = folder / FOLDER
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(SMOLLM2_135M))
    monkeypatch.chdir(folder)
