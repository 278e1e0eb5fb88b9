"""titan_sparse.data.whole: chats are packed whole, from rows and from shards,
and resumed exactly."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.data import helpers
from tests.data.helpers import (
    CALL,
    CHAT,
    CHATML,
    check_resume,
    global_stream,
    trl_template,
    write_rows,
    write_tokenizer,
)
from titan_sparse.commands.prepare_data import main
from titan_sparse.config import Config, Data, save
from titan_sparse.data import stream
from titan_sparse.data.chat_template import exported_files, load_template
from titan_sparse.data.documents import open_documents
from titan_sparse.data.loader import build_loader
from titan_sparse.data.preparing import prepare
from titan_sparse.data.recipe import Recipe
from titan_sparse.data.shards import TokenShards
from titan_sparse.data.stream import first_fit
from titan_sparse.data.tokenizer import load_tokenizer
from titan_sparse.training import validation
from titan_sparse.training.load import load_for_evaluation

SEQ_LEN = 200
ANSWERS = [3, 60, 10, 400, 25, 90, 5, 130, 40, 2, 75, 33, 8, 110, 20]
"""Letters of the answers; that of 400 is longer than a sequence."""
loaders = partial(helpers.loaders, seq_len=SEQ_LEN)


def write_chats(path: Path) -> str:
    """A chat for each of ANSWERS; each third one teaches nothing."""
    rows = []
    for number, size in enumerate(ANSWERS):
        answer = {"role": "assistant", "content": "aa" * size, "train": number % 3 > 0}
        rows.append({"messages": [{"role": "user", "content": f"{number}"}, answer]})
    write_rows(path, rows)
    return str(path)


@pytest.fixture
def chats_of(tmp_path) -> Callable[..., Data]:
    """[data] of the chats, with other options."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer", CHATML)
    source = write_chats(tmp_path / "chats.jsonl")
    return partial(Data, source=source, format="messages", tokenizer=tokenizer)


def test_first_fit_by_hand():
    assert first_fit([4, 9, 3, 2, 6, 1], 10) == [[0, 4], [1, 5], [2, 3]]
    assert first_fit([], 10) == [] and first_fit([10, 10], 10) == [[0], [1]]


@pytest.mark.parametrize(("shuffle", "window"), [(True, 32), (True, 2), (False, 2)])
def test_an_epoch_holds_each_chat_once_and_whole(chats_of, shuffle, window, caplog, monkeypatch):
    monkeypatch.setattr(stream, "WINDOW", window)
    data = chats_of(shuffle=shuffle)
    with caplog.at_level(logging.INFO, logger="titan_sparse"):
        (loader,) = loaders(data)
    documents = loader.streams[0].documents
    cursor = loader.streams[0].cursor
    fits = [i for i in range(len(ANSWERS)) if documents.length(i) <= SEQ_LEN]
    assert 0 < len(ANSWERS) - len(fits) < 4
    told = f"data: {len(ANSWERS) - len(fits)} of the first 15 samples are longer than a sequence and dropped"
    assert any(line.startswith(told) for line in caplog.messages) == (window == 32)

    for epoch in (1, 2):
        seen = []
        while cursor.epoch < epoch:
            batch = next(loader)
            place = 0
            for length in batch.lengths[0]:
                tokens = batch.tokens[0, place : place + length].tolist()
                labels = batch.labels[0, place : place + length].tolist()
                matches = [i for i in fits if documents[i].tokens.tolist() == tokens]
                seen += matches
                learned = documents[matches[0]].learned
                next_tokens = np.append(np.where(learned, tokens, -100)[1:], -100)
                assert labels == next_tokens.tolist()
                place += length
            assert (batch.labels[0, place:] == -100).all()
        assert sorted(seen) == fits
        assert cursor.documents_seen == epoch * len(fits)


@pytest.mark.parametrize("consumed", [1, 7])
def test_resume_equals_uninterrupted_on_any_ranks(chats_of, consumed, monkeypatch):
    """Over windows of two sequences, so that places are in the middle and at
    the ends of several."""
    monkeypatch.setattr(stream, "WINDOW", 2)
    data = chats_of()
    check_resume(data, consumed, SEQ_LEN)


def test_the_mask_belongs_to_the_stream(tmp_path, chats_of):
    template = tmp_path / "other.jinja"
    template.write_text(CHATML + "{# another #}")
    (first,) = loaders(chats_of())
    for change, named in (
        ({"loss_on": "all"}, "data.loss_on was assistant and is all"),
        ({"chat_template": str(template)}, "the chat template's digest was"),
    ):
        (second,) = loaders(chats_of(**change))
        with pytest.raises(ValueError, match=named):
            second.load_state_dict(first.state_dict())


def prepare_chats(data: Data, out: Path, **options) -> str:
    recipe = Recipe(
        data.source, tokenizer=data.tokenizer, format="messages", shard_rows=4, **options
    )
    prepare(recipe, str(out))
    return str(out)


