"""Folders that transformers reads in unexpected ways. transformers is the reference, always by a
reload from disk.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.models.huggingface_reference import (
    LLAMA3,
    QWEN2,
    YARN,
    assert_same_logits,
    change_tensors,
    decoder,
    export,
    save_checkpoint,
    save_reference,
    write_config,
)
from titan_sparse.commands.export_hf import main as export_hf
from titan_sparse.config import Config, check_start
from titan_sparse.models import huggingface_files
from titan_sparse.models.flavours import resolve
from titan_sparse.models.huggingface import check_weights
from titan_sparse.models.huggingface_config import config_json, read_config

transformers = pytest.importorskip("transformers")

ORIGINAL = "original_max_position_embeddings"
# None: the key is left out.
WITHOUT_ROPE = {"rope_parameters": None, "rope_theta": None, "rope_scaling": None}
YARN_4 = {key: value for key, value in YARN.items() if key != "rope_theta"}
LLAMA3_4 = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}


def reload(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


def export_from(folder: Path, out: Path) -> None:
    """Reads `folder` and exports it again, with itself as the source."""
    checkpoint = save_checkpoint(decoder(folder), out.with_name("checkpoint") / "step-1")
    export(checkpoint, str(out), read_config(str(folder)), torch.float32, str(folder))


def assert_same_in_and_out(tmp_path: Path, folder: Path) -> None:
    assert_same_logits(decoder(folder), reload(folder))
    export_from(folder, tmp_path / "out")
    assert_same_logits(decoder(folder), reload(tmp_path / "out"))


def set_values(folder: Path, **values) -> None:
    """Unlike write_config(), writes null for None."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# Rotary embedding


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": YARN, ORIGINAL: 32},
        {"rope_parameters": LLAMA3, ORIGINAL: 128},
        {"rope_scaling": YARN_4, "rope_theta": 700.0, ORIGINAL: 16},
        {"rope_scaling": LLAMA3_4, "rope_theta": 700.0, ORIGINAL: 16},
        {"rope_parameters": {k: v for k, v in YARN.items() if k != ORIGINAL}, ORIGINAL: 64},
        {ORIGINAL: 32, "rope_theta": 1e3},
    ],
    ids=["yarn", "llama3", "yarn, old", "llama3, old", "top level only", "default"],
)
def test_the_original_length_at_the_top_level_beats_the_table(tmp_path, changes):
    folder = tmp_path / "in"
    write_config(folder, **WITHOUT_ROPE | changes)
    assert read_config(str(folder)).rope.original_length == changes[ORIGINAL]
    assert_same_in_and_out(tmp_path, folder)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written[ORIGINAL] == changes[ORIGINAL]


def test_an_original_length_of_the_source_does_not_beat_the_run(tmp_path):
    """The run adds YaRN over another length than the source names for its plain embedding."""
    write_config(tmp_path / "in", **{ORIGINAL: 256})
    settings = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": 64}
    ours = decoder(tmp_path / "in", **settings)
    values = config_json(read_config(str(tmp_path / "in")), "float32", str(tmp_path / "in"))
    assert values[ORIGINAL] == 256
    checkpoint = save_checkpoint(ours, tmp_path / "checkpoint/step-1")
    shape = resolve("debug", initial_hf=str(tmp_path / "in"), **settings)
    export(checkpoint, str(tmp_path / "out"), shape, torch.float32, str(tmp_path / "in"))
    assert_same_logits(ours, reload(tmp_path / "out"))


