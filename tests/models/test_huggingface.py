"""Hugging Face checkpoints in and out, compared with transformers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from tests.data.helpers import CHAT, CHATML, GLM, write_tokenizer
from tests.models.helpers import (
    LENGTH,
    LLAMA3,
    ORIGINAL,
    PLAIN,
    YARN,
    assert_same_logits,
    causal,
    change_tensors,
    decoder,
    export,
    save_checkpoint,
    set_values,
    tokens_and_positions,
)
from tests.models.transformers_models import VOCAB, read_model, save_model
from tests.refusals import error_of, refused, room_for
from tests.runs import tiny_config, train
from titan_sparse.commands.export_hf import main as export_hf
from titan_sparse.config import Config, Model, check_start, save
from titan_sparse.data.endings import declared_ends
from titan_sparse.models.flavours import resolve
from titan_sparse.models.huggingface import check_weights, huggingface_name
from titan_sparse.models.huggingface_config import read_config

YARN_4 = {key: value for key, value in YARN.items() if key != "rope_theta"}


def export_from(folder: Path, out: Path) -> None:
    """Reads `folder` and exports it again, with itself as the source."""
    checkpoint = save_checkpoint(decoder(folder), out.with_name("checkpoint") / "step-1")
    export(checkpoint, str(out), read_config(str(folder)), torch.float32, str(folder))


def assert_same_in_and_out(tmp_path: Path, folder: Path) -> None:
    assert_same_logits(decoder(folder), read_model(folder))
    export_from(folder, tmp_path / "out")
    assert_same_logits(decoder(folder), read_model(tmp_path / "out"))


# Families


class InFloat64:
    """torch as transformers' code sees it: what it computes in float32 is computed in float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.mark.parametrize("name", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize(
    "rope, kv_heads, tied",
    [(PLAIN, 1, True), (YARN, 2, False), (LLAMA3, 3, True)],
    ids=["default", "yarn", "llama3"],
)
def test_loss_and_gradients_are_those_of_transformers(
    tmp_path, monkeypatch, name, rope, kv_heads, tied
):
    heads = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": kv_heads}
    settings = {"tie_word_embeddings": tied, "rope_parameters": dict(rope)}
    theirs = save_model(tmp_path / "in", name, **heads, **settings).double()
    ours = decoder(tmp_path / "in", torch.float64)
    # Both are float32. test_decoder.py compares them.
    theirs.model.rotary_emb.inv_freq = ours.inv_freq
    tokens, positions = tokens_and_positions()
    labels = tokens.masked_fill(tokens < 60, -100)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "float", torch.Tensor.double)
        for module in (modeling_llama, modeling_qwen2, modeling_qwen3):
            patched.setattr(module, "torch", InFloat64())
        logits = theirs(tokens).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = ours(tokens, positions, causal(LENGTH), labels=labels, loss_chunk_tokens=47)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    expected.backward()
    loss.backward()
    gradients = {huggingface_name(n): p.grad for n, p in ours.named_parameters()}
    wanted = {n: p.grad for n, p in theirs.named_parameters()}
    assert gradients.keys() == wanted.keys()
    for key, gradient in wanted.items():
        assert (gradients[key] - gradient).norm() < 1e-9 * gradient.norm(), key

    config = read_config(str(tmp_path / "in"))
    checkpoint = save_checkpoint(ours, tmp_path / "checkpoint/step-1")
    export(checkpoint, str(tmp_path / "out"), config, torch.float64)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert type(again) is type(theirs) and not any(report.values()), report
    assert again.config.tie_word_embeddings == tied
    for key, value in theirs.config.rope_parameters.items():
        assert again.config.rope_parameters[key] == value
    for key, weight in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[key], weight), key
    assert replace(read_config(str(tmp_path / "out")), max_positions=256) == config


# Rotary embedding