def test_shards_have_the_masks_of_the_rows(tmp_path, chats_of, caplog):
    data = chats_of()
    folder = prepare_chats(data, tmp_path / "out")
    tokenizer = load_tokenizer(folder)
    rows = open_documents(data, tokenizer)
    shards = open_documents(Data(source=folder, tokenizer=folder), tokenizer)
    assert len(rows) == len(shards) == len(ANSWERS)
    for number in range(len(rows)):
        assert shards[number].tokens.tolist() == rows[number].tokens.tolist()
        assert shards[number].learned.tolist() == rows[number].learned.tolist()

    with caplog.at_level(logging.INFO, logger="titan_sparse"):
        from_shards = loaders(Data(source=folder, tokenizer=folder), 2)
    assert global_stream(from_shards, 15) == global_stream(loaders(data, 2), 15)
    kept = [row.learned for row in rows if len(row.tokens) <= SEQ_LEN]
    share = 100 * np.concatenate(kept).mean()
    assert "of the first 15 samples are longer than a sequence and dropped" in caplog.text
    assert f"{share:.1f}% of the tokens are learned" in caplog.text


def test_the_command_prepares_chats(tmp_path, chats_of, capsys):
    """The same files as prepare(); other options begin another folder."""
    data = chats_of()
    one = prepare_chats(data, tmp_path / "one")
    words = [data.source, str(tmp_path / "two"), "--tokenizer", data.tokenizer]
    words += ["--format", "messages", "--shard-rows", "4", "--processes", "1"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "a sequence keeps whole: 32K 100.0%, 64K 100.0%, 128K 100.0%; " in printed
    for path in Path(one).iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    assert main([*words, "--loss-on", "all"]) == 2
    assert "loss_on was assistant and is all" in capsys.readouterr().err
    words[1] = str(tmp_path / "text")
    assert main([*words[:4], "--loss-on", "all", "--processes", "1"]) == 2
    assert "data.loss_on" in capsys.readouterr().err


def test_prepared_chats_keep_their_template_and_what_is_learned(tmp_path, chats_of):
    """A run that leaves data.tokenizer to its model still asks, validates, and exports as it
    trained. The template beside prepared texts is not that of chats, nor is that of prepared chats
    the one of raw chats beside them."""
    other = tmp_path / "other.jinja"
    other.write_text("{{ shout }}" + CHATML.replace("<|im_start|>", "<|start|>"))
    variables = '{"shout": "!"}'
    data = chats_of()
    options = {"chat_template": str(other), "chat_template_kwargs": variables, "loss_on": "all"}
    source = prepare_chats(data, tmp_path / "prepared", **options)
    prepared = Data(source=source, tokenizer=data.tokenizer)
    model, tokenizer = data.tokenizer, load_tokenizer(data.tokenizer)
    asked, _ = load_template(prepared, model, tokenizer).render(CHAT[:2], [])
    assert asked.startswith("!<|start|>")
    # What is written down comes first.
    own = replace(prepared, chat_template=model)
    asked, _ = load_template(own, model, tokenizer).render(CHAT[:2], [])
    assert asked.startswith("<|im_start|>")
    exported = exported_files(prepared, model, tokenizer)
    assert exported["chat_template.jinja"] == other.read_bytes()

    config = Config(data=replace(prepared, format="messages"))
    config.validation.source = data.source
    encoded = open_documents(validation._data(config), tokenizer)[1]
    assert tokenizer.spell(encoded.tokens).startswith("!<|start|>")
    shards = TokenShards(source, tokenizer)
    assert encoded.learned.tolist() == shards[1].learned.tolist()
    config.data.loss_on = "last_assistant"
    last = open_documents(validation._data(config), tokenizer)[1].learned
    assert 0 < last.sum() < encoded.learned.sum()
    config.data.loss_on = "assistant"

    save(config, tmp_path / "run")
    words = ["--config", f"{tmp_path}/run/config.toml", "--data.source", data.source]
    evaluated = load_for_evaluation(words, None, dense=False)
    again = open_documents(evaluated.data, tokenizer)[1]
    assert encoded.tokens.tolist() == again.tokens.tolist()
    assert encoded.learned.tolist() == again.learned.tolist()
    words += ["--data.loss_on", "assistant"]
    assert load_for_evaluation(words, None, dense=False).data.loss_on == "assistant"

    config.data.source = f"{source}:1, {data.source}:1"
    (_, raw) = build_loader(config.data, SEQ_LEN, 1, 0, 0, 1).streams
    beside = open_documents(validation._data(config), tokenizer)[1]
    assert beside.tokens.tolist() == raw.documents[1].tokens.tolist() != encoded.tokens.tolist()
    assert beside.learned.tolist() == raw.documents[1].learned.tolist()
    save(config, tmp_path / "run")
    evaluated = load_for_evaluation(words[:4], None, dense=False)
    assert evaluated.data == replace(validation._data(config), sequences="fixed")

    text = tmp_path / "texts.jsonl"
    write_rows(text, [{"text": "a text"}])
    base = write_tokenizer(tmp_path / "base", trl_template("gemma3"))
    prepare(Recipe(str(text), tokenizer=base), str(tmp_path / "texts"))
    mixture = replace(data, source=f"{tmp_path}/texts:1, {data.source}:1", format="text, messages")
    exported = exported_files(mixture, model, tokenizer)
    assert exported["chat_template.jinja"].decode() == CHATML


def test_chats_that_the_template_refuses_are_skipped_and_counted(tmp_path, capsys, caplog):
    """Gemma's template refuses tools, and system messages in the middle."""
    folder = write_tokenizer(tmp_path / "gemma", trl_template("gemma3"))
    user, answer = CHAT[1], {"role": "assistant", "content": "\nyes"}
    good, doubled = [user, answer], [user, user, answer]
    called = [user, {**answer, "tool_calls": [CALL]}]
    rows = [good, doubled, called, good, doubled]
    path = tmp_path / "chats.jsonl"
    write_rows(path, [{"messages": chat} for chat in rows])
    words = [str(path), str(tmp_path / "out"), "--tokenizer", folder, "--format", "messages"]
    words += ["--shard-rows", "2", "--processes", "1"]
    assert main(words) == 2
    assert f"{path}, row 2: the chat template cannot render it: " in capsys.readouterr().err
    assert main([*words[:1], str(tmp_path / "skipped"), *words[2:], "--bad-rows", "skip"]) == 0
    printed = capsys.readouterr().out
    assert "skipped 2 chats: the chat template cannot render it: Conversation roles" in printed
    assert "skipped 1 chats: the chat template leaves out the tool calls of messages;" in printed
    assert "left out: 0 empty documents, 3 bad rows, 0 shorter" in printed

    data = Data(source=str(path), format="messages", tokenizer=folder, bad_rows="skip")
    prepared = TokenShards(str(tmp_path / "skipped"), load_tokenizer(folder))
    documents = open_documents(data, load_tokenizer(folder))
    kept = [index for index in range(5) if documents.length(index) > 1]
    assert kept == [0, 3] and len(prepared) == 2
    assert prepared[1].tokens.tolist() == documents[3].tokens.tolist()
    assert caplog.text.count("chats are skipped: ") == 2


def test_a_damaged_mask_is_refused(tmp_path, chats_of):
    folder = Path(prepare_chats(chats_of(), tmp_path / "out"))
    tokenizer = load_tokenizer(str(folder))
    mask = folder / "shard_00001.mask"
    mask.write_bytes(mask.read_bytes()[:-1])
    with pytest.raises(ValueError, match="shard_00001.mask has"):
        TokenShards(str(folder), tokenizer)
    mask.unlink()
    with pytest.raises(ValueError, match="shard_00001.mask has 0 bytes"):
        TokenShards(str(folder), tokenizer)


def test_a_file_of_a_run_may_say_how_its_prepared_tokens_were_made(tmp_path, chats_of):
    """As train_configs/sft_qwen3_8b_128k.toml, which docs/finetune.md starts
    with a prepared folder."""
    data = chats_of(loss_on="last_assistant")
    folder = prepare_chats(data, tmp_path / "out", loss_on="last_assistant")
    bare = Data(source=folder, tokenizer=folder)
    said = replace(bare, format="messages", loss_on="last_assistant")
    assert global_stream(loaders(said), 4) == global_stream(loaders(bare), 4)
    for options, words in (
        ({"format": "prompt_completion"}, 'format = "prompt_completion" .* made with "messages"; '),
        ({"loss_on": "all"}, 'loss_on = "all" .* made with "last_assistant"; leave it out'),
        ({"messages_field": "talk"}, 'messages_field = "talk" .* made with "messages"; leave it'),
    ):
        with pytest.raises(ValueError, match=words):
            loaders(replace(said, **options))


def test_what_would_cut_or_ignore_is_refused(tmp_path, chats_of):
    data = chats_of(sequences="fixed")
    with pytest.raises(ValueError, match='data.sequences = "fixed" would cut answers'):
        loaders(data)
    folder = prepare_chats(data, tmp_path / "out")
    with pytest.raises(ValueError, match='data.sequences = "fixed_and_rest" would cut answers'):
        loaders(Data(source=folder, tokenizer=folder, sequences="fixed_and_rest"))
    with pytest.raises(ValueError, match='data.loss_on = "all" would be ignored with the prep'):
        loaders(Data(source=folder, tokenizer=folder, loss_on="all"))
    with pytest.raises(ValueError, match="no sample of data.source has at most .*seq_len = 5"):
        build_loader(chats_of(), 5, 1, 3, 0, 1)
