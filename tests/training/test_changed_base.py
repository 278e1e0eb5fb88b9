"""Runs that change their base model: longer sequences, another theta, more tokens, untrained
tokens. transformers is the reference, and reads what is exported."""

import json
import logging
import re
import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.data.helpers import CHATML, write_tokenizer
from tests.distributed import run_processes
from tests.models.helpers import LLAMA3, ORIGINAL, change_tensors, set_values
from tests.models.transformers_models import read_model, save_model
from tests.refusals import refused
from tests.training import reference_loop as by_hand
from tests.training.wired_run import (
    ALIKE,
    SEQ_LEN,
    assert_alike,
    lines_of,
    run,
    write_model,
    write_shard,
)
from titan_sparse.commands.export_hf import main as export_hf
from titan_sparse.config import ConfigError
from titan_sparse.models.flavours import resolve
from titan_sparse.models.huggingface import exported_config, untrained_tokens
from titan_sparse.models.huggingface_files import SINGLE_FILE

STEPS = 3
LR = 0.1
PUBLISHED_LENGTH = 32
THETA = 5e5
SETTINGS: dict[str, object] = {
    "training.steps": STEPS,
    "training.max_norm": 0.0,
    "optimizer.name": "SGD",
    "optimizer.lr": LR,
    "optimizer.weight_decay": 0.0,
    "lr_scheduler.warmup_steps": 0,
    "lr_scheduler.min_lr_factor": 1.0,
    "checkpoint.interval": 1,
}
WIDER = {"model.vocab_size": 326}
MODELS = ("Qwen3", "Llama", "mistral", "smollm3", "gemma3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("changed")
    write_shard(folder)
    for name in MODELS:
        write_model(folder, name) if name[0].isupper() else save_model(folder / name, name)
        set_values(folder / name, max_position_embeddings=PUBLISHED_LENGTH)
    return folder


def train(folder: Path, output: str, model: str, settings: dict[str, object]) -> Path:
    run(folder, output, SETTINGS | {"model.initial_hf": folder / model} | settings)
    return folder / output / f"huggingface/step-{settings.get('training.steps', STEPS)}"


def losses_by_hand(folder: Path, model: nn.Module) -> list[float]:
    steps = by_hand.steps_of(folder / "shards", STEPS, SEQ_LEN)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return [line.loss for line in by_hand.train(model, optimizer, steps, [LR] * STEPS, 0.0, 0.0)]


@torch.no_grad()
def assert_same_logits(found: nn.Module, expected: nn.Module) -> None:
    tokens = torch.arange(3, 3 + SEQ_LEN)[None]
    wanted = expected(tokens).logits
    torch.testing.assert_close(found(tokens).logits, wanted, rtol=0, atol=1e-4 * wanted.std())


def with_theta(folder: Path) -> nn.Module:
    config = transformers.AutoConfig.from_pretrained(folder)
    config.rope_parameters["rope_theta"] = THETA
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    )


@pytest.mark.parametrize("name", ["Qwen3", "mistral", "smollm3"])
def test_another_theta_on_longer_sequences(folder, name):
    """Resumed, and exported. Of our own decoder, and of transformers' code."""
    model = with_theta(folder / name)
    wanted = losses_by_hand(folder, model)
    theta = {"model.rope_theta": THETA, "lr_scheduler.total_steps": STEPS}
    train(folder, f"{name}-theta", name, theta | {"training.steps": 1})
    out = train(folder, f"{name}-theta", name, theta)
    found = [line["loss"] for line in lines_of(folder / f"{name}-theta")]
    assert found == pytest.approx(wanted, rel=ALIKE)
    # It matters.
    unchanged = losses_by_hand(folder, read_model(folder / name))
    assert unchanged[0] != pytest.approx(wanted[0], rel=1e-4)
    exported = read_model(out)
    assert exported.config.rope_parameters["rope_theta"] == THETA
    assert exported.config.max_position_embeddings == SEQ_LEN
    assert_same_logits(exported, model)
    with pytest.raises(ValueError, match=r"rope.theta .* was 500000.0 and is .*rope_theta = 5"):
        train(folder, f"{name}-theta", name, {"training.steps": STEPS + 1})


