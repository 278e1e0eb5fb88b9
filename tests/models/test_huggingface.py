"""Hugging Face checkpoints in and out: transformers is the reference for logits, for config.json and for the files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.data.chat_helpers import CHAT, CHATML, GLM, write_tokenizer
from tests.distributed import run_processes
from tests.models.huggingface_reference import (
    FAMILIES,
    LLAMA3,
    PLAIN,
    YARN,
    assert_same_logits,
    change_tensors,
    decoder,
    export,
    save_checkpoint,
    save_reference,
)
from tests.runs import tiny_config, train, write_texts
from titan_sparse.commands.export_hf import main as export_hf
from titan_sparse.config import Model, save
from titan_sparse.data.preparing import prepare
from titan_sparse.data.recipe import Recipe
from titan_sparse.models.flavours import resolve
from titan_sparse.models.huggingface import check_weights
from titan_sparse.models.huggingface_config import config_json, read_config

transformers = pytest.importorskip("transformers")

torch.set_num_threads(1)


# Logits


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "rope, kv_heads, tied",
    [(PLAIN, 1, True), (YARN, 2, False), (LLAMA3, 3, True)],
    ids=["default", "yarn", "llama3"],
)
def test_logits_are_those_of_transformers_in_and_out(tmp_path, name, rope, kv_heads, tied):
    theirs = save_reference(
        tmp_path / "in",
        name,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        rope_parameters=dict(rope),
    )
    ours = decoder(tmp_path / "in")
    assert_same_logits(ours, theirs)
    config = read_config(str(tmp_path / "in"))
    export(
        save_checkpoint(ours, tmp_path / "checkpoint/step-1"),
        str(tmp_path / "out"),
        config,
        torch.float32,
    )
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert type(again).__name__ == name and not any(report.values()), report
    assert (
        again.config.tie_word_embeddings == tied
        and again.config.rope_parameters["rope_theta"] == rope["rope_theta"]
    )
    assert_same_logits(ours, again)
    assert replace(read_config(str(tmp_path / "out")), max_positions=256) == config


def test_yarn_on_top_of_an_unscaled_checkpoint(tmp_path):
    save_reference(tmp_path / "in", max_position_embeddings=64)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "in",
        rope_parameters=PLAIN | yarn,
        max_position_embeddings=256,
        attn_implementation="eager",
    )
    ours = decoder(tmp_path / "in", rope_scaling="yarn", rope_factor=4.0)
    assert_same_logits(ours, theirs)
    config = resolve("debug", rope_scaling="yarn", rope_factor=4.0, initial_hf=str(tmp_path / "in"))
    values = config_json(config, "bfloat16", str(tmp_path / "in"))
    assert values["max_position_embeddings"] == 256 and values["torch_dtype"] == "bfloat16"
    assert values["rope_scaling"].items() >= yarn.items()
    assert (values["bos_token_id"], values["eos_token_id"]) == (3, 4)


# Files


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_trip_is_bit_equal(tmp_path, dtype):
    """In from several files, out to several; weights are float32 in between, as in training."""
    theirs = save_reference(tmp_path / "in", dtype=dtype)
    shutil.rmtree(tmp_path / "in")
    theirs.save_pretrained(tmp_path / "in", max_shard_size="50KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    (tmp_path / "in/tokenizer.json").write_text("{}")
    config = read_config(str(tmp_path / "in"))
    checkpoint = save_checkpoint(decoder(tmp_path / "in"), tmp_path / "checkpoint/step-1")
    for name, limit in (("one", 10**9), ("many", 60_000)):
        export(checkpoint, str(tmp_path / name), config, dtype, str(tmp_path / "in"), limit)
        files = sorted((tmp_path / name).glob("*.safetensors"))
        out = {key: x for file in files for key, x in load_file(file).items()}
        wanted = theirs.state_dict()
        assert out.keys() == wanted.keys()
        assert all(x.dtype == dtype and torch.equal(x, wanted[key]) for key, x in out.items())
        assert (len(files) == 1) == (name == "one") and (
            tmp_path / name / "tokenizer.json"
        ).is_file()
        assert all(file.stat().st_size < max(limit, 331 * 64 * 4 + 5000) for file in files)
        check_weights(str(tmp_path / name), config)
        assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).dtype == dtype
    again = decoder(tmp_path / "many").state_dict()
    assert all(
        torch.equal(x, again[key]) for key, x in decoder(tmp_path / "in").state_dict().items()
    )


def test_the_spare_head_of_a_tied_checkpoint_is_passed_over(tmp_path):
    theirs = save_reference(tmp_path, tie_word_embeddings=True)
    copy = theirs.model.embed_tokens.weight.detach().clone()
    change_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": copy}))
    assert read_config(str(tmp_path)).tied_embeddings
    assert_same_logits(decoder(tmp_path), theirs)


def test_export_overwrites_nothing(tmp_path):
    save_reference(tmp_path / "in")
    config = read_config(str(tmp_path / "in"))
    checkpoint = save_checkpoint(decoder(tmp_path / "in"), tmp_path / "checkpoint/step-3")
    with pytest.raises(ValueError, match="already there"):
        export(checkpoint, str(tmp_path / "in"), config, torch.float32)
    with pytest.raises(ValueError, match="among the run's checkpoints"):
        export(checkpoint, str(tmp_path / "checkpoint/step-3-hf"), config, torch.float32)


# Runs


def _run(folder: Path) -> None:
    settings = {
        "model__flavour": "debug",
        "model__initial_hf": str(folder / "in"),
        "training__dtype": "float32",
        "checkpoint__enable": True,
        "checkpoint__interval": 2,
        "checkpoint__last_save_in_hf": True,
        "optimizer__lr": 1e-3,
        "lr_scheduler__total_steps": 4,
    }
    train(tiny_config(folder, "run", **settings | {"training__steps": 2}))
    if dist.get_rank() == 0:
        (folder / "in/model.safetensors").write_bytes(b"")  # must not be needed any more
    dist.barrier()
    resumed = train(tiny_config(folder, "run", **settings | {"training__steps": 4}))
    assert resumed.progress.step == 4 and resumed.loader.state_dict()["sequence"] == 8
    trained = {name: x.full_tensor() for name, x in resumed.model.state_dict().items()}
    dist.barrier()
    out = load_file(folder / "run/huggingface/step-4/model.safetensors")
    assert all(torch.equal(x, out["model." + name]) for name, x in trained.items())


def _same_chats(found: Path, tokenizer: str, template: str) -> None:
    """transformers makes the same tokens of a chat by the export as by the run's own files."""
    wanted = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer)
    wanted.chat_template = template
    read = transformers.AutoTokenizer.from_pretrained(found)
    assert read.apply_chat_template(CHAT) == wanted.apply_chat_template(CHAT)
    assert read.chat_template == template and read.eos_token == wanted.eos_token


