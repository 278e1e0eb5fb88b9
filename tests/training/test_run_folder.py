"""What a start leaves in the run folder, with two processes, without git, twice in a second."""

import io
import json
import logging
import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import titan_sparse
from tests.distributed import run_processes
from tests.runs import tiny_config
from titan_sparse.config import to_toml
from titan_sparse.training.run_folder import begin_start, git_commit, log_error

CPU = torch.device("cpu")


def _two_starts(folder: Path) -> None:
    """Both ranks log; the second start of this second has a folder of its own."""
    rank = dist.get_rank()
    terminal = logging.StreamHandler(io.StringIO())
    root, ours = logging.getLogger(), logging.getLogger("titan_sparse")
    root.handlers = [terminal]
    root.setLevel(logging.WARNING)
    ours.setLevel(logging.INFO if rank == 0 else logging.WARNING)

    config = tiny_config(folder, "a run with spaces", optimizer__lr=0.5)
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
    assert {first, second} == set((folder / "a run with spaces/starts").iterdir())

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
    (folder / "no folder").mkdir(exist_ok=True)
    (folder / "no folder/starts").touch()
    with pytest.raises(OSError, match="starts"):
        begin_start(tiny_config(folder, "no folder"), CPU)


def test_two_starts_in_a_second(tmp_path):
    run_processes(2, _two_starts, tmp_path)
    for folder in (tmp_path / "a run with spaces/starts").iterdir():
        start = json.loads((folder / "start.json").read_text())
        assert start["world_size"] == 2 and start["restart_count"] == 3
        assert [rank["rank"] for rank in start["ranks"]] == [0, 1]
        assert {rank["host"] for rank in start["ranks"]} == set(start["hosts"])
        assert [rank["device"] for rank in start["ranks"]] == ["cpu", "cpu"]
        assert start["versions"]["torch"] == torch.__version__
        assert start["versions"]["titan_sparse"] == titan_sparse.__version__
        assert start["versions"]["torchtitan"].startswith("0.3.") and start["versions"]["python"]
        assert start["command"] and start["date"].startswith(folder.name[:3])
        config = tiny_config(tmp_path, "a run with spaces", optimizer__lr=0.5)
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