def test_theta_is_written_where_a_config_json_has_it(tmp_path):
    """transformers 4 has it at the top level. Its name of the dtype does not stay either."""
    save_model(tmp_path, "mistral")
    table = {"rope_type": "default", "rope_theta": 1e4}
    forms = (
        ({"rope_parameters": table}, {"rope_parameters": table | {"rope_theta": THETA}}),
        ({"rope_theta": 1e4, "rope_parameters": None}, {"rope_theta": THETA}),
        ({"rope_parameters": None}, {"rope_theta": THETA}),
        (
            {"rope_theta": 1e4, "rope_parameters": None, "rope_scaling": table},
            {"rope_theta": THETA, "rope_scaling": table | {"rope_theta": THETA}},
        ),
    )
    given = json.loads((tmp_path / "config.json").read_text())
    for before, after in forms:
        values = given | before | {"torch_dtype": "bfloat16"}
        values = {key: value for key, value in values.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(values))
        config = resolve("debug", initial_hf=str(tmp_path), rope_theta=THETA)
        values.pop("torch_dtype")
        assert exported_config(config, "float16", "") == values | after | {"dtype": "float16"}


@pytest.mark.parametrize("name, changes", [("gemma3", {}), ("smollm3", {"no_rope_layers": [0, 0]})])
def test_a_theta_that_layers_do_not_share_is_refused(tmp_path, name, changes):
    save_model(tmp_path, name, **changes)
    with pytest.raises(ValueError, match=r"rope_theta = 500000, but .* do not share one; leave it"):
        resolve("debug", initial_hf=str(tmp_path), rope_theta=THETA)


@pytest.mark.parametrize("name", ["mistral", "Qwen3"])
def test_a_longer_length_does_not_change_a_scaled_model(folder, tmp_path, name):
    """Where a config.json leaves the original length out, transformers takes it from the length."""
    table = {key: value for key, value in LLAMA3.items() if key != ORIGINAL}
    shutil.copytree(folder / name, tmp_path / name)
    set_values(tmp_path / name, rope_parameters=table)
    (tmp_path / "shards").symlink_to(folder / "shards")
    out = train(tmp_path, "scaled", name, {"optimizer.lr": 1e-30, "training.steps": 1})
    exported, base = read_model(out), read_model(tmp_path / name)
    # On our side, the export says what scaling reaches.
    assert exported.config.max_position_embeddings >= SEQ_LEN
    assert_same_logits(exported, base)


def test_yarn_says_the_length_that_its_factor_reaches(folder, caplog):
    yarn = {"model.rope_scaling": "yarn", "training.steps": 1}
    out = train(folder, "yarn", "Qwen3", yarn | {"model.rope_factor": 2.0})
    assert read_model(out).config.max_position_embeddings == 2 * PUBLISHED_LENGTH
    assert "training.seq_len = 64 is above" not in caplog.text
    out = train(folder, "short-yarn", "Qwen3", yarn | {"model.rope_factor": 1.5})
    assert read_model(out).config.max_position_embeddings == 48
    said = "training.seq_len = 64 is above model.rope_factor * the original length = 48"
    assert said in caplog.text


def test_the_tokenizer_accepts_the_length_too(folder):
    shutil.copytree(folder / "Llama", folder / "with-tokenizer")
    write_tokenizer(folder / "with-tokenizer", CHATML)
    path = folder / "with-tokenizer/tokenizer_config.json"
    given = path.read_text()
    settings = {
        "data.source": folder / "texts.jsonl",
        "data.tokenizer": "",
        "model.vocab_size": 400,
        "training.steps": 1,
    }
    for length, wanted in ((PUBLISHED_LENGTH, SEQ_LEN), (1000, 1000), (None, None)):
        values = json.loads(given) | ({"model_max_length": length} if length else {})
        path.write_text(json.dumps(values))
        out = train(folder, f"length-{length}", "with-tokenizer", settings)
        written = json.loads((out / "tokenizer_config.json").read_text())
        assert written.get("model_max_length") == wanted