@pytest.mark.parametrize(
    "changes, theta",
    [
        ({}, 1e4),
        ({"rope_scaling": YARN_4}, 1e4),
        ({"rope_parameters": YARN_4}, 1e4),
        ({"rope_parameters": YARN_4, "rope_theta": 700.0}, 700.0),
        ({"rope_parameters": YARN, "rope_theta": 700.0}, 1e3),
        ({"rope_parameters": YARN | {"beta_fast": 0, "beta_slow": 0}}, 1e3),
        ({"rope_parameters": YARN | {"beta_fast": None, "beta_slow": None}}, 1e3),
        ({"rope_parameters": YARN | {"attention_factor": None}}, 1e3),
    ],
)
def test_what_the_rotary_embedding_leaves_out_is_that_of_transformers(tmp_path, changes, theta):
    folder = tmp_path / "in"
    write_config(folder, **WITHOUT_ROPE | changes)
    assert read_config(str(folder)).rope.theta == theta
    assert_same_in_and_out(tmp_path, folder)


# Weights


def test_a_single_file_beats_a_left_over_index(tmp_path):
    old = save_reference(tmp_path / "in")
    (tmp_path / "in/model.safetensors").unlink()
    old.save_pretrained(tmp_path / "in", max_shard_size="50KB")
    assert (tmp_path / "in/model.safetensors.index.json").is_file()
    with torch.no_grad():
        old.lm_head.weight.mul_(-1)
    old.save_pretrained(tmp_path / "new")
    new_file = tmp_path / "new/model.safetensors"
    (tmp_path / "in/model.safetensors").write_bytes(new_file.read_bytes())
    assert_same_logits(decoder(tmp_path / "in"), reload(tmp_path / "in"))
    # Nor are shards missed that the left-over index names.
    for path in (tmp_path / "in").glob("model-*.safetensors"):
        path.unlink()
    check_weights(str(tmp_path / "in"), read_config(str(tmp_path / "in")))


@pytest.mark.parametrize("name, files", [(QWEN2, "one file"), ("LlamaForCausalLM", "shards")])
def test_a_head_that_differs_is_kept_whatever_config_json_says(tmp_path, name, files):
    model = save_reference(tmp_path / "in", name)
    if files == "shards":
        (tmp_path / "in/model.safetensors").unlink()
        model.save_pretrained(tmp_path / "in", max_shard_size="50KB")
    set_values(tmp_path / "in", tie_word_embeddings=True)
    assert not read_config(str(tmp_path / "in")).tied_embeddings
    assert_same_logits(decoder(tmp_path / "in"), model)
    assert_same_in_and_out(tmp_path, tmp_path / "in")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["tie_word_embeddings"] is False
    assert "lm_head.weight" in load_file(tmp_path / "out/model.safetensors")


def test_a_head_that_differs_in_its_last_element_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_files, "_CHUNK_BYTES", 50_000)
    save_reference(tmp_path, tie_word_embeddings=True)

    def change(tensors):
        head = tensors["model.embed_tokens.weight"].clone()
        head[-1, -1] += 100
        tensors["lm_head.weight"] = head

    change_tensors(tmp_path, change)
    assert_same_logits(decoder(tmp_path), reload(tmp_path))


def test_a_head_of_another_shape_or_dtype_is_refused(tmp_path):
    """The first one begins with the bytes of the embedding."""
    weight = save_reference(tmp_path, tie_word_embeddings=True).lm_head.weight.detach()
    longer = torch.cat((weight, weight[:1]))
    change_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": longer}))
    with pytest.raises(ValueError, match=r"lm_head.weight in .* is \[332, 64\]"):
        check_weights(str(tmp_path), read_config(str(tmp_path)))
    half = weight.bfloat16()
    change_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": half}))
    with pytest.raises(ValueError, match="config.json: .*lm_head.weight is BF16 and .* F32"):
        read_config(str(tmp_path))


_HUGE = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 1000000000000000]}'