@pytest.mark.parametrize(
    "changes, original_length",
    [
        # The original length at the top level beats the table.
        ({"rope_parameters": YARN, ORIGINAL: 32}, 32),
        ({"rope_parameters": LLAMA3, ORIGINAL: 128}, 128),
        # What is left out is transformers' default.
        ({}, 256),
        ({"rope_scaling": YARN_4}, 64),
        ({"rope_parameters": YARN | {"beta_fast": 9.0, "beta_slow": 2.5}}, 64),
    ],
)
def test_rotary_embeddings_in_and_out(tmp_path, changes, original_length):
    folder = tmp_path / "in"
    save_model(folder, "qwen2")
    # What a case does not name is left out.
    left_out = {"rope_parameters", "rope_theta", "rope_scaling"} - changes.keys()
    set_values(folder, *left_out, **changes)
    rope = read_config(str(folder)).rope
    assert rope.original_length == original_length
    assert_same_in_and_out(tmp_path, folder)
    assert read_config(str(tmp_path / "out")).rope == rope
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written.get(ORIGINAL) == changes.get(ORIGINAL)
    if rope.scaling == "llama3":
        assert written["max_position_embeddings"] == max(256, 8 * original_length)


def test_a_run_adds_yarn_over_another_length_than_the_source_names(tmp_path):
    save_model(tmp_path / "in", "qwen2")
    set_values(tmp_path / "in", max_position_embeddings=64, **{ORIGINAL: 256})
    settings = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": 64}
    config = resolve("debug", initial_hf=str(tmp_path / "in"), **settings)
    ours = decoder(tmp_path / "in", **settings)
    checkpoint = save_checkpoint(ours, tmp_path / "checkpoint/step-1")
    export(checkpoint, str(tmp_path / "out"), config, torch.float32, str(tmp_path / "in"))
    yarn = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "in",
        rope_parameters=PLAIN | yarn,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        attn_implementation="eager",
    )
    assert_same_logits(ours, theirs)
    assert_same_logits(ours, read_model(tmp_path / "out"))
    values = json.loads((tmp_path / "out/config.json").read_text())
    assert values["max_position_embeddings"] == 256 and values["torch_dtype"] == "float32"
    assert (values["bos_token_id"], values["eos_token_id"]) == (1, 2)


# Weights


def test_bfloat16_in_from_several_files_and_out_to_several(tmp_path):
    """Weights are float32 in between, as in training."""
    theirs = save_model(tmp_path / "in", "qwen2", tie_word_embeddings=False).bfloat16()
    shutil.rmtree(tmp_path / "in")
    theirs.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    (tmp_path / "in/tokenizer.json").write_text("{}")
    config = read_config(str(tmp_path / "in"))
    checkpoint = save_checkpoint(decoder(tmp_path / "in"), tmp_path / "checkpoint/step-1")
    wanted = theirs.state_dict()
    for name, limit in (("one", 10**9), ("many", 12_000)):
        export(
            checkpoint, str(tmp_path / name), config, torch.bfloat16, str(tmp_path / "in"), limit
        )
        files = sorted((tmp_path / name).glob("*.safetensors"))
        out = {key: x for file in files for key, x in load_file(file).items()}
        assert out.keys() == wanted.keys()
        assert all(x.dtype == torch.bfloat16 and x.equal(wanted[key]) for key, x in out.items())
        assert (len(files) == 1) == (name == "one")
        assert (tmp_path / name / "tokenizer.json").is_file()
        # The largest tensor has a file of its own.
        assert all(file.stat().st_size < max(limit, VOCAB * 32 * 2 + 5000) for file in files)
        check_weights(str(tmp_path / name), config)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert again.dtype == torch.bfloat16
    first = decoder(tmp_path / "in").state_dict()
    for key, weight in decoder(tmp_path / "many").state_dict().items():
        assert torch.equal(weight, first[key]), key


def test_an_export_is_not_written_among_checkpoints(tmp_path):
    save_model(tmp_path / "in", "qwen2")
    config = read_config(str(tmp_path / "in"))
    checkpoint = save_checkpoint(decoder(tmp_path / "in"), tmp_path / "checkpoint/step-3")
    with pytest.raises(ValueError, match="among the run's"):
        export(checkpoint, str(tmp_path / "checkpoint/step-3-hf"), config, torch.float32)