@pytest.mark.parametrize("name", ["Qwen3", "Llama", "gemma3"])
def test_more_tokens_begin_as_the_mean(folder, name):
    """As transformers resizes, but without the noise that it adds."""
    nothing = {"optimizer.lr": 1e-30, "training.steps": 1}
    out = train(folder, f"{name}-wider", name, WIDER | nothing)
    found, base = read_model(out), read_model(folder / name)
    assert found.config.vocab_size == WIDER["model.vocab_size"]
    old = {key: tensor.clone() for key, tensor in base.state_dict().items()}
    base.resize_token_embeddings(WIDER["model.vocab_size"], mean_resizing=True)
    tables = 0
    for key, tensor in base.state_dict().items():
        assert found.state_dict()[key].shape == tensor.shape
        torch.testing.assert_close(found.state_dict()[key], tensor, rtol=0, atol=1e-4)
        if len(tensor) == WIDER["model.vocab_size"]:
            tables += 1
            mean = old[key].double().mean(0).float().expand(6, -1)
            torch.testing.assert_close(found.state_dict()[key][-6:], mean, rtol=0, atol=1e-7)
    assert tables == 2
    # Further steps, of which the first is that of the model with the mean.
    train(folder, f"{name}-wider-trained", name, WIDER)
    wanted = losses_by_hand(folder, found)
    losses = [line["loss"] for line in lines_of(folder / f"{name}-wider-trained")]
    assert losses == pytest.approx(wanted, rel=ALIKE)


def _train_wider(folder: Path) -> None:
    for name in ("Qwen3", "Llama"):
        train(folder, f"{name}-two", name, WIDER)


def test_more_tokens_on_two_ranks(folder):
    run_processes(2, _train_wider, folder)
    for name in ("Qwen3", "Llama"):
        two_sequences = WIDER | {"training.gradient_accumulation_steps": 2}
        out = train(folder, f"{name}-one", name, two_sequences)
        assert_alike(folder, f"{name}-two", f"{name}-one")
        found = load_file(folder / f"{name}-two/huggingface/step-{STEPS}" / SINGLE_FILE)
        for key, tensor in load_file(out / SINGLE_FILE).items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-6)


def test_the_advised_number_of_tokens_is_accepted(folder, tmp_path):
    """Adapters advise the tokens too."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer", CHATML)
    (folder / "chats.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "hello"}] * 2}) + "\n"
    )
    chats = {"data.source": folder / "texts.jsonl", "data.tokenizer": tokenizer}
    advised = {}
    for key, pattern in (
        ("model.vocab_size", r"write (\d+) or more"),
        ("lora.trainable_tokens", 'tokens = "(.*)"'),
    ):
        with refused(pattern) as caught:
            train(folder, "advised", "Llama", chats | {"lora.rank": 2} | advised)
        advised[key] = re.search(pattern, str(caught.value))[1]
    train(folder, "advised", "Llama", chats | {"lora.rank": 2} | advised)
    full = {"model.vocab_size": advised["model.vocab_size"]}
    train(folder, "advised-full", "Llama", chats | full)


def test_adapters_say_what_their_base_needs(folder, caplog):
    """With the exported config.json, and with more rows, PEFT's model is that of the run."""
    settings = {
        "model.rope_theta": THETA,
        "lora.rank": 4,
        "lora.trainable_tokens": "a,b",
        "model.vocab_size": 322,
    }
    out = train(folder, "adapters", "Llama", settings)
    assert "resize_token_embeddings(322)" in caplog.text
    assert f'config=AutoConfig.from_pretrained("{out}")' in caplog.text
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "Llama",
        config=transformers.AutoConfig.from_pretrained(out),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    base.resize_token_embeddings(322)
    model = peft.PeftModel.from_pretrained(base, out)
    assert export_hf([str(folder / "adapters"), str(folder / "whole"), "--merge"]) == 0
    assert_same_logits(read_model(folder / "whole"), model)
    # Nothing is said where nothing was changed.
    caplog.clear()
    set_values(folder / "Llama", max_position_embeddings=256)
    out = train(folder, "plain-adapters", "Llama", {"lora.rank": 4, "training.steps": 1})
    set_values(folder / "Llama", max_position_embeddings=PUBLISHED_LENGTH)
    assert not (out / "config.json").exists()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING and "base" in r.message]


# Tokens that were never trained

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the answer"}]
ENDS = {"<|im_start|>", "<|im_end|>"}
ZERO = torch.zeros_like
CHAT_SETTINGS: dict[str, object] = {
    "data.format": "messages",
    "training.steps": 40,
    "training.seq_len": 128,
    "optimizer.lr": 0.02,
    "lr_scheduler.warmup_steps": 0,
    "lora.rank": 4,
    "checkpoint.last_save_in_hf": False,
    "guard.enable": False,
}


def alike(rows: Tensor) -> Tensor:
    return rows[:1].expand_as(rows)


def read_tokenizer(base: Path) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast.from_pretrained(base)