def test_an_export_has_the_tokenizer_and_template_of_its_run(tmp_path):
    """From random weights, from a model with other ones, and of prepared tokens."""
    own = write_tokenizer(tmp_path / "own", CHATML)
    other = write_tokenizer(tmp_path / "other", GLM)
    for folder, end in ((own, "<|endoftext|>"), (other, "<|end|>")):
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    other_end = CHATML.replace("<|im_end|>", "<|end|>")
    (tmp_path / "other_end.jinja").write_text(other_end)
    recipe = Recipe(
        str(tmp_path / "chats.jsonl"),
        tokenizer=own,
        row_format="messages",
        chat_template=str(tmp_path / "other_end.jinja"),
    )
    prepare(recipe, str(tmp_path / "prepared"), 1, lambda *_: None)
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
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(other) / name, first)
    _same_chats(first, other, GLM)
    run.model = Model(initial_hf=str(first))
    cases = {
        "other": ({"tokenizer": other}, other, GLM),
        "template": ({"chat_template": str(tmp_path / "other_end.jinja")}, own, other_end),
        "prepared": ({"source": str(tmp_path / "prepared"), "format": "text"}, own, other_end),
    }
    for name, (changes, tokenizer, template) in cases.items():
        config = replace(run, data=replace(run.data, **changes))
        save(config, run.training.output_dir)
        assert export_hf([run.training.output_dir, str(tmp_path / f"out-{name}")]) == 0
        _same_chats(tmp_path / f"out-{name}", tokenizer, template)


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_from_hugging_face_and_back(tmp_path, capsys):
    """Resumed, without the first weights. The command exports what last_save_in_hf wrote, and changes
    nothing of the run."""
    save_reference(tmp_path / "in", tie_word_embeddings=True)
    # Copies, because the file goes.
    tensors = load_file(tmp_path / "in/model.safetensors")
    first = {name: tensor.clone() for name, tensor in tensors.items()}
    write_texts(tmp_path / "texts")
    run_processes(2, _run, tmp_path)
    run = tmp_path / "run"
    before = _files(run)
    assert export_hf([str(run), str(tmp_path / "out")]) == 0
    half = [str(tmp_path / "half"), "--dtype", "bfloat16"]
    assert export_hf([str(run / "checkpoint/step-2"), *half]) == 0
    assert _files(run) == before
    written = run / "huggingface/step-4"
    for path, content in _files(tmp_path / "out").items():
        assert (written / path.name).read_bytes() == content
    half = load_file(tmp_path / "half/model.safetensors")
    assert half["model.norm.weight"].dtype == torch.bfloat16
    # Two steps of AdamW with a learning rate of 0.001.
    for name, tensor in half.items():
        assert 0 < (tensor.float() - first[name]).abs().max() < 0.02, name
    assert transformers.AutoModelForCausalLM.from_pretrained(written).config.vocab_size == 331
    for source, message in ((tmp_path, "holds no complete checkpoint"), (run, "already there")):
        assert export_hf([str(source), str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