def test_a_single_file_beats_a_left_over_index(tmp_path):
    old = save_model(tmp_path / "in", "llama")
    (tmp_path / "in/model.safetensors").unlink()
    old.save_pretrained(tmp_path / "in", max_shard_size="50KB")
    assert (tmp_path / "in/model.safetensors.index.json").is_file()
    with torch.no_grad():
        old.lm_head.weight.mul_(-1)
    old.save_pretrained(tmp_path / "new")
    new_file = tmp_path / "new/model.safetensors"
    (tmp_path / "in/model.safetensors").write_bytes(new_file.read_bytes())
    assert_same_logits(decoder(tmp_path / "in"), read_model(tmp_path / "in"))
    # Nor are shards missed that the left-over index names.
    for path in (tmp_path / "in").glob("model-*.safetensors"):
        path.unlink()
    check_weights(str(tmp_path / "in"), read_config(str(tmp_path / "in")))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda head: head, ""),
        (
            lambda head: head.clone().index_fill_(0, torch.tensor([VOCAB - 1]), 1),
            "is not model.embed",
        ),
        (lambda head: torch.cat((head, head[:1])), "is not model.embed_tokens.weight"),
        (lambda head: head.bfloat16(), "is not model.embed_tokens.weight"),
    ],
    ids=["a copy", "another head", "another shape", "another dtype"],
)
def test_a_head_beside_a_config_json_that_says_tied(tmp_path, change, message):
    """transformers would use it."""
    model = save_model(tmp_path / "in", "qwen2")
    head = change(model.lm_head.weight.detach()).clone()
    change_tensors(tmp_path / "in", lambda tensors: tensors.update({"lm_head.weight": head}))
    if message:
        with pytest.raises(ValueError, match=message):
            decoder(tmp_path / "in")
        return
    assert_same_logits(decoder(tmp_path / "in"), model)
    assert_same_in_and_out(tmp_path, tmp_path / "in")
    assert "lm_head.weight" not in load_file(tmp_path / "out/model.safetensors")


@pytest.mark.parametrize("header", ["[]", '{"lm_head.weight": 5, "model.embed_tokens.weight": 5}'])
def test_broken_weights_are_named(tmp_path, header):
    save_model(tmp_path, "qwen2")
    path = tmp_path / "model.safetensors"
    text = header.encode()
    for data in (len(text).to_bytes(8, "little") + text, b"", None):
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(ValueError, match="model.safetensors cannot be read|has neither"):
            check_weights(str(tmp_path), read_config(str(tmp_path)))


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_generation_config_that_an_export_could_not_read_is_refused_at_the_start(
    tmp_path, content
):
    config = Config()
    config.training.output_dir = str(tmp_path / "run")
    config.model.initial_hf = str(tmp_path)
    config.data.tokenizer = "bytes"
    config.checkpoint.last_save_in_hf = True
    check_start(config)
    (tmp_path / "generation_config.json").write_text(content)
    with refused("^model.initial_hf = .*generation_config.json"):
        check_start(config)
    # As evaluate, generate, and export_hf read it.
    with refused("generation_config.json"):
        declared_ends(str(tmp_path))


def test_links_out_of_the_folder_are_not_followed(tmp_path):
    """Links of Hugging Face's cache are followed: snapshots/COMMIT/FILE -> ../../blobs/DIGEST."""
    (tmp_path / "secret").write_text("a private key")
    save_model(tmp_path / "in", "qwen2")
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
    save_model(cache / "snapshots/1", "qwen2")
    (cache / "snapshots/1/vocab.json").symlink_to("../../blobs/12ab")
    export_from(cache / "snapshots/1", tmp_path / "out")
    assert (tmp_path / "out/vocab.json").read_text() == "{}"


def test_what_the_source_says_beside_the_shape_is_kept(tmp_path):
    save_model(tmp_path / "in", "llama", rope_parameters=dict(YARN))
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

    again = read_model(tmp_path / "out")
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


# Runs


def _same_chats(found: Path, tokenizer: str, template: str) -> None:
    """transformers makes the same tokens of a chat by the export as by the run's own files."""
    wanted = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer)
    wanted.chat_template = template
    read = transformers.AutoTokenizer.from_pretrained(found)
    assert read.apply_chat_template(CHAT) == wanted.apply_chat_template(CHAT)
    assert read.chat_template == template and read.eos_token == wanted.eos_token


