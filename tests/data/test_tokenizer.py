"""titan_sparse.data.tokenizer: bytes and tokenizer.json."""

import json

import numpy as np
import pytest

from tests.data.helpers import TEXTS, train_tokenizer
from titan_sparse.data.tokenizer import load_tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_byte_tokenizer_round_trip(text):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and len(ids) == len(text.encode())
    assert tokenizer.decode([*ids, tokenizer.end_of_document, tokenizer.padding]) == text
    assert (tokenizer.vocab_size, tokenizer.end_of_document, tokenizer.padding) == (258, 256, 257)


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_file_round_trip_ignores_stored_truncation_and_padding(tmp_path, text):
    train_tokenizer(tmp_path, ["</s>", "<pad>"])
    by_folder, by_file = (
        load_tokenizer(str(tmp_path)),
        load_tokenizer(str(tmp_path / "tokenizer.json")),
    )
    ids = by_folder.encode(text)
    assert ids.dtype == np.int32 and (ids == by_file.encode(text)).all()
    assert len(ids) == 0 or ids.max() < by_folder.vocab_size
    assert by_folder.decode(ids) == text
    assert by_folder.decode([*ids, by_folder.end_of_document]) == text


@pytest.mark.parametrize(
    ("special", "config", "end", "padding"),
    [
        (["<eos>", "<|endoftext|>"], None, "<|endoftext|>", "<|endoftext|>"),
        (["<eos>", "<pad>"], None, "<eos>", "<pad>"),
        (["<eos>", "<stop>"], {"eos_token": "<stop>"}, "<stop>", "<stop>"),
        (
            ["<eos>", "<stop>"],
            {"eos_token": {"content": "<stop>"}, "pad_token": "<eos>"},
            "<stop>",
            "<eos>",
        ),
        (["</s>"], {"eos_token": None}, "</s>", "</s>"),
    ],
)
def test_special_tokens_of_a_tokenizer_file(tmp_path, special, config, end, padding):
    trained = train_tokenizer(tmp_path, special)
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.end_of_document == trained.token_to_id(end)
    assert tokenizer.padding == trained.token_to_id(padding)
    assert tokenizer.vocab_size == trained.get_vocab_size()


def test_tokenizer_errors_name_the_key(tmp_path):
    with pytest.raises(ValueError, match="data.tokenizer.*no such file"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="data.tokenizer.*no readable tokenizer.json"):
        load_tokenizer(str(tmp_path))
    train_tokenizer(tmp_path, ["<other>"])
    with pytest.raises(ValueError, match="data.tokenizer.*no end-of-document token"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<absent>"}')
    with pytest.raises(ValueError, match="data.tokenizer.*<absent>"):
        load_tokenizer(str(tmp_path))
