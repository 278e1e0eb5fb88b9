"""Every problem with a start is reported in one line that names it, with status 2, before torch is
loaded.

Starts that must be refused: wrong values of every key, odd files and folders, wrong
launch environments.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from titan_sparse.commands import train
from titan_sparse.config import check_launch, check_start, load_and_check
from titan_sparse.config.reading import KINDS, ConfigError, load
from titan_sparse.options.values import plain

ROOT = Path(__file__).parents[1]

GOOD = """
[data]
source = "{folder}/texts"
[training]
output_dir = "{folder}/run"
steps = 1
seq_len = 64
dtype = "float32"
device = "cpu"
[attention]
pattern = "dense"
block_size = 16
[lr_scheduler]
warmup_steps = 0
[metrics]
tensorboard = false
"""
"""A start that runs, one step on the CPU."""

GOOD_LAUNCH = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
"""What torchrun sets for one process."""

TWO_RANKS = GOOD_LAUNCH | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
HUGE = (2**63, 2**64, 10**23)
LONG = "n" * 5000


class BadStart(NamedTuple):
    """Words of the command line after GOOD, or a file, and what the one line must name."""

    named: str
    words: tuple[str, ...] = ()
    toml: bytes | None = None
    environment: dict[str, str] = {}

    def __str__(self) -> str:
        return f"{self.named} {' '.join(self.words)} {self.environment or ''}"


def prepare(folder: Path) -> None:
    (folder / "texts").mkdir(parents=True)
    (folder / "texts/a.txt").write_text("Words of a text, one after the other. " * 40)
    for name in ("empty_folder", "x.jsonl", "mixed", "empty_step"):
        (folder / name).mkdir(parents=True)
    for name in ("file", "empty.txt", "empty.jsonl", "mixed/a.txt", "mixed/b.jsonl"):
        (folder / name).touch()
    for name in ("hf", "prepared"):
        (folder / name).mkdir()
    (folder / "garbage.jsonl").write_bytes(b"{" * 100)
    (folder / "blank.jsonl").write_text('{"text": ""}\n' * 3)
    (folder / "numbers.jsonl").write_text('{"text": 5}\n' * 3)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "hf/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "prepared/meta.json").write_text('{"format": "titan_sparse tokens 1"}')
    (folder / "good.toml").write_text(GOOD.replace("{folder}", str(folder)))


def wrong_values() -> Iterator[BadStart]:
    """Of every key a value of the wrong type, and of every number values out of range."""
    values = {
        bool: ("yes", "1", ""),
        int: ("x", "1.5", "", "-2", "nan", *HUGE),
        float: ("x", "", "-2", "nan", "inf", "1e400", "-1e300"),
        str: (),
    }
    for key, kind in KINDS.items():
        for value in values[plain(kind)] if plain(kind) in values else ("nothing", ""):
            yield BadStart(key, (f"--{key}={value}",))


PATHS = {
    "training.output_dir": ("{folder}/file/run", "{folder}/dangling", "/dev/null", "", "\udcff"),
    "data.source": (
        "~/none",
        "{folder}/empty_folder",
        "{folder}/mixed",
        "{folder}/empty.txt",
        "{folder}/loop",
        "{folder}/texts:0.5,{folder}/none:0.5",
        "{folder}/" + "n" * 256 + ".txt",
        "",
    ),
    "data.tokenizer": ("{folder}/none.json", "{folder}/texts", LONG),
    "model.initial_hf": ("{folder}/none", "{folder}/file", "{folder}/hf"),
    "checkpoint.load_step": ("5",),
    "checkpoint.initial_load_path": ("{folder}/empty_step", LONG),
    "attention.balance_costs": ("{folder}/texts", LONG),
    "validation.source": ("./none",),
    "config": ("{folder}", "{folder}/none.toml"),
}
"""Odd files and folders for every key that names one."""

NEEDED = {
    "checkpoint": ("--checkpoint.enable",),
    "attention": ("--attention.layout=balanced", "--parallelism.cp=2"),
    "validation": ("--validation.enable",),
}


def with_value(key: str, value: str) -> BadStart:
    environment = TWO_RANKS if key == "attention.balance_costs" else {}
    words = (f"--{key}={value}", *NEEDED.get(key.split(".")[0], ()))
    return BadStart(key, words, environment=environment)


def wrong_paths() -> Iterator[BadStart]:
    """And files that are not a configuration."""
    for key, values in PATHS.items():
        for value in values:
            yield with_value(key, value)
    contents = {
        b"\xff\xfe": "TOML",
        b"[training\nsteps = 5": "TOML",
        b"[training]\nsteps = " + b"[" * 5000 + b"]" * 5000: "TOML",
        b"a" + b".a" * 5000 + b" = 1": "TOML",
        b"[training]\nsteps = 0x" + b"f" * 5000: "training.steps",
        b"[training]\nstep = 5": "training.steps",
        b"[trainning]\nsteps = 5": "training.steps",
        b'[data]\nsource = "a\\u0000b"': "data.source",
    }
    for toml, named in contents.items():
        yield BadStart(named, toml=toml)


def wrong_launches() -> Iterator[BadStart]:
    """Environments that torchrun would not create."""
    yield BadStart("RANK", environment={"WORLD_SIZE": "2"})
    yield BadStart("LOCAL_WORLD_SIZE", environment={"LOCAL_WORLD_SIZE": "2"})
    for name in GOOD_LAUNCH.keys() - {"RANK"}:
        rest = {key: value for key, value in GOOD_LAUNCH.items() if key != name}
        yield BadStart(name, environment=rest)
    for name, values in {
        "RANK": ("abc", "", "1", "-1", "9" * 5000),
        "WORLD_SIZE": ("abc", "", "0", "-1", "1.0", "9" * 5000),
        "LOCAL_RANK": ("abc", "", "1", "-1"),
        "LOCAL_WORLD_SIZE": ("abc", "", "0", "2"),
        "MASTER_ADDR": ("",),
        "MASTER_PORT": ("",),
    }.items():
        for value in values:
            yield BadStart(name, environment={**GOOD_LAUNCH, name: value})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("starts")
    prepare(path)
    return path


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GOOD_LAUNCH:
        monkeypatch.delenv(name, raising=False)


def words_of(start: BadStart, folder: Path) -> list[str]:
    words = [word.replace("{folder}", str(folder)) for word in start.words]
    if start.toml is not None:
        (folder / "bad.toml").write_bytes(start.toml)
        return ["--config", str(folder / "bad.toml")]
    if start.named == "config":
        return words
    return ["--config", str(folder / "good.toml"), *words]


def assert_refused(start: BadStart, folder: Path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *words_of(start, folder)])
    for name, value in start.environment.items():
        monkeypatch.setenv(name, value)
    assert train.main() == 2
    errors = capfd.readouterr().err
    lines = [line for line in errors.splitlines() if "examples/s" not in line and line]
    assert len(lines) == 1 and lines[0].startswith("error: ") and start.named in lines[0], errors
    assert len(lines[0]) < 1000


@pytest.mark.parametrize(
    "starts", [wrong_values, wrong_paths, wrong_launches], ids=lambda f: f.__name__
)
def test_a_bad_start_is_one_line_before_torch(starts, folder, monkeypatch, capfd):
    # main() fails where it goes on to load torch. Ranks that leave the line to
    # the first do not wait.
    monkeypatch.setattr(train.logging, "basicConfig", lambda **_: pytest.fail("not refused"))
    monkeypatch.setattr(train.time, "sleep", lambda seconds: None)
    for start in starts():
        with monkeypatch.context() as patch:
            assert_refused(start, folder, patch, capfd)
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    "key, value, named",
    [
        ("data.source", "{folder}/garbage.jsonl", ""),
        ("data.source", "{folder}/blank.jsonl", ""),
        ("data.source", "{folder}/prepared", ""),
        ("data.source", "{folder}/numbers.jsonl", "data.text_field"),
        ("data.tokenizer", "{folder}/tokenizer.json", ""),
        ("attention.balance_costs", "{folder}/tokenizer.json", ""),
        ("data.min_document_length", "10000", ""),
    ],
)
def test_unusable_texts_are_one_line_before_the_first_step(
    key, value, named, folder, monkeypatch, capfd
):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    start = with_value(key, value)._replace(named=named or key)
    assert_refused(start, folder, monkeypatch, capfd)


def test_the_command_line_refuses_without_torch(folder):
    start = BadStart("training.steps", ("--training.steps=1e23",))
    code = "import sys; from train import main; status = main(); sys.exit(3 if 'torch' in sys.modules else status)"
    result = subprocess.run(
        [sys.executable, "-c", code, *words_of(start, folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1 and start.named in result.stderr


@pytest.mark.parametrize(
    "environment", [{}, {"WORLD_SIZE": "1"}, {"MASTER_ADDR": "a"}, GOOD_LAUNCH], ids=str
)
def test_a_good_start_is_taken_and_leaves_no_trace(folder, monkeypatch, environment):
    before = sorted(folder.rglob("*"))
    config, _ = load_and_check(["--config", str(folder / "good.toml")], 1, 1)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    check_start(config)
    check_launch()
    assert sorted(folder.rglob("*")) == before


def test_what_starts_nothing_needs_no_files(folder, monkeypatch, capsys):
    words = ["--data.source=./none", "--training.output_dir=/proc/run", "--print-config"]
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(folder / "good.toml"), *words])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.main() == 0
    (folder / "printed.toml").write_text(capsys.readouterr().out)
    config, _ = load(["--config", str(folder / "printed.toml")])
    assert config.data.source == "./none"


def test_load_step_of_an_existing_or_an_older_checkpoint(tmp_path):
    """A run that continued from step 5 has deleted that checkpoint. The same
    command still starts."""
    for step in (10, 20):
        (tmp_path / "checkpoint" / f"step-{step}").mkdir(parents=True)
    (tmp_path / "checkpoint" / "step-30").write_text("a file")
    words = [f"--training.output_dir={tmp_path}", "--checkpoint.enable"]
    for step in (5, 20):
        check_start(load([*words, f"--checkpoint.load_step={step}"])[0])
    with pytest.raises(ConfigError, match=r"load_step = 21: .* has only step-10, step-20; write"):
        check_start(load([*words, "--checkpoint.load_step=21"])[0])
