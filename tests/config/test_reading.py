"""The configuration: reading, precedence, errors of one line."""

import re
import tomllib
from dataclasses import fields, is_dataclass
from operator import attrgetter

import pytest

from tests.refusals import refused
from titan_sparse.config import Config, ConfigError, Flags, field_docs, load, save, to_toml, usage
from titan_sparse.config.reading import dense_layers


def write(folder, text):
    path = folder / "x.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def message_of(function, *arguments):
    """The text of the ConfigError that the call raises; asserts that it is one line."""
    with refused(".", ConfigError) as caught:
        function(*arguments)
    return str(caught.value)


def sections(kind=Config):
    """The section classes below `kind`, itself left out."""
    for item in fields(kind):
        if is_dataclass(item.type):
            yield item.type
            yield from sections(item.type)


def test_defaults_without_arguments():
    assert load([]) == (Config(), Flags(print_config=False))


@pytest.mark.parametrize(
    "words, section, name, expected",
    [
        (["--training.steps", "20"], "training", "steps", 20),
        (["--optimizer.lr", "1"], "optimizer", "lr", 1.0),
        (["--compile.enable"], "compile", "enable", True),
        (["--compile.enable", "--training.steps", "3"], "compile", "enable", True),
        (["--data.shuffle", "false"], "data", "shuffle", False),
        (["--data.source=--odd"], "data", "source", "--odd"),
        (["--training.steps", "1", "--training.steps", "2"], "training", "steps", 2),
        (["--training.seq_len", "128k"], "training", "seq_len", 131_072),
    ],
)
def test_override(words, section, name, expected):
    config, _ = load(words)
    value = getattr(getattr(config, section), name)
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize("order", [0, 1])
def test_precedence(tmp_path, order):
    text = "[training]\nsteps = 7\nseed = 3\nseq_len = '8k'\n"
    text += "[attention.vertical_slash]\nrecall = 1\n[attention.dense]\n"
    path = write(tmp_path, text)
    words = [["--config", path], ["--training.steps", "9"]]
    config, _ = load(words[order] + words[1 - order])
    assert (config.training.steps, config.training.seed, config.training.seq_len) == (9, 3, 8192)
    recall = config.attention.vertical_slash.recall
    assert recall == 1.0 and isinstance(recall, float)
    assert load([f"--config={path}"])[0].training.steps == 7


def test_paths_may_begin_with_the_home_folder(monkeypatch):
    """A shell expands neither TOML nor --key=~/value. Every other path is
    expanded where it is read."""
    monkeypatch.setenv("HOME", "/home/a")
    keys = "training.output_dir", "checkpoint.initial_load_path", "attention.balance_costs"
    config, _ = load([f"--{key}=~/run" for key in keys])
    assert [attrgetter(key)(config) for key in keys] == ["/home/a/run"] * 3


def test_help_lists_every_key(capsys):
    with pytest.raises(SystemExit) as caught:
        load(["--training.steps", "5", "-h"])
    printed = capsys.readouterr().out
    assert caught.value.code == 0 and printed == usage() + "\n"
    for section in sections():
        docs = field_docs(section)
        for item in (item for item in fields(section) if not is_dataclass(item.type)):
            assert re.search(rf"\.{item.name} .*: {re.escape(docs[item.name])}\n", printed)
    assert (
        '--attention.schedule auto|local|all_gather|ring|double_ring|group_cast|ulysses (default "auto")'
        in printed
    )


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--optimizer.eps=1e-30", "--optimizer.lr=1e22", "--attention.vertical_slash.probe=64"],
        ["--data.source", 'C:\\a "b"\t\n\x7f\u00e9\U0001f600', "--compile.enable"],
    ],
)
def test_round_trip(tmp_path, words):
    config, _ = load(words)
    save(config, tmp_path / "run" / "deep")
    path = tmp_path / "run" / "deep" / "config.toml"
    assert path.read_text(encoding="utf-8") == to_toml(config)
    assert load(["--config", str(path)])[0] == config
    assert set(tomllib.loads(to_toml(config))) == {item.name for item in fields(Config)}


BAD_WORDS = [
    ("--ranks 8", "--ranks would be ignored; write --dry-run"),
    ("--dry-run --ranks 0", "--ranks = 0 is out of range; write 1 or more"),
    ("--dry-run --find-max-length", "--dry-run and --find-max-length exclude each other"),
    ("--attention.patern dense", "attention.patern; did you mean attention.pattern?"),
    ("--atention.pattern dense", "atention.pattern; did you mean attention.pattern?"),
    ("--attention.recall 0.9", "did you mean attention.vertical_slash.recall?"),
    ("--training.lr 1", "training.lr; did you mean optimizer.lr?"),
    ("--optimizer.name adamw", 'did you mean "AdamW"?'),
    ("--confg x.toml", "unknown key confg; did you mean --config?"),
    ("--training.steps abc", 'training.steps = "abc" is not an integer'),
    ("--training.seq_len 1kb", "is not a number of tokens; write for example 131072 or 128k"),
    ("--training.steps --compile.enable", "training.steps needs a value"),
    ("--optimizer.lr nan", "optimizer.lr = nan is not a finite number"),
    ("--compile.enable 1", 'compile.enable = "1" is not true or false'),
    ("--attention.pattern densse", 'one of "dense", "vertical_slash", "xattention", "moba"; did'),
    ("run.toml", 'unexpected word "run.toml"'),
    ("--training.steps=1 2", 'unexpected word "2"'),
    ("--training.steps 1 2", 'unexpected word "2"'),
    ("--config", "config needs a value"),
    ("--config a.toml --config=b.toml", "all but one would be ignored: a.toml, b.toml; write one"),
    ("--print-config=yes", '--print-config = "yes" is not true or false'),
]


@pytest.mark.parametrize("words, expected", BAD_WORDS)
def test_bad_command_line(words, expected):
    message = message_of(load, words.split())
    assert message.startswith("command line: ") and expected in message


def test_layers_are_a_list_in_a_file_and_words_on_the_command_line(tmp_path):
    file = write(tmp_path, "[attention]\ndense_layers = [0, 1]\n")
    config = load(["--config", file])[0]
    assert dense_layers(config.attention) == [0, 1]
    assert load(["--attention.dense_layers", "0,1"])[0] == config
    assert load(["--config", write(tmp_path, to_toml(config))])[0] == config
