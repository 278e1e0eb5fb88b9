"""What a start may not change when it resumes, and what its message says to write instead."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from titan_sparse.config import Config, ConfigError, save, to_toml
from titan_sparse.config.changes import (
    ORIGIN_FILE,
    Origin,
    Saved,
    changes,
    origin_text,
    read_saved,
    refuse_changes,
)
from titan_sparse.models.flavours import FLAVOURS, resolve

LLAMA = FLAVOURS["llama3.1-8b"]


def _config(**overrides) -> Config:
    """A configuration; overrides: dotted keys, with __ for the dot."""
    config = Config()
    for key, value in overrides.items():
        section, name = key.split("__")
        assert hasattr(getattr(config, section), name)
        setattr(getattr(config, section), name, value)
    return config


def _origin(config: Config, **other) -> Origin:
    model = resolve(**dataclasses.asdict(config.model))
    return dataclasses.replace(Origin(model, "bytes", "cpu"), **other)


def _saved(folder: Path, config: Config, **other) -> Saved:
    """What a run with this configuration saves with its checkpoint."""
    path = folder / "run/checkpoint/step-3"
    save(config, path)
    (path / ORIGIN_FILE).write_text(origin_text(_origin(config, **other)))
    saved = read_saved(str(path))
    assert saved is not None
    return saved


def _refusal(saved: Saved, config: Config, **other) -> str:
    with pytest.raises(ConfigError) as caught:
        refuse_changes(saved, config, _origin(config, **other))
    message = str(caught.value)
    assert "\n" not in message and saved.checkpoint in message
    return message


def test_changes_are_listed_with_both_values(tmp_path):
    saved = _saved(tmp_path, _config(optimizer__lr=0.001))
    config = _config(optimizer__lr=0.0001, attention__mask="causal", checkpoint__enable=True)
    config.attention.moba.top_k = 3
    config.training.dtype = "float32"
    refuse_changes(saved, config, _origin(config))
    assert [str(change) for change in changes(saved, config)] == [
        'training.dtype "bfloat16" -> "float32"',
        'attention.mask "documents" -> "causal"',
        "attention.moba.top_k 12 -> 3",
        "optimizer.lr 0.001 -> 0.0001",
        "checkpoint.enable false -> true",
    ]


@pytest.mark.parametrize(
    "before, now, said",
    [
        ({}, {"optimizer__name": "SGD"}, 'write optimizer.name = "AdamW", .*initial_load_path = '),
        ({"training__dtype": "float64"}, {}, 'is "bfloat16", .*write training.dtype = "float64"'),
        ({}, {"training__dtype": "float64"}, 'is "float64", .*write training.dtype = "bfloat16"'),
        ({"lora__rank": 4}, {"lora__rank": 8}, "write lora.rank = 4, or .* for a new run$"),
        ({"lora__alpha": 4}, {}, "write lora.alpha = 4,"),
        ({"lora__targets": "a"}, {"lora__targets": "b"}, 'write lora.targets = "a",'),
        ({}, {"model__layers": 3}, "^layers of the model was 4 and is 3.*write model.layers = 0,"),
        (
            {"model__rope_theta": 1e4},
            {"model__rope_theta": 1e6},
            r"rope.theta .* was 10000.0 and is 1000000.0.*rope_theta = 10000.0, .*initial_load_path",
        ),
        (
            {},
            {"model__rope_scaling": "yarn", "model__rope_factor": 4.0},
            'rope_scaling = "flavour" and model.rope_factor = 1.0, .*initial_load_path',
        ),
        (
            {"model__flavour": "qwen3-0.6b"},
            {"model__flavour": "qwen2.5-0.5b"},
            '^hidden_size .* was 1024 and is 896.*write model.flavour = "qwen3-0.6b", .*new run$',
        ),
    ],
)
def test_refused(tmp_path, before, now, said):
    saved = _saved(tmp_path, _config(**before))
    assert re.search(said, _refusal(saved, _config(**now)))
    refuse_changes(saved, _config(**before), _origin(_config(**before)))


def test_a_tokenizer_counts_by_its_content(tmp_path):
    before = _config(data__tokenizer="a/tokenizer.json")
    saved = _saved(tmp_path, before, tokenizer="1" * 64)
    moved = _config(data__tokenizer="b/tokenizer.json")
    refuse_changes(saved, moved, _origin(moved, tokenizer="1" * 64))

    message = _refusal(saved, moved, tokenizer="2" * 64)
    assert 'write data.tokenizer = "a/tokenizer.json"' in message
    assert "1" * 12 in message and "2" * 12 in message
    message = _refusal(saved, before, tokenizer="2" * 64)
    assert "put the files back as they were" in message


def test_a_model_counts_by_what_it_is(tmp_path):
    """A model.initial_hf that was moved or deleted is the same model, but not with another config.json."""
    before = _config(model__initial_hf="old/folder")
    checkpoint = tmp_path / "run/checkpoint/step-3"
    save(before, checkpoint)
    (checkpoint / ORIGIN_FILE).write_text(origin_text(Origin(LLAMA, "bytes", "cpu")))
    saved = read_saved(str(checkpoint))
    for config in (before, _config(model__initial_hf="new"), _config(model__flavour="llama3.1-8b")):
        refuse_changes(saved, config, Origin(LLAMA, "bytes", "cpu"))

    other = Origin(dataclasses.replace(LLAMA, norm_eps=0.1), "bytes", "cpu")
    with pytest.raises(ConfigError, match="norm_eps of the model was 1e-05 and is 0.1"):
        refuse_changes(saved, before, other)
    longer = Origin(dataclasses.replace(LLAMA, max_positions=7), "bytes", "cpu")
    refuse_changes(saved, before, longer)


def test_configurations_of_later_versions(tmp_path):
    path = tmp_path / "run/checkpoint/step-3"
    path.mkdir(parents=True)
    (path / "config.toml").write_text(
        "[attention.vertical_slash]\nmax_verticals = 4096\nmin_verticals = 2\n"
        '[gone]\nkey = 1\n\n[optimizer]\nlr = 0.5\nnesterov = true\n[attention]\nmask = "prefix"\n'
    )
    origin = json.loads(origin_text(_origin(Config())))
    origin["model"]["experts_of_later"] = 8
    (path / ORIGIN_FILE).write_text(json.dumps(origin))
    saved = read_saved(str(path))
    refuse_changes(saved, Config(), _origin(Config()))
    assert [str(change) for change in changes(saved, Config())] == [
        'attention.mask "prefix" -> "documents"',
        "attention.vertical_slash.min_verticals 2 -> 0",
        "optimizer.lr 0.5 -> 0.0003",
    ]


def test_what_cannot_be_read_says_nothing(tmp_path):
    path = tmp_path / "run/checkpoint/step-3"
    path.mkdir(parents=True)
    assert read_saved(None) is None and read_saved(str(tmp_path / "none")) is None
    config, origin = to_toml(_config(optimizer__lr=0.5)), origin_text(_origin(Config()))
    for first, second in ((None, None), (config, None), ("no [toml", origin), (config, "{")):
        for name, text in (("config.toml", first), (ORIGIN_FILE, second)):
            if text is not None:
                (path / name).write_text(text)
        assert read_saved(str(path)) is None
    (path / ORIGIN_FILE).write_text(origin)
    assert read_saved(str(path)).values["optimizer.lr"] == 0.5