@pytest.mark.parametrize(
    "header",
    [
        "",
        "[]",
        '{"lm_head.weight": 5, "model.embed_tokens.weight": 5}',
        f'{{"lm_head.weight": {_HUGE}, "model.embed_tokens.weight": {_HUGE}}}',
    ],
)
def test_broken_weights_leave_the_shape_readable(tmp_path, header):
    """A run that resumes needs the shape only; check_weights() names the file."""
    save_reference(tmp_path, tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    text = header.encode()
    for data in (len(text).to_bytes(8, "little") + text, b"\xff" * 20, b"", None):
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        config = read_config(str(tmp_path))
        assert config.tied_embeddings
        with pytest.raises(ValueError, match="model.safetensors cannot be read|has neither"):
            check_weights(str(tmp_path), config)


def test_an_export_drops_no_head_of_a_checkpoint(tmp_path, capsys):
    """The weights that showed that the head is not tied have since been deleted."""
    save_reference(tmp_path / "in")
    set_values(tmp_path / "in", tie_word_embeddings=True)
    checkpoint = Path(save_checkpoint(decoder(tmp_path / "in"), tmp_path / "run/checkpoint/step-1"))
    (checkpoint / "config.toml").write_text(f'[model]\ninitial_hf = "{tmp_path / "in"}"\n')
    arguments = [str(checkpoint), str(tmp_path / "out"), "--dtype", "float32"]
    assert export_hf(arguments) == 0
    assert_same_logits(decoder(tmp_path / "in"), reload(tmp_path / "out"))
    (tmp_path / "in/model.safetensors").unlink()
    assert export_hf([str(checkpoint), str(tmp_path / "again")]) == 2
    assert "has lm_head.weight, but" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


# Out


def test_links_out_of_the_folder_are_not_followed(tmp_path):
    """Links of Hugging Face's cache are followed: snapshots/COMMIT/FILE -> ../../blobs/DIGEST."""
    (tmp_path / "secret").write_text("a private key")
    save_reference(tmp_path / "in")
    (tmp_path / "in/vocab.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="vocab.json is a link to .*secret, outside of its folder"):
        export_from(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    config = Config()
    config.training.output_dir = str(tmp_path / "run")
    config.model.initial_hf = str(tmp_path / "in")
    config.checkpoint.last_save_in_hf = True
    with pytest.raises(ValueError, match="vocab.json is a link to"):
        check_start(config)

    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    (cache / "blobs/12ab").write_text("{}")
    save_reference(cache / "snapshots/1")
    (cache / "snapshots/1/vocab.json").symlink_to("../../blobs/12ab")
    export_from(cache / "snapshots/1", tmp_path / "out")
    assert (tmp_path / "out/vocab.json").read_text() == "{}"


def test_what_the_source_says_beside_the_shape_is_kept(tmp_path):
    save_reference(tmp_path / "in", "LlamaForCausalLM", rope_parameters=dict(YARN))
    kept = {
        "eos_token_id": [4, 5],
        "pad_token_id": 6,
        "initializer_range": 0.013,
        "use_cache": False,
        "my_field": {"a": [1, None, "é"]},
        "my_null": None,
    }
    set_values(tmp_path / "in", **kept, dtype="bfloat16", auto_map={"AutoConfig": "code.Config"})
    generation = transformers.GenerationConfig(
        do_sample=True, temperature=0.7, top_k=17, eos_token_id=[4, 5], pad_token_id=6
    )
    generation.save_pretrained(tmp_path / "in")
    export_from(tmp_path / "in", tmp_path / "out")

    again = reload(tmp_path / "out")
    for key, value in kept.items():
        assert getattr(again.config, key) == value, key
    assert not hasattr(again.config, "auto_map")
    written = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert written.dtype == torch.float32
    source = transformers.AutoConfig.from_pretrained(tmp_path / "in")
    assert written.rope_parameters.items() >= source.rope_parameters.items()
    said = {"do_sample": True, "temperature": 0.7, "top_k": 17, "pad_token_id": 6}
    for key, value in said.items():
        assert getattr(again.generation_config, key) == value, key
    assert again.generation_config.eos_token_id == [4, 5]
    # What can be read again is complete.
    assert read_config(str(tmp_path / "out")) == read_config(str(tmp_path / "in"))
