"""Ranks that differ do not start: each ends with status 2, and one line says what differs."""

import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.data.helpers import train_tokenizer
from tests.distributed import run_program
from tests.models.huggingface_reference import change_tensors, save_reference, write_config
from tests.runs import write_texts
from titan_sparse.commands import train
from titan_sparse.commands.plan import DEFAULT_CONSTANTS
from titan_sparse.training import preflight

WORDS = [
    "--data.source=texts",
    "--data.tokenizer=tokenizer.json",
    "--model.initial_hf=hf",
    "--model.vocab_size=0",
    "--training.device=cpu",
    "--training.dtype=float32",
    "--training.seq_len=64",
    "--training.steps=2",
    "--attention.pattern=dense",
    "--attention.block_size=16",
    "--checkpoint.enable",
    "--lr_scheduler.warmup_steps=1",
    "--metrics.tensorboard=false",
]
BALANCED = [
    "--parallelism.cp=2",
    "--attention.layout=balanced",
    "--attention.balance_costs=costs.json",
]

KEYS = {
    # key: what rank 0 has, what rank 1 has
    "optimizer.lr": ("0.0003", "0.1"),
    "training.seed": ("0", "7"),
    "data.source": ('"texts"', '"more_texts"'),
    "training.steps": ("2", "3"),
    "guard.enable": ("true", "false"),
    "parallelism.cp": ("1", "2"),
}


def _write_costs(folder: Path, dense_tflops: float) -> None:
    constants = json.loads(DEFAULT_CONSTANTS.read_text())["constants"]
    for name, value in (("dense_tflops", dense_tflops), ("partial_tile", 3), ("inside_gb_s", 1)):
        constants[name] = {"value": value}
    (folder / "costs.json").write_text(json.dumps({"constants": constants}))


def _add_line(path: Path) -> None:
    with path.open("a") as file:
        file.write("\n# another line\n" if path.suffix == ".py" else "\n")


FILES = {
    # what is named -> another file at the same path
    "the digest of documents of data.source": lambda f: _add_line(f / "texts/03.txt"),
    "the number of documents of data.source (part 1)": lambda f: _add_line(f / "texts/99.txt"),
    "the digest of data.tokenizer": lambda f: _add_line(f / "tokenizer.json"),
    "the digest of attention.balance_costs": lambda f: _write_costs(f, 28),
    "the digest of the weights of model.initial_hf": lambda f: change_tensors(
        f / "hf", lambda tensors: tensors["model.norm.weight"].add_(1)
    ),
    "the model's norm_eps": lambda f: write_config(f / "hf", rms_norm_eps=0.5),
}


def _refused(words: list[str]) -> str:
    """What this rank writes to stderr, a line."""
    sys.argv[1:] = words
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = train.main()
    # datasets shows its progress.
    lines = [line for line in said.getvalue().split("\n") if line and "examples/s" not in line]
    assert status == 2 and len(lines) == 1, said.getvalue()
    [text] = lines
    assert text.startswith("error: rank 1 (host ") and "but rank 0 (host " in text, text
    assert not dist.is_initialized()
    return text


def _table(words: list[str]) -> int:
    folder, is_second = Path(words[0]), os.environ["RANK"] == "1"
    os.chdir(folder / "files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.time, "sleep", lambda seconds: None)
        for key, values in KEYS.items():
            text = _refused([*WORDS, f"--{key}={values[is_second]}".replace('"', "")])
            assert f"has {key} = {values[1]}, but" in text and f"has {values[0]}" in text, text
        for named in FILES:
            os.chdir(folder / (named if is_second else "files"))
            assert f"has {named} = " in _refused([*WORDS, *BALANCED])

        os.chdir(folder / "files")
        with patch.context() as code:
            if is_second:
                code.setattr(preflight, "PACKAGE", folder / "titan_sparse")
            assert "has titan_sparse/kernels/merge.py = " in _refused(WORDS)
        own = torch.__version__
        with patch.context() as version:
            if is_second:
                version.setattr(torch, "__version__", "2.99.0")
            text = _refused(WORDS)
        assert "has the version of torch = 2.99.0, but" in text and f"has {own}" in text
    return 0


def test_ranks_that_differ_are_refused(tmp_path):
    files = tmp_path / "files"
    write_texts(files / "texts")
    write_texts(files / "more_texts", documents=14)
    save_reference(files / "hf")
    train_tokenizer(files, ["</s>"])
    _write_costs(files, dense_tflops=14)
    for named, change in FILES.items():
        shutil.copytree(files, tmp_path / named)
        change(tmp_path / named)
    # An old checkout on one node.
    package = tmp_path / "titan_sparse"
    shutil.copytree(preflight.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    _add_line(package / "kernels/merge.py")
    run_program(2, _table, [str(tmp_path)])
    assert not (files / "outputs/checkpoint").exists()
