"""The commands that README, CONTRIBUTING.md, and docs/*.md show, and what the tests do with them. A
program runs in this process, in a folder that holds everything the commands name. One that needs
GPUs or hours is stopped after its parser."""

import argparse
import contextlib
import json
import os
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.run import get_args_parser

from tests.data.helpers import CHATML, write_rows, write_tokenizer
from tests.runs import debug_run, write_texts
from titan_sparse.commands import _Parser
from titan_sparse.config import load, save

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

Command = tuple[str, ...]
"""The words of a shell command, without variables set before it."""


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of this language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def commands_of(page: Path) -> list[Command]:
    """The commands of a page's bash blocks. A backslash at the end of a line
    joins it with the next."""
    commands = []
    for block in blocks(page, "(?:ba)?sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            if words:
                commands.append(tuple(words))
    return commands


def demo_command() -> Command:
    """README's command that trains on the CPU. tests/test_train.py runs it."""
    [demo] = [
        words
        for words in commands_of(PAGES[0])
        if words[0] == "torchrun" and "train_configs/demo_cpu.toml" in words
    ]
    return demo


COMMANDS = "titan_sparse.commands."


class Parsed(Exception):
    """A command line was accepted."""


SMALL_LOSS = ("--tokens=64", "--hidden=16", "--vocab=100", "--chunk-tokens=32", "--repeats=1")

SMALL_PAYS = (
    *("--lengths=256", "--batches=1", "--data.tokenizer=bytes", "--attention.block_size=16"),
    *("--training.device=cpu", "--training.dtype=float32"),
)
RULES: dict[str, tuple[str, ...] | None] = {
    "scripts.benchmarks.attention": None,
    "scripts.benchmarks.context_parallel": None,
    "scripts.benchmarks.loader": ("--training.seq_len", "256", "--seconds", "0.05"),
    "scripts.benchmarks.loss": SMALL_LOSS,
    "scripts.benchmarks.plots": (),
    "scripts.benchmarks.sparse_pays": SMALL_PAYS,
    "scripts.benchmarks.steps": (),
    "scripts.calibrate": None,
    "scripts.compare_runs": (),
    "scripts.docs.draw_attention": (),
    "scripts.docs.numbers": ("--check",),
    "scripts.study": None,
    "scripts.study.compact": None,
    "scripts.study.density": None,
    "scripts.study.real_model": None,
    "scripts.summarize_trace": (),
    f"{COMMANDS}evaluate": ("--lengths", "1024", "--samples", "1", "--depths", "2"),
    f"{COMMANDS}export_hf": (),
    f"{COMMANDS}generate": ("--tokens", "3"),
    f"{COMMANDS}init": (),
    f"{COMMANDS}inspect": ("--length", "150", "--rows", "8", "--layers", "0"),
    f"{COMMANDS}plan": ("--ranks", "4", "--nodes", "2", "--seq-len", "16384"),
    f"{COMMANDS}prepare_data": ("--processes", "1"),
    f"{COMMANDS}show_data": (),
    "titan_sparse.integrations.lm_eval": None,
}
"""Program -> options appended to its command line, which shrink it. None: only
this line is parsed."""


def workspace(folder: Path) -> None:
    """Fill a folder with the files that the commands of the docs name."""
    for name in ("train_configs", "scripts", "benchmarks", "docs", "Makefile", "tests"):
        (folder / name).symlink_to(ROOT / name)

    # outputs/run: a finished run of the flavour debug, with a checkpoint and what
    # a GPU's trace holds.
    write_texts(folder / "texts", documents=4)
    (folder / "texts/long.txt").write_text("The grass is green. The sky is blue. " * 120)
    config = debug_run(folder, "outputs/run")
    # As two ranks would have left it: who evaluates it has another number of them.
    config.parallelism.cp = 2
    save(config, config.training.output_dir)
    dist.destroy_process_group()
    (folder / "outputs/demo_gpu").symlink_to("run")
    for name in ("a", "b"):
        (folder / "outputs" / name).mkdir()
        shutil.copy(folder / "outputs/run/metrics.jsonl", folder / "outputs" / name)
        shutil.copytree(folder / "outputs/run/starts", folder / "outputs" / name / "starts")

    (folder / "outputs/run/profile").mkdir()
    kernel = {"name": "gemm", "cat": "kernel", "ts": 0.0, "dur": 1000.0}
    (folder / "outputs/run/profile/rank0.json").write_text(json.dumps({"traceEvents": [kernel]}))

    # books.jsonl.zst and chats.jsonl with a tokenizer and its template, and prepared/python.
    books = [{"text": f"a book about a dog {number}"} for number in range(20)]
    write_rows(folder / "books.jsonl.zst", books)
    chat = [{"role": "user", "content": "a dog"}, {"role": "assistant", "content": "a book"}]
    write_rows(folder / "chats.jsonl", [{"messages": chat}])
    write_tokenizer(folder / "qwen3", CHATML)
    prepared = ["texts", "prepared/python", "--tokenizer", "bytes", "--processes", "1"]
    assert run_module(f"{COMMANDS}prepare_data", prepared, folder) == 0

    # FOLDER: a model in Hugging Face's format; constants.json: what calibrate writes.
    assert run_module(f"{COMMANDS}export_hf", ["outputs/run", "FOLDER"], folder) == 0
    shutil.copy(ROOT / "titan_sparse/estimate/constants_h200.json", folder / "constants.json")


def try_command(words: tuple[str, ...], folder: Path) -> None:
    """Runs a command in shrunken form in `folder`. Raises AssertionError if it does not
    work or no rule fits."""
    if words[0] in OTHERS:
        OTHERS[words[0]](list(words[1:]))
        return
    program, arguments, processes = python_program(list(words))
    if program in ("train.py", "titan_sparse.train"):
        try_training(arguments, processes, words)
        return
    if program == "pytest":
        check_pytest(arguments)
        return
    if program == "torchtitan.train":
        check_torchtitan(arguments)
        return
    assert program in RULES, f"no rule for {program}; add one to RULES"
    shrink = RULES[program]
    if program == "titan_sparse.integrations.lm_eval":
        pytest.importorskip("lm_eval")
    if shrink is None:
        assert is_parsed(program, arguments, folder)
        return
    # One process takes the place of all of them here.
    shrink += ("--parallelism.cp", "1") if processes > 1 else ()
    status = run_module(program, [*arguments, *shrink], folder)
    assert status == 0, f"status {status}"


def check_torchtitan(arguments: list[str]) -> None:
    """torchtitan takes the words, and our overrides replace what they name."""
    if torch.__version__ < "2.14":
        return
    from torchtitan.config import ConfigManager
    from torchtitan.config.override import apply_overrides

    config = ConfigManager().parse_args(arguments)
    config.model_spec.model.update_from_config(config=config)
    lines = apply_overrides(config.override, config)
    for name in config.override.imports:
        name = name if isinstance(name, str) else name[0]
        assert any(name in line for line in lines), name


def python_program(words: list[str]) -> tuple[str, list[str], int]:
    """What `python ...`, `titan-sparse ...` or `torchrun ...` starts: a module or a file, its
    words, and how many processes. Options of torchrun itself go through its own parser."""
    processes = 1
    if words[0] == "torchrun":
        launch = get_args_parser().parse_args(words[1:])
        program, *words = launch.training_script, *launch.training_script_args
        processes = int(launch.nproc_per_node)
    elif words[0] == "titan-sparse":
        program, *words = "titan_sparse", *words[1:]
    else:
        assert words[0] == "python", f"no rule for the program {words[0]}"
        program, *words = words[2:] if words[1] == "-m" else words[1:]
    if program == "titan_sparse":
        command, *words = words
        program = "titan_sparse.train" if command == "train" else f"{COMMANDS}{command}"
    return program, words, processes


def try_training(arguments: list[str], processes: int, words: tuple[str, ...]) -> None:
    """A run on GPUs fits into its GPUs by --dry-run. tests/test_train.py
    starts the one on the CPU."""
    if {"--dry-run", "--find-max-length", "--help"}.intersection(arguments):
        assert run_module("titan_sparse.train", arguments) == 0
    elif load(arguments)[0].training.device == "cpu":
        assert words == demo_command(), "only tests/test_train.py trains"
    else:
        report = ["--dry-run", "--ranks", str(processes), "--device-memory", "139.8"]
        assert run_module("titan_sparse.train", [*arguments, *report]) == 0


def run_module(module: str, words: list[str], folder: Path = Path()) -> int:
    """The status of `python -m module words`, run in this process in
    `folder`, alone in its world."""
    if module.startswith(COMMANDS):
        module, words = "titan_sparse", [module.removeprefix(COMMANDS), *words]
    argv = mock.patch.object(sys, "argv", [module, *words])
    with argv, mock.patch.dict(os.environ), contextlib.chdir(folder):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PYTORCH_ALLOC_CONF"):
            os.environ.pop(name, None)
        try:
            runpy.run_module(module, run_name="__main__")
            status = 0
        except SystemExit as exit:
            status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


def is_parsed(module: str, words: list[str], folder: Path) -> bool:
    """Whether a program's argparse takes the words. The program stops there."""
    parse_args = argparse.ArgumentParser.parse_args
    parse_known_args = argparse.ArgumentParser.parse_known_args

    def parse_and_stop(parser: argparse.ArgumentParser, *arguments: object) -> None:
        # It calls parse_known_args(), and then refuses unknown words.
        with mock.patch.object(argparse.ArgumentParser, "parse_known_args", parse_known_args):
            parse_args(parser, *arguments)
        raise Parsed

    def parse_known_and_stop(parser: argparse.ArgumentParser, *arguments: object) -> None:
        _, rest = parse_known_args(parser, *arguments)
        # The other words are options of the configuration.
        load(rest)
        raise Parsed

    def split_and_load(parser: _Parser, words: list[str]) -> tuple[list[str], list[str]]:
        own, others = split(parser, words)
        load(others)
        return own, others

    split = _Parser.split
    with (
        mock.patch.object(_Parser, "split", split_and_load),
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop),
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", parse_known_and_stop),
    ):
        with contextlib.suppress(Parsed):
            run_module(module, words, folder)
            return False
    return True


