"""Before the first step: ranks that differ do not start, and what a start
leaves in the run folder."""

import contextlib
import io
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import titan_sparse
from tests.data.helpers import train_tokenizer
from tests.distributed import on_ranks, run_program
from tests.models.helpers import change_tensors, set_values
from tests.models.transformers_models import save_model
from tests.runs import tiny_config, write_texts
from titan_sparse.commands import train
from titan_sparse.commands.plan import DEFAULT_CONSTANTS
from titan_sparse.config import to_toml
from titan_sparse.training import preflight
from titan_sparse.training.run_folder import begin_start, git_commit, log_error

WORDS = """
    --data.source=texts --data.tokenizer=tokenizer.json --model.initial_hf=hf --model.vocab_size=0
    --training.device=cpu --training.dtype=float32 --training.seq_len=64 --training.steps=2
    --attention.pattern=dense --attention.block_size=16 --checkpoint.enable
    --lr_scheduler.warmup_steps=1 --metrics.tensorboard=false
""".split()
BALANCED = """
    --parallelism.cp=2 --attention.layout=balanced --attention.balance_costs=costs.json
""".split()

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
    "the model's norm_eps": lambda f: set_values(f / "hf", rms_norm_eps=0.5),
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
    save_model(files / "hf", "qwen2")
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


CPU = torch.device("cpu")


@on_ranks(2)
def test_two_starts_in_a_second(tmp_path):
    """Both ranks log; the second start of this second has a folder of its own."""
    rank = dist.get_rank()
    terminal = logging.StreamHandler(io.StringIO())
    root, ours = logging.getLogger(), logging.getLogger("titan_sparse")
    root.handlers = [terminal]
    root.setLevel(logging.WARNING)
    ours.setLevel(logging.INFO if rank == 0 else logging.WARNING)

    config = tiny_config(tmp_path, "a run with spaces", optimizer__lr=0.5)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "3"
    first = begin_start(config, CPU)
    ours.info("of step 1")
    logging.getLogger("elsewhere").info("of another library")
    logging.getLogger("elsewhere").warning("a warning")
    log_error(KeyError("what went wrong"))
    second = begin_start(config, CPU)
    ours.info("of the second start")
    folders: list = [None] * dist.get_world_size()
    dist.all_gather_object(folders, (first, second))
    assert folders[0] == folders[1] and first != second
    assert {first, second} == set((tmp_path / "a run with spaces/starts").iterdir())

    log = (first / f"rank{rank}.log").read_text()
    for words in ("of step 1", "a warning", "KeyError: 'what went wrong'"):
        assert log.count(words) == 1, words
    assert "second" not in log
    assert "of the second start" in (second / f"rank{rank}.log").read_text()
    # The terminal shows what it would have shown.
    shown = terminal.stream.getvalue()
    assert ("of step 1" in shown) == (rank == 0) and "of another library" not in shown
    assert "a warning" in shown and "went wrong" not in shown

    # Every rank ends, with the reason of rank 0, where no folder can be made.
    (tmp_path / "no folder").mkdir(exist_ok=True)
    (tmp_path / "no folder/starts").touch()
    with pytest.raises(OSError, match="starts"):
        begin_start(tiny_config(tmp_path, "no folder"), CPU)

    for folder in (first, second):
        start = json.loads((folder / "start.json").read_text())
        assert start["world_size"] == 2 and start["restart_count"] == 3
        assert [rank["rank"] for rank in start["ranks"]] == [0, 1]
        assert {rank["host"] for rank in start["ranks"]} == set(start["hosts"])
        assert [rank["device"] for rank in start["ranks"]] == ["cpu", "cpu"]
        assert start["versions"]["torch"] == torch.__version__
        assert start["versions"]["titan_sparse"] == titan_sparse.__version__
        assert start["versions"]["torchtitan"].startswith("0.3.") and start["versions"]["python"]
        assert start["command"] and start["date"].startswith(folder.name[:3])
        assert (folder / "config.toml").read_text() == to_toml(config)


def test_git_commit(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        command = ("git", "-c", "user.name=a", "-c", "user.email=a@b", *words)
        return subprocess.check_output(command, cwd=tmp_path, text=True).strip()

    file = tmp_path / "code.py"
    file.write_text("1")
    git("init", "-q")
    # Such as a virtual environment in a checkout of something else.
    assert git_commit(file) is None
    git("add", "code.py")
    git("commit", "-qm", "one")
    file.write_text("2")
    assert git_commit(file) == {"commit": git("rev-parse", "HEAD"), "changed_files": 1}
    monkeypatch.setenv("PATH", "/nowhere")
    assert git_commit(file) is None