@pytest.fixture(params=[(False, ZERO), (True, alike)], ids=["untied, zero", "tied, alike"])
def chats(request, tmp_path) -> Path:
    tied, spoil = request.param
    base = tmp_path / "base"
    write_tokenizer(base, CHATML)
    # transformers does not read a token that is described by a table.
    (base / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    tokenizer = read_tokenizer(base)
    # More rows than tokens, as most models have.
    save_model(base, "llama", vocab_size=len(tokenizer) + 30, tie_word_embeddings=tied)
    ids = tokenizer.convert_tokens_to_ids([*sorted(ENDS), "<|observation|>"])

    def change(tensors: dict[str, Tensor]) -> None:
        for name in {"model.embed_tokens.weight", "lm_head.weight"} & tensors.keys():
            tensors[name][ids] = spoil(tensors[name][ids])

    change_tensors(base, change)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    return tmp_path


def train_on_chats(folder: Path, output: str, **settings: object) -> None:
    paths = {
        "data.source": folder / "chats.jsonl",
        "data.tokenizer": folder / "base",
        "model.initial_hf": folder / "base",
    }
    named = {key.replace("__", "."): value for key, value in settings.items()}
    run(folder, output, CHAT_SETTINGS | paths | named)


@torch.no_grad()
def probability_of_the_end(folder: Path, output: str) -> float:
    out = folder / f"{output}-whole"
    words = ["--merge"] if output != "full" else []
    assert export_hf([str(folder / output), str(out), *words]) == 0
    tokenizer = read_tokenizer(folder / "base")
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    place = (ids[0] == end).nonzero()[-1].item()
    logits = read_model(out)(ids[:, :place]).logits[0, -1]
    return logits.softmax(-1)[end].item()


def test_the_log_names_tokens_that_were_never_trained(chats, caplog):
    with caplog.at_level(logging.WARNING):
        train_on_chats(chats, "adapters")
    [line] = [r.getMessage() for r in caplog.records if "never trained" in r.getMessage()]
    advice = re.search('write lora.trainable_tokens = "(.*)"$', line)[1]
    # <|observation|> is as bad, but no chat has it.
    assert set(advice.split(",")) == ENDS
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        train_on_chats(chats, "advised", lora__trainable_tokens=advice)
        train_on_chats(chats, "full", lora__rank=0)
    assert "never trained" not in caplog.text
    ends = {name: probability_of_the_end(chats, name) for name in ("adapters", "advised", "full")}
    assert ends["full"] > 0.98 and ends["advised"] > 0.95
    assert ends["adapters"] < 0.9


@pytest.mark.parametrize(
    "names, message",
    [
        ("<|im_end|>,<|nothing|>", '"<|nothing|>" is not a token of data.tokenizer'),
        ("<|im_end|>, <|im_end|>", 'names "<|im_end|>" twice; leave one out'),
    ],
)
@pytest.mark.parametrize("chats", [(True, ZERO)], indirect=True, ids=["tied"])
def test_names_that_are_not_tokens_are_refused(chats, names, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        train_on_chats(chats, "refused", lora__trainable_tokens=names)
    with pytest.raises(ConfigError, match="would be ignored with lora.rank = 0"):
        train_on_chats(chats, "refused", lora__trainable_tokens=names, lora__rank=0)


@pytest.mark.parametrize("chats", [(False, ZERO)], indirect=True, ids=["untied"])
def test_rows_that_look_untrained(chats):
    """Trained rows do not. Rows of a padded table do, and new ones of
    transformers, nearly alike."""
    base = str(chats / "base")
    names = [*sorted(ENDS), "<|user|>", "<|system|>"]
    tokenizer = read_tokenizer(chats / "base")
    ids = tokenizer.convert_tokens_to_ids(names)
    added = set(tokenizer.added_tokens_decoder)
    count = len(tokenizer)
    assert untrained_tokens(base, ids, added, count) == sorted(ids[:2])

    def like_padding(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"][[ids[2], count + 4]] = 0.3

    change_tensors(Path(base), like_padding)
    assert untrained_tokens(base, ids, added, count) == sorted(ids[:3])
    model = read_model(chats / "base")
    model.resize_token_embeddings(model.config.vocab_size + 2)
    model.save_pretrained(chats / "base")
    new = [model.config.vocab_size - 2, model.config.vocab_size - 1]
    assert untrained_tokens(base, new, added, model.config.vocab_size) == new
