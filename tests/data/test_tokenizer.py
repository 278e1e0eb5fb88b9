"""titan_sparse.data.tokenizer: bytes and tokenizer.json."""

import hashlib
import json

import numpy as np
import pytest
import transformers

from tests.data.helpers import CHATML, TEXTS, train_tokenizer, write_tokenizer
from tests.refusals import refused
from titan_sparse.config import Config, Data, Model
from titan_sparse.data.tokenizer import PROBE, Tokenizer, load_tokenizer, open_tokenizer


def test_byte_tokenizer_round_trip():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_of_document, tokenizer.padding) == (258, 256, 257)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and bytes(ids.tolist()) == text.encode()
        assert tokenizer.decode([*ids, 256, 257]) == text
    assert tokenizer.decode(tokenizer.encode("\ud800")) == "?"


def test_tokenizer_file_round_trip_ignores_stored_truncation_and_padding(tmp_path):
    train_tokenizer(tmp_path, ["</s>", "<pad>"])
    by_folder = load_tokenizer(str(tmp_path))
    by_file = load_tokenizer(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        ids = by_folder.encode(text)
        assert ids.dtype == np.int32 and (ids == by_file.encode(text)).all()
        assert max(ids, default=0) < by_folder.vocab_size
        assert by_folder.decode([*ids, by_folder.end_of_document]) == text


@pytest.mark.parametrize(
    ("special", "config", "end", "padding"),
    [
        (["<eos>", "<|endoftext|>"], None, "<|endoftext|>", "<|endoftext|>"),
        (
            ["<eos>", "<stop>"],
            {"eos_token": {"__type": "AddedToken", "content": "<stop>"}, "pad_token": "<eos>"},
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


@pytest.mark.parametrize(
    ("special", "config", "named"),
    [
        (["<other>"], None, "no end-of-document token"),
        (["</s>"], '{"eos_token": {"id": 0}}', "transformers can read .* eos_token has to be"),
        (["</s>"], '{"pad_token": true}', "transformers can read .* pad_token has to be"),
        (["</s>"], '{"eos', "transformers can read .* Unterminated string"),
        (["</s>"], '{"auto_map": {"AutoTokenizer": ["x.Y", null]}}', "trust_remote_code"),
        (None, None, "transformers can read"),
    ],
)
def test_an_odd_tokenizer_is_refused(tmp_path, special, config, named):
    with pytest.raises(ValueError, match="data.tokenizer.*this file does not exist"):
        load_tokenizer(str(tmp_path))
    if special:
        train_tokenizer(tmp_path, special)
    else:
        (tmp_path / "tokenizer.json").write_text("{}")
    if config:
        (tmp_path / "tokenizer_config.json").write_text(config)
    with refused(f"data.tokenizer.*{named}"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("split", [False, True])
def test_special_tokens_in_a_text_are_those_of_transformers(tmp_path, split):
    train_tokenizer(tmp_path, ["</s>", "<|im_end|>"])
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), split_special_tokens=split
    )
    text = "one<|im_end|> two</s>"
    ours = load_tokenizer(str(tmp_path), split_special_tokens=split)
    ids = ours.encode(text).tolist()
    assert ids == theirs(text, add_special_tokens=False)["input_ids"]
    assert (ours.end_of_document in ids) is not split
    assert "".join(theirs.convert_ids_to_tokens(ids)).replace("\u0120", " ") == text


def test_special_tokens_of_bytes_cannot_be_split():
    with pytest.raises(ValueError, match="data.split_special_tokens would be ignored"):
        load_tokenizer("bytes", split_special_tokens=True)


@pytest.mark.parametrize("name", ["bytes", "file"])
def test_offsets_cover_the_text(tmp_path, name):
    """Blanks too, which Llama 3's tokenizer cuts off the letters of a token."""
    folder = name if name == "bytes" else write_tokenizer(tmp_path, "")
    tokenizer = load_tokenizer(folder)
    text = "hello world \n\n  \u00e4\U0001f600 is"
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids.tolist() == tokenizer.encode(text).tolist() and offsets.shape == (len(ids), 2)
    covered = {letter for start, stop in offsets.tolist() for letter in range(start, stop)}
    assert covered == set(range(len(text)))
    assert (np.diff(offsets[:, 0]) >= 0).all()


def test_special_tokens_are_known_and_spelled_out(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, "", end="<|im_end|>"))
    ids = tokenizer.encode("<think>hello<|im_end|>")
    assert tokenizer.spell(ids) == "<think>hello<|im_end|>"
    assert [int(token) in tokenizer.special_ids for token in ids] == [False, False, True]
    assert load_tokenizer("bytes").spell([104, 105, 256, 257]) == "hi<end><padding>"


FOLDERS = {
    "additional": {"additional_special_tokens": ["<cat>", "<dog>"]},
    "extra": {"extra_special_tokens": ["<cat>"]},
    "named": {"extra_special_tokens": {"image_token": "<cat>"}},
    "decoder": {"added_tokens_decoder": {"400": {"content": "<cat>", "lstrip": True}}},
    "class": {"tokenizer_class": "Qwen2Tokenizer"},
    "slow class": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
    "split": {"split_special_tokens": True},
}


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_are_those_of_autotokenizer(tmp_path, name):
    """Tokens that only tokenizer_config.json has, and classes that replace
    parts of tokenizer.json."""
    folder = write_tokenizer(tmp_path, "")
    before = load_tokenizer(folder)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | FOLDERS[name]))
    ours = load_tokenizer(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    differs = False
    for text in (*PROBE, " hello <cat>  <dog>\n<|im_end|> 1234", ""):
        ids = ours.encode(text).tolist()
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], text
        assert [*ours.begin, *ids] == theirs(text)["input_ids"], text
        differs |= ids != before.encode(text).tolist()
    assert differs
    # Splitting is an option of its own, which is compared by itself.
    assert (ours.digest != before.digest) is (name != "split")
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1


