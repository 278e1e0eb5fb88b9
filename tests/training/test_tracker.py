"""metrics.trackers = "wandb", offline: one wandb run for each of our runs."""

import json
import os
import struct
from pathlib import Path

import pytest

from tests.distributed import run_processes
from tests.runs import metrics_of, tiny_config, train, write_texts
from titan_sparse.config import Config, ConfigError, check_start
from titan_sparse.training.metrics_output import Tracker, open_tracker

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


_BLOCK = 32768

OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    # Its own process may start slowly, beside other tests.
    "WANDB__SERVICE_WAIT": "300",
    "WANDB_INIT_TIMEOUT": "300",
}
"""For the processes of a run, which are forked from one that knows no variables set here."""


def _records(file: Path) -> list:
    """The records of a .wandb file: LevelDB's log, in blocks of 32 KiB, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content = file.read_bytes()
    records = []
    whole = b""
    at = 7
    while at + 7 <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        # 1: a whole record; 2, 3 and 4: its first piece, more of them, and its last.
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            records.append(record)
            whole = b""
    return records


def _history(records: list) -> list[dict]:
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            names = ["/".join(item.nested_key) or item.key for item in items]
            rows.append(
                {name: json.loads(item.value_json) for name, item in zip(names, items, strict=True)}
            )
    return rows


def _config(records: list) -> dict:
    values = {}
    for record in records:
        if record.WhichOneof("record_type") == "config":
            for item in record.config.update:
                values[item.key or item.nested_key[0]] = json.loads(item.value_json)
    return values


def _two_halves(folder: Path) -> None:
    os.environ |= OFFLINE
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
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"), key=os.path.getmtime)
    assert [file.name for file in files] == [f"run-{number}.wandb"] * 2
    rows = [_history(_records(file)) for file in files]
    lines = metrics_of(tiny_config(tmp_path, "run"))
    found = [row for row in rows[0] + rows[1] if "loss" in row]
    assert [row["step"] for row in found] == [line["step"] for line in lines] == [1, 2, 3, 4]
    for name in ("loss", "grad_norm", "density", "tokens_seen"):
        assert [row[name] for row in found] == pytest.approx([line[name] for line in lines])
    validations = [row for row in rows[0] + rows[1] if "validation/loss" in row]
    text = (run / "validation.jsonl").read_text()
    for row, line in zip(validations, map(json.loads, text.splitlines()), strict=True):
        assert row["step"] == line["step"]
        assert row["validation/loss"] == pytest.approx(line["loss"])
        assert row["validation_needle/loss"] == pytest.approx(line["needle"]["loss"])
        start = line["buckets"][1]["start"]
        assert row[f"validation_loss_by_position/{start}"] == line["buckets"][1]["loss"]
    configs = [_config(_records(file)) for file in files]
    assert [config["training"]["steps"] for config in configs] == [2, 4]
    assert configs[0]["attention"]["pattern"] == "vertical_slash"


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


def test_nothing_is_written_without_a_tracker():
    tracker = open_tracker(Config())
    assert isinstance(tracker, Tracker) and tracker.run is None
    tracker.log({"step": 1})
    tracker.log_validation({"step": 1})
    tracker.close()
