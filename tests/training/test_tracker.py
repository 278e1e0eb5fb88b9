"""metrics.trackers = "wandb", offline: one wandb run for each of our runs."""

import json
import os
from pathlib import Path

import pytest

from tests.distributed import run_processes
from tests.runs import metrics_of, tiny_config, train, write_texts
from titan_sparse.config import Config, ConfigError, check_start
from titan_sparse.training.metrics import json_ready
from titan_sparse.training.metrics_output import open_tracker

SETTINGS = {
    "metrics__trackers": "wandb",
    "training__steps": 2,
    "training__dtype": "float32",
    "checkpoint__enable": True,
    "validation__enable": True,
    "validation__every": 2,
    "validation__windows": 2,
    "validation__position_buckets": 2,
    "validation__needle_lengths": "420",
    "validation__needle_depths": 1,
    "validation__needle_samples": 1,
}


OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    # Its own process may start slowly, beside other tests.
    "WANDB__SERVICE_WAIT": "300",
    "WANDB_INIT_TIMEOUT": "300",
}
"""For the processes of a run, which are forked from one that knows no variables set here."""


def _two_halves(folder: Path) -> None:
    """Leaves in folder/seen.jsonl what wandb was given: the run, its planned steps, the record."""
    os.environ |= OFFLINE
    import wandb

    log = wandb.Run.log

    def noted_log(run: wandb.Run, record: dict) -> None:
        seen = [run.id, run.config["training"]["steps"], json_ready(record)]
        with open(folder / "seen.jsonl", "a") as file:
            file.write(json.dumps(seen) + "\n")
        log(run, record)

    wandb.Run.log = noted_log
    config = tiny_config(folder, "run", **SETTINGS)
    train(config)
    config.training.steps = 4
    train(config)


def test_a_run_and_its_continuation_are_one_run(tmp_path):
    pytest.importorskip("wandb")
    write_texts(tmp_path / "texts")
    run_processes(2, _two_halves, tmp_path)
    run = tmp_path / "run"
    number = (run / "wandb_run_id").read_text().strip()
    # Rank 0 alone, before and after.
    files = (run / "wandb").glob("offline-run-*/*.wandb")
    assert [file.name for file in files] == [f"run-{number}.wandb"] * 2
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert {name for name, _, _ in seen} == {number}
    lines = metrics_of(tiny_config(tmp_path, "run"))
    found = [(steps, record) for _, steps, record in seen if "loss" in record]
    assert [steps for steps, _ in found] == [2, 2, 4, 4]
    assert [record for _, record in found] == lines
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    validations = [record for _, _, record in seen if "validation/loss" in record]
    text = (run / "validation.jsonl").read_text()
    for row, line in zip(validations, map(json.loads, text.splitlines()), strict=True):
        assert row["step"] == line["step"]
        assert row["validation/loss"] == pytest.approx(line["loss"])
        assert row["validation_needle/loss"] == pytest.approx(line["needle"]["loss"])
        start = line["buckets"][1]["start"]
        assert row[f"validation_loss_by_position/{start}"] == line["buckets"][1]["loss"]


def test_what_cannot_begin_is_refused_in_one_line(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def refuse(**_):
        raise wandb.errors.UsageError("no API key\nconfigured")

    monkeypatch.setattr(wandb, "init", refuse)
    config = tiny_config(tmp_path, "run", metrics__trackers="wandb")
    with pytest.raises(ValueError, match="no API key configured; set WANDB_MODE=offline") as caught:
        open_tracker(config)
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("RANK", "1")
    assert open_tracker(config).run is None


def test_what_is_not_installed_is_refused(tmp_path, monkeypatch):
    """Also beside a folder "wandb" of earlier runs, which Python takes for a package."""
    config = Config()
    config.training.output_dir = str(tmp_path / "run")
    config.metrics.trackers = "wandb"
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match=r'is not installed; pip install -e "\.\[wandb\]"'):
        check_start(config)