def test_a_plain_tokenizer_keeps_its_digest(tmp_path):
    folder = write_tokenizer(tmp_path, "")
    wanted = hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()
    assert load_tokenizer(folder).digest == wanted
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_tokenizer(folder).digest == wanted
    # A file of another name is found by its path.
    (tmp_path / "tokenizer.json").rename(tmp_path / "own.json")
    assert load_tokenizer(str(tmp_path / "own.json")).digest == wanted


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "tokenizer_config.json"])
def test_a_link_out_of_the_folder_is_not_read(tmp_path, name):
    folder = write_tokenizer(tmp_path / "folder", CHATML)
    (tmp_path / "folder" / name).rename(tmp_path / name)
    (tmp_path / "folder" / name).symlink_to(tmp_path / name)
    with pytest.raises(ValueError, match=f"data.tokenizer: .*{name} is a link to"):
        load_tokenizer(folder)


def test_another_tokenizer_than_the_model_s_must_be_meant(tmp_path):
    own = write_tokenizer(tmp_path / "model", "")
    (tmp_path / "other").mkdir()
    train_tokenizer(tmp_path / "other", ["</s>"])
    larger = write_tokenizer(tmp_path / "larger", "")
    added = json.dumps({"eos_token": "<|endoftext|>", "extra_special_tokens": ["<cat>"]})
    (tmp_path / "larger/tokenizer_config.json").write_text(added)
    copy = write_tokenizer(tmp_path / "copy", CHATML)
    (tmp_path / "none").mkdir()

    def open_with(tokenizer: str, model: str = own, **options) -> Tokenizer:
        random = options.pop("random_weights", False)
        data = Data(tokenizer=tokenizer, **options)
        read = Model(initial_hf=model, random_weights=random)
        return open_tokenizer(Config(data=data, model=read))

    # The default is the model's, and a copy or more tokens are no other tokenizer.
    assert open_with("").folder == tmp_path / "model"
    assert open_with("", "").digest == "bytes"
    for folder in (own, copy, larger, str(tmp_path / "model/tokenizer.json")):
        assert open_with(folder).folder is not None
        with pytest.raises(ValueError, match="data.other_tokenizer = true: .* leave it out"):
            open_with(folder, other_tokenizer=True)
    for folder in ("bytes", str(tmp_path / "other")):
        with pytest.raises(ValueError, match="has other tokens than model.initial_hf"):
            open_with(folder)
        open_with(folder, other_tokenizer=True)
        open_with(folder, random_weights=True)
    with pytest.raises(ValueError, match="other tokens"):
        open_with(own, larger)
    with pytest.raises(ValueError, match="holds no tokenizer; write data.tokenizer"):
        open_with("", str(tmp_path / "none"))
    assert open_with("", str(tmp_path / "none"), random_weights=True).digest == "bytes"
    assert open_with("bytes", str(tmp_path / "none")).digest == "bytes"
