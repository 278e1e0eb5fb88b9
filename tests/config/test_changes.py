"""What a start may not change when it resumes, and what its message says to write instead."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.config.test_reading import message_of
from tests.refusals import refused
from titan_sparse.config import Config, ConfigError, check, load, save, to_toml
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


def _config(words: str = "") -> Config:
    return load(words.split())[0]


def _origin(config: Config, **other) -> Origin:
    model = resolve(**dataclasses.asdict(config.model))
    return dataclasses.replace(Origin(model, "bytes", "cpu"), **other)


def _saved(folder: Path, config: Config, origin: Origin | None = None) -> Saved:
    """What a run with this configuration saves with its checkpoint."""
    path = folder / "run/checkpoint/step-3"
    save(config, path)
    (path / ORIGIN_FILE).write_text(origin_text(origin or _origin(config)))
    saved = read_saved(str(path))
    assert saved is not None
    return saved


def _refusal(saved: Saved, config: Config, **other) -> str:
    message = message_of(refuse_changes, saved, config, _origin(config, **other))
    assert saved.checkpoint in message
    return message


def test_changes_are_listed_with_both_values(tmp_path):
    saved = _saved(tmp_path, _config("--optimizer.lr 0.001"))
    words = "--optimizer.lr 0.0001 --attention.mask causal --attention.moba.top_k 3"
    config = _config(f"{words} --training.dtype float32 --checkpoint.enable")
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
        ("", "--optimizer.name SGD", 'write optimizer.name = "AdamW", .*initial_load_path = '),
        ("--training.dtype float64", "", 'is "bfloat16", .*write training.dtype = "float64"'),
        ("", "--training.dtype float64", 'is "float64", .*write training.dtype = "bfloat16"'),
        ("--lora.rank 4", "--lora.rank 8", "write lora.rank = 4, or .* for a new run$"),
        ("--lora.alpha 4", "", "write lora.alpha = 4,"),
        ("--lora.targets a", "--lora.targets b", 'write lora.targets = "a",'),
        ("", "--model.layers 3", "^layers of the model was 4 and is 3.*write model.layers = 0,"),
        (
            "--model.rope_theta 1e4",
            "--model.rope_theta 1e6",
            r"rope.theta .* was 10000.0 and is 1000000.0.*rope_theta = 10000.0, .*initial_load_path",
        ),
        (
            "",
            "--model.rope_scaling yarn --model.rope_factor 4",
            'rope_scaling = "flavour" and model.rope_factor = 1.0, .*initial_load_path',
        ),
        (
            "--model.flavour qwen3-0.6b",
            "--model.flavour qwen2.5-0.5b",
            '^hidden_size .* was 1024 and is 896.*write model.flavour = "qwen3-0.6b", .*new run$',
        ),
    ],
)
def test_refused(tmp_path, before, now, said):
    saved = _saved(tmp_path, _config(before))
    assert re.search(said, _refusal(saved, _config(now)))
    refuse_changes(saved, _config(before), _origin(_config(before)))


def test_a_tokenizer_counts_by_its_content(tmp_path):
    before = _config("--data.tokenizer ./a/tokenizer.json")
    saved = _saved(tmp_path, before, _origin(before, tokenizer="1" * 64))
    moved = _config("--data.tokenizer ./b/tokenizer.json")
    refuse_changes(saved, moved, _origin(moved, tokenizer="1" * 64))

    message = _refusal(saved, moved, tokenizer="2" * 64)
    assert 'write data.tokenizer = "./a/tokenizer.json"' in message
    assert "1" * 12 in message and "2" * 12 in message
    message = _refusal(saved, before, tokenizer="2" * 64)
    assert "put the files back as they were" in message


def test_a_model_counts_by_what_it_is(tmp_path):
    """A model.initial_hf that was moved or deleted is the same model, but not with
    another config.json."""
    llama = Origin(FLAVOURS["llama3.1-8b"], "bytes", "cpu")
    before, moved = Config(), Config()
    before.model.initial_hf, moved.model.initial_hf = "old/folder", "new"
    saved = _saved(tmp_path, before, llama)
    for config in (before, moved, _config("--model.flavour llama3.1-8b")):
        refuse_changes(saved, config, llama)

    longer = dataclasses.replace(llama.model, max_positions=7)
    refuse_changes(saved, before, dataclasses.replace(llama, model=longer))
    other = dataclasses.replace(llama.model, norm_eps=0.1)
    with refused("norm_eps of the model was 1e-05 and is 0.1", ConfigError):
        refuse_changes(saved, before, dataclasses.replace(llama, model=other))


def test_a_new_run_may_begin_with_the_weights_of_a_tuned_model(tmp_path):
    """By what the refusal says, which is accepted."""
    words = "--model.initial_hf train_configs/shapes/qwen3_0_6b --data.tokenizer bytes "
    words += "--checkpoint.enable --training.device cpu "
    saved = _saved(tmp_path, _config(words))
    config = _config(words + "--training.seq_len 4096")
    said = _refusal(saved, config, data=[{"seq_len": 4096}])
    found = re.search(r"new run and (\S+) = (\S+) for its weights \(with (\S+) = true", said)
    path, folder, switch = found.groups()
    new = _config(f"{words}--training.output_dir new --{path} {json.loads(folder)} --{switch}")
    check(new, 1, 1)
    assert resolve(**vars(new.model)) == resolve(**vars(config.model))


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
    config, origin = to_toml(_config("--optimizer.lr 0.5")), origin_text(_origin(Config()))
    for first, second in ((None, None), (config, None), ("no [toml", origin), (config, "{")):
        for name, text in (("config.toml", first), (ORIGIN_FILE, second)):
            if text is not None:
                (path / name).write_text(text)
        assert read_saved(str(path)) is None
    (path / ORIGIN_FILE).write_text(origin)
    assert read_saved(str(path)).values["optimizer.lr"] == 0.5