def make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert words and set(words) <= set(targets)


def pip(words: list[str]) -> None:
    assert words == ["install", "-e", ".[train]"]


def tensorboard(words: list[str]) -> None:
    """It reads the folder that one of the ready configurations writes."""
    written = [load(["--config", str(path)])[0] for path in ROOT.glob("train_configs/*.toml")]
    assert words in [["--logdir", config.training.output_dir] for config in written]


def check_pytest(words: list[str]) -> None:
    """Markers and paths that exist."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    markers = [each.split(":")[0] for each in pyproject["tool"]["pytest"]["ini_options"]["markers"]]
    for option, value in zip(words, [*words[1:], ""]):
        assert option != "-m" or value in markers
        assert not option.startswith("tests/") or (ROOT / option).exists()


def launch_node(words: list[str]) -> None:
    """The configuration fits a node of eight GPUs."""
    options = ["--config", *words]
    ranks = max(8, load(options)[0].parallelism.cp)
    options += ["--ranks", str(ranks), "--dry-run", "--device-memory", "139.8"]
    assert run_module("titan_sparse.train", options) == 0


def sbatch(words: list[str]) -> None:
    assert words[0] == "--nodes" and words[2] == "scripts/launch_slurm.sh"
    launch_node(words[3:])


def past_torchrun(words: list[str]) -> None:
    """One node's part of a run: the processes of all nodes fit."""
    launch = get_args_parser().parse_args(words[1:])
    program, arguments, processes = python_program(words)
    assert program == "train.py"
    try_training(arguments, processes * int(launch.nnodes), tuple(words))


OTHERS: dict[str, Callable[[list[str]], None]] = {
    "make": make,
    "pip": pip,
    "tensorboard": tensorboard,
    "scripts/launch_node.sh": launch_node,
    "scripts/past_torchrun.sh": past_torchrun,
    "sbatch": sbatch,
}