def test_an_export_has_the_tokenizer_and_template_of_its_run(tmp_path):
    """From random weights, and from a model with other ones."""
    own = write_tokenizer(tmp_path / "own", CHATML)
    other = write_tokenizer(tmp_path / "other", GLM)
    for folder, end in ((own, "<|endoftext|>"), (other, "<|end|>")):
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    other_end = CHATML.replace("<|im_end|>", "<|end|>")
    (tmp_path / "other_end.jinja").write_text(other_end)
    run = tiny_config(
        tmp_path,
        "run",
        data__source=str(tmp_path / "chats.jsonl"),
        data__format="messages",
        data__tokenizer=own,
        training__steps=1,
        checkpoint__enable=True,
        checkpoint__last_save_in_hf=True,
        model__flavour="debug",
        model__vocab_size=1024,
    )
    train(run)
    dist.destroy_process_group()
    first = tmp_path / "run/huggingface/step-1"
    _same_chats(first, own, CHATML)
    run.model = Model(initial_hf=str(first))
    cases = {
        "other": ({"tokenizer": other}, other, GLM),
        "template": ({"chat_template": str(tmp_path / "other_end.jinja")}, own, other_end),
    }
    for name, (changes, tokenizer, template) in cases.items():
        # transformers gives a qwen2 the splits of Qwen2's tokenizer, which are not those of ours.
        config = replace(run, data=replace(run.data, other_tokenizer=True, **changes))
        save(config, run.training.output_dir)
        assert export_hf([run.training.output_dir, str(tmp_path / f"out-{name}")]) == 0
        _same_chats(tmp_path / f"out-{name}", tokenizer, template)


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_from_hugging_face_and_back(texts, capsys):
    """Resumed without the first weights. The command exports what last_save_in_hf wrote."""
    save_model(texts / "in", "qwen2", tie_word_embeddings=False)
    # Copies, because the file goes.
    tensors = load_file(texts / "in/model.safetensors")
    first = {name: tensor.clone() for name, tensor in tensors.items()}
    settings = {
        "model__flavour": "debug",
        "model__initial_hf": str(texts / "in"),
        "training__dtype": "float32",
        "checkpoint__enable": True,
        "checkpoint__interval": 2,
        "checkpoint__last_save_in_hf": True,
        "optimizer__lr": 1e-3,
        "lr_scheduler__total_steps": 4,
    }
    train(tiny_config(texts, "run", **settings | {"training__steps": 2}))
    (texts / "in/model.safetensors").write_bytes(b"")  # must not be needed any more
    resumed = train(tiny_config(texts, "run", **settings | {"training__steps": 4}))
    assert resumed.progress.step == 4 and resumed.loader.state_dict()["sequence"] == 4
    run = texts / "run"
    written = run / "huggingface/step-4"
    out = load_file(written / "model.safetensors")
    for name, x in resumed.model.state_dict().items():
        assert torch.equal(x.full_tensor(), out[huggingface_name(name)])
    dist.destroy_process_group()
    before = _files(run)
    with room_for(100):
        error = error_of(capsys, export_hf, str(run), str(texts / "out"))
    assert f"{texts}/out.incomplete/model.safetensors cannot be written: " in error
    assert export_hf([str(run), f"{texts}/out/"]) == 0
    assert not list(texts.rglob("*.incomplete"))
    half = [str(texts / "half"), "--dtype", "bfloat16"]
    assert export_hf([str(run / "checkpoint/step-2"), *half]) == 0
    assert _files(run) == before
    for path, content in _files(texts / "out").items():
        assert (written / path.name).read_bytes() == content
    half = load_file(texts / "half/model.safetensors")
    assert half["model.norm.weight"].dtype == torch.bfloat16
    # Two steps of AdamW with a learning rate of 0.001.
    for name, tensor in half.items():
        assert 0 < (tensor.float() - first[name]).abs().max() < 0.02, name
    assert transformers.AutoModelForCausalLM.from_pretrained(written).config.vocab_size == VOCAB
    for source, message in ((texts, "holds no complete checkpoint"), (run, "already there")):
        assert message in error_of(capsys, export_hf, str(source), str(texts / "out"))
    # The file to correct is named, as the command takes no keys.
    moved = texts / "moved"
    moved.mkdir()
    (moved / "checkpoint").symlink_to(run / "checkpoint")
    config = (run / "config.toml").read_text()
    for key in (f'initial_hf = "{texts}/in"', 'tokenizer = "bytes"'):
        elsewhere = f'{key.partition(" ")[0]} = "{texts}/elsewhere"'
        assert config.count(key) == 1
        (moved / "config.toml").write_text(config.replace(key, elsewhere))
        error = error_of(capsys, export_hf, str(moved), str(texts / "again"))
        assert f"error: {moved}/config.toml: " in error and elsewhere in error
    # A head of its own is not dropped.
    set_values(texts / "in", tie_word_embeddings=True)
    error = error_of(capsys, export_hf, str(run / "checkpoint/step-2"), str(texts / "again"))
    assert "has lm_head.weight, but" in error and not (texts / "again").exists()
