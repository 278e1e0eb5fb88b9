"""Starts that must be refused: wrong values of every key, odd files and folders, wrong launch environments."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from titan_sparse.config.reading import KINDS

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


@dataclass
class BadStart:
    """Words of the command line after GOOD, and what the one line must name."""

    words: list[str]
    named: str
    toml: bytes | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        text = " ".join([*self.words, *(f"{k}={v}" for k, v in self.environment.items())])
        return text or repr((self.toml or b"")[:40])


def with_costs(path: str) -> BadStart:
    """A file of costs for two ranks that share sequences."""
    key = "attention.balance_costs"
    words = ["--attention.layout=balanced", "--parallelism.cp=2", f"--{key}={path}"]
    return BadStart(words, key, environment=TWO_RANKS)


def wrong_values() -> list[BadStart]:
    """Of every key a value of the wrong type, and of every number values out of range."""
    starts = []
    for key, kind in KINDS.items():
        values: list[object] = []
        if kind is bool:
            values = ["yes", "1", ""]
        elif kind is int:
            values = ["x", "1.5", "", "-2", "nan", *HUGE]
        elif kind is float:
            values = ["x", "", "-2", "nan", "inf", "1e400", "-1e300"]
        elif get_args(kind):
            values = ["nothing", ""]
        starts += [BadStart([f"--{key}={value}"], key) for value in values]
    return starts


def prepare(folder: Path) -> None:
    (folder / "texts").mkdir(parents=True)
    (folder / "texts" / "a.txt").write_text("Words of a text, one after the other. " * 40)
    for name in ("empty_folder", "x.jsonl", "mixed", "empty_step", "occupied/config.toml"):
        (folder / name).mkdir(parents=True)
    for name in ("file", "empty.txt", "empty.jsonl", "mixed/a.txt", "mixed/b.jsonl"):
        (folder / name).write_bytes(b"")
    (folder / "occupied_file").mkdir()
    (folder / "occupied_file" / "checkpoint").write_text("no folder")
    (folder / "garbage.jsonl.zst").write_bytes(os.urandom(100))
    (folder / "garbage.jsonl").write_bytes(b"{" * 100)
    (folder / "garbage.parquet").write_bytes(b"PAR1" + os.urandom(100))
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (folder / "blank.jsonl").write_text('{"text": ""}\n' * 3)
    (folder / "numbers.jsonl").write_text('{"text": 5}\n' * 3)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "loop").symlink_to(folder / "loop")
    for name in (".lock", "metrics.jsonl"):
        (folder / f"linked{name}").mkdir()
        (folder / f"linked{name}" / name).symlink_to(folder / "file")
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "prepared").mkdir()
    (folder / "prepared" / "meta.json").write_text('{"format": "titan_sparse tokens 1"}')


def wrong_paths() -> list[BadStart]:
    """Odd files and folders for every key that names one."""
    key = "training.output_dir"
    odd_outputs = (
        "{folder}/file",
        "{folder}/file/run",
        "{folder}/dangling",
        "{folder}/dangling/run",
        "{folder}/loop",
        "{folder}/occupied",
        "{folder}/occupied_file",
        "{folder}/linked.lock",
        "{folder}/linkedmetrics.jsonl",
        "/proc/run",
        "/dev/null",
        "",
    )
    starts = [BadStart([f"--{key}={value}"], key) for value in odd_outputs]
    key = "data.source"
    odd_sources = (
        "{folder}/none",
        "{folder}/none.jsonl",
        "./none",
        "~/none",
        "{folder}/empty_folder",
        "{folder}/x.jsonl",
        "{folder}/mixed",
        "{folder}/file",
        "{folder}/empty.txt",
        "{folder}/empty.jsonl",
        "{folder}/dangling",
        "{folder}/loop",
        "{folder}/texts:0.5,{folder}/none:0.5",
        "{folder}/texts:0.5,python",
        "{folder}/texts:0,python:1",
        "/dev/null",
        "{folder}/" + "n" * 256 + ".txt",
        "",
    )
    starts += [BadStart([f"--{key}={value}"], key) for value in odd_sources]
    starts += [
        BadStart(["--data.tokenizer={folder}/none.json"], "data.tokenizer"),
        with_costs("{folder}/none"),
        with_costs("{folder}/texts"),
        with_costs("n" * 5000),
        BadStart(["--data.tokenizer={folder}/texts"], "data.tokenizer"),
        BadStart(["--data.tokenizer=" + "n" * 5000], "data.tokenizer"),
        BadStart(["--model.initial_hf={folder}/none"], "model.initial_hf"),
        BadStart(["--model.initial_hf={folder}/file"], "model.initial_hf"),
        BadStart(["--model.initial_hf={folder}/hf"], "model.initial_hf"),
        BadStart(["--model.initial_hf=" + "n" * 300], "model.initial_hf"),
        BadStart(["--checkpoint.enable", "--checkpoint.load_step=5"], "checkpoint.load_step"),
        BadStart(
            ["--checkpoint.enable", "--checkpoint.initial_load_path={folder}/none"],
            "checkpoint.initial_load_path",
        ),
        BadStart(
            ["--checkpoint.enable", "--checkpoint.initial_load_path={folder}/empty_step"],
            "checkpoint.initial_load_path",
        ),
        BadStart(
            ["--checkpoint.enable", "--checkpoint.initial_load_path=" + "n" * 5000],
            "checkpoint.initial_load_path",
        ),
        BadStart(["--validation.enable", "--validation.source=./none"], "validation.source"),
        BadStart(["--config={folder}"], "--config"),
        BadStart(["--config={folder}/none.toml"], "--config"),
        BadStart(["--config=" + "n" * 300], "--config"),
        BadStart(["--config={folder}/file", "--training.output_dir=\udcff"], "training.output_dir"),
    ]
    return starts


def wrong_texts() -> list[BadStart]:
    """Files that turn out to be unusable when they are read: refused after torch is loaded, before
    the first step.
    """
    files = ("garbage.jsonl.zst", "garbage.jsonl", "garbage.parquet", "blank.jsonl", "prepared")
    starts = [BadStart([f"--data.source={{folder}}/{name}"], "data.source") for name in files]
    return [
        *starts,
        BadStart(["--data.source={folder}/numbers.jsonl"], "data.text_field"),
        BadStart(["--data.tokenizer={folder}/tokenizer.json"], "data.tokenizer"),
        with_costs("{folder}/tokenizer.json"),
        BadStart(["--data.min_document_length=10000"], "data.min_document_length"),
        BadStart(["--data.source=no_owner/no_dataset"], "data.source"),
    ]


def wrong_toml() -> list[BadStart]:
    contents = {
        b"\xff\xfe": "TOML",
        b"[training\nsteps = 5": "TOML",
        b"[training]\nsteps = 5\nsteps = 6": "TOML",
        b"[training]\nsteps = " + b"[" * 5000 + b"]" * 5000: "nested",
        b"[training]\nsteps = " + b"[" * 400 + b"]" * 400: "training.steps",
        b"a" + b".a" * 5000 + b" = 1": "nested",
        b"[training]\nsteps = 0x" + b"f" * 5000: "training.steps",
        b"[training]\nsteps = [0x" + b"f" * 5000 + b"]": "training.steps",
        b"[training]\nsteps = " + b"9" * 5000: "TOML",
        b"[training]\nsteps = 1979-05-27": "training.steps",
        b"[training]\nsteps = 1e23": "training.steps",
        b"[training]\nstep = 5": "training.steps",
        b"[trainning]\nsteps = 5": "training.steps",
        b"steps = 5": "steps",
        b"training = 5": "training",
        b'[data]\nsource = "a\\u0000b"': "data.source",
        b'[training]\noutput_dir = "a\\u0000b"': "training.output_dir",
        b"[[training]]\nsteps = 5": "training",
    }
    return [BadStart([], named, toml) for toml, named in contents.items()]


def wrong_launches() -> list[BadStart]:
    """Environments that torchrun would not create."""
    starts = [
        BadStart([], "RANK", environment={"WORLD_SIZE": "2"}),
        BadStart([], "LOCAL_WORLD_SIZE", environment={"LOCAL_WORLD_SIZE": "2"}),
    ]
    for name in GOOD_LAUNCH:
        if name != "RANK":
            rest = {key: value for key, value in GOOD_LAUNCH.items() if key != name}
            starts.append(BadStart([], name, environment=rest))
    for name, values in {
        "RANK": ("abc", "", "1", "-1", "9" * 5000),
        "WORLD_SIZE": ("abc", "", "0", "-1", "1.0", "9" * 5000),
        "LOCAL_RANK": ("abc", "", "1", "-1"),
        "LOCAL_WORLD_SIZE": ("abc", "", "0", "2"),
        "MASTER_ADDR": ("",),
        "MASTER_PORT": ("abc", "", "65536"),
    }.items():
        for value in values:
            starts.append(BadStart([], name, environment={**GOOD_LAUNCH, name: value}))
    return starts
