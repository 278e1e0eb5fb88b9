"""The commands a user types, shortened: torchrun on the demo, and a refusal before anything starts."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs.pages import demo_command

ROOT = Path(__file__).parents[1]


def _run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    return subprocess.run(
        command,
        cwd=ROOT,
        env=clean | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
    )


def test_demo(tmp_path):
    """README's command, as it stands there, with options that shorten it."""
    result = _run(
        sys.executable,
        "-m",
        "torch.distributed.run",
        *demo_command().words[1:],
        "--training.steps",
        "8",
        "--training.seq_len",
        "512",
        "--lr_scheduler.warmup_steps",
        "2",
        "--metrics.recall_every",
        "4",
        "--training.output_dir",
        str(tmp_path),
        "--checkpoint.interval",
        "4",
        "--profiling.enable",
        "--profiling.first_step",
        "3",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert (
        lines[-1]["loss"] < lines[0]["loss"] and 5 < lines[0]["loss"] < 6
    )  # ln(258) = 5.55 for uniform bytes
    assert lines[-1]["tokens_seen"] == 8 * 512  # each token once, whatever the ranks
    assert all(
        0 < line["density"] <= 1 and line["mfu"] is None and line["memory_gib"] > 0
        for line in lines
    )
    assert [line["step"] for line in lines if "recall" in line] == [1, 4, 8]
    assert all(0 < line["recall"] <= 1 for line in lines if "recall" in line)
    assert (tmp_path / "config.toml").is_file() and (
        tmp_path / "checkpoint/step-8/.metadata"
    ).is_file()
    assert (
        list((tmp_path / "tensorboard").iterdir()) and (tmp_path / "profile/rank0.json").is_file()
    )
    assert (
        "vertical_slash" in result.stdout
        and "eager" in result.stdout
        and "100 %  ETA 00:00:00" in result.stdout
    )
    assert len(re.findall(r"^step ", result.stdout, re.MULTILINE)) == 8


def test_refusal_comes_before_anything_starts(tmp_path):
    result = _run(
        sys.executable,
        "train.py",
        "--config",
        "train_configs/demo_cpu.toml",
        "--attention.patern",
        "dense",
    )
    assert (
        result.returncode == 2
        and "attention.pattern" in result.stderr
        and result.stderr.count("\n") == 1
    )
    wrong_world = _run(
        sys.executable, "train.py", "--config", "train_configs/demo_cpu.toml", WORLD_SIZE="3"
    )
    assert (
        wrong_world.returncode == 2
        and "parallelism.cp" in wrong_world.stderr
        and wrong_world.stderr.count("\n") == 1
    )
    no_data = _run(sys.executable, "train.py", "--data.source", str(tmp_path / "none.jsonl"))
    assert (
        no_data.returncode == 2
        and "data.source" in no_data.stderr
        and no_data.stderr.count("\n") == 1
    )


@pytest.mark.parametrize("is_run", [False, True], ids=["help", "run"])
def test_reader_of_the_output_may_leave(is_run, tmp_path):
    """As in `train.py ... | head`: status 0, no traceback, and training continues."""
    (tmp_path / "text.txt").write_text("some words " * 100)
    run = "--training.steps 2 --training.seq_len 128 --training.dtype float32 --model.layers 1"
    run += " --training.device cpu --lr_scheduler.warmup_steps 1 --metrics.log_every 1"
    run += f" --data.source {tmp_path} --training.output_dir {tmp_path / 'run'}"
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as output:
        result = subprocess.run(
            [sys.executable, "train.py", *(run.split() if is_run else ["--help"])],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert result.returncode == 0
    assert "rror" not in result.stderr and "Traceback" not in result.stderr, result.stderr
    if is_run:
        assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("name", ["demo_cpu", "qwen3_8b_1m", "variants/mtraining"])
def test_print_config_of_any_number_of_ranks(name):
    config = f"train_configs/{name}.toml"
    result = _run(sys.executable, "train.py", "--config", config, "--print-config")
    assert result.returncode == 0, result.stderr
    assert tomllib.loads(result.stdout)["attention"]["pattern"] == "vertical_slash"
