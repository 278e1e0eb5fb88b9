"""Every problem with a start is reported in one line that names it, with status 2, before torch is
loaded.

The starts are in bad_starts.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bad_starts import (
    GOOD,
    GOOD_LAUNCH,
    BadStart,
    prepare,
    wrong_launches,
    wrong_paths,
    wrong_texts,
    wrong_toml,
    wrong_values,
)
from titan_sparse import train
from titan_sparse.config import check_launch, check_start, load_and_check
from titan_sparse.config.reading import ConfigError, load

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("starts")
    prepare(path)
    (path / "good.toml").write_text(GOOD.replace("{folder}", str(path)))
    return path


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GOOD_LAUNCH:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """main() fails where it goes on to load torch. Ranks that leave the line to the first do not wait."""
    monkeypatch.setattr(train, "set_allocator", lambda: pytest.fail("not refused before torch"))
    monkeypatch.setattr(train.time, "sleep", lambda seconds: None)


def words_of(start: BadStart, folder: Path) -> list[str]:
    words = [word.replace("{folder}", str(folder)) for word in start.words]
    if start.toml is not None:
        (folder / "bad.toml").write_bytes(start.toml)
        return ["--config", str(folder / "bad.toml")]
    if words[0:1] and words[0].startswith("--config"):
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


@pytest.mark.usefixtures("refused_early")
@pytest.mark.parametrize(
    "starts", [wrong_values, wrong_paths, wrong_toml, wrong_launches], ids=lambda f: f.__name__
)
def test_a_bad_start_is_one_line_before_torch(starts, folder, monkeypatch, capfd):
    for start in starts():
        with monkeypatch.context() as patch:
            assert_refused(start, folder, patch, capfd)
    assert not (folder / "run").exists()


@pytest.mark.parametrize("start", wrong_texts(), ids=str)
def test_unusable_texts_are_one_line_before_the_first_step(start, folder, monkeypatch, capfd):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert_refused(start, folder, monkeypatch, capfd)


@pytest.mark.parametrize(
    "start",
    [
        BadStart(["--training.steps=1e23"], "training.steps"),
        BadStart(["--data.source={folder}/none.jsonl"], "data.source"),
        BadStart(["--training.output_dir=/proc/run"], "training.output_dir"),
        BadStart([], "RANK", environment={"WORLD_SIZE": "2"}),
    ],
    ids=str,
)
def test_the_command_line_refuses_without_torch(start, folder):
    code = "import sys; from train import main; status = main(); sys.exit(3 if 'torch' in sys.modules else status)"
    result = subprocess.run(
        [sys.executable, "-c", code, *words_of(start, folder)],
        cwd=ROOT,
        env=os.environ | start.environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1 and start.named in result.stderr


def test_a_good_start_is_taken_and_leaves_no_trace(folder, monkeypatch):
    before = sorted(folder.rglob("*"))
    config, _ = load_and_check(["--config", str(folder / "good.toml")], 1, 1)
    check_start(config)
    check_launch()
    for name, value in GOOD_LAUNCH.items():
        monkeypatch.setenv(name, value)
    check_launch()
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1"}, {"MASTER_ADDR": "a"}], ids=str)
def test_one_process_needs_no_launcher(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    check_launch()


def test_what_starts_nothing_needs_no_files(folder, monkeypatch, capsys):
    words = ["--data.source=./none", "--training.output_dir=/proc/run", "--print-config"]
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(folder / "good.toml"), *words])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.main() == 0
    (folder / "printed.toml").write_text(capsys.readouterr().out)
    config, _ = load(["--config", str(folder / "printed.toml")])
    assert config.data.source == "./none"


def checkpoint_folder(folder: Path, *steps: int) -> list[str]:
    for step in steps:
        (folder / "checkpoint" / f"step-{step}").mkdir(parents=True)
    (folder / "text.txt").write_text("text")
    return [
        f"--training.output_dir={folder}",
        f"--data.source={folder / 'text.txt'}",
        "--checkpoint.enable",
    ]


def test_load_step_of_an_existing_or_an_older_checkpoint(tmp_path):
    """A run that continued from step 5 has deleted that checkpoint. The same command still starts."""
    words = checkpoint_folder(tmp_path, 10, 20)
    (tmp_path / "checkpoint" / "step-30").write_text("a file")
    for step in (5, 20):
        check_start(load([*words, f"--checkpoint.load_step={step}"])[0])
    with pytest.raises(ConfigError, match=r"load_step = 21: .* has only step-10, step-20; write"):
        check_start(load([*words, "--checkpoint.load_step=21"])[0])
