"""examples/: attend() alone, one sequence over several processes, and trainers, on one process and
on two with the same losses."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import torchrun
from tests.integrations.transformers.trainer_runs import assert_trains_alike, numbers, read

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def printed(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_attention():
    """Sparse, and as close to dense attention as it was asked to be."""
    text = printed([sys.executable, "examples/attention.py"])
    found = re.search(r"density ([\d.]+)%, recall ([\d.]+)%, mean error ([\d.]+)%", text)
    density, recall, error = map(float, found.groups())
    assert density < 40 and recall >= 90 and error < 15


def test_context_parallel_trains_as_one_process_does():
    texts = [printed(torchrun(n, "examples/context_parallel.py")) for n in (1, 2)]
    losses = []
    for n, text in zip((1, 2), texts):
        first, last = re.search(rf"{n} processes, loss ([\d.]+) to ([\d.]+)", text).groups()
        losses.append((float(first), float(last)))
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)
    first, last = losses[0]
    assert last < first - 0.01


# With trainers of transformers and TRL.


def run_example(out: Path, *words: str) -> list[dict[str, float]]:
    """The log of an example, run as a program that is started by its path."""
    out = out.with_name(out.name.rpartition("-")[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        patch.setattr(sys, "argv", [*words, "--tiny", "--out", str(out)])
        made = importlib.import_module(words[0]).main()
    # With an adapter, Trainer would look for some, and torch would warn that there are none.
    assert made.args.ddp_find_unused_parameters is False
    return [line for line in numbers(made) if "loss" in line]


def trainer(out: Path) -> list[dict[str, float]]:
    return run_example(out, "trainer", "--sparse", "--layout", "zigzag")


def trl_sft(out: Path) -> list[dict[str, float]]:
    return run_example(out, "trl_sft")


def trl_hybrid(out: Path) -> list[dict[str, float]]:
    return run_example(out, "trl_sft", "--hybrid", "--steps", "2")


def test_two_processes_train_like_one(tmp_path):
    pytest.importorskip("trl")
    assert_trains_alike(tmp_path, 2, [trainer, trl_sft, trl_hybrid])
    for name in ("trainer", "trl_sft"):
        losses = [line["loss"] for line in read(tmp_path, name, 1)]
        assert len(losses) == 3 and losses[2] < losses[0]
        assert (tmp_path / name / "model.safetensors").exists()
        state = json.loads((tmp_path / name / "trainer_state.json").read_text())
        assert state["global_step"] == 3
    assert (tmp_path / "trl_sft/tokenizer.json").exists()


@pytest.mark.parametrize("name", ["trainer", "trl_sft"])
def test_examples_are_modules_too(name):
    """As python -m examples.NAME loads them. run_example() loads them as python
    examples/NAME.py does."""
    pytest.importorskip("trl")
    module = importlib.import_module(f"examples.{name}")
    assert module.tiny_model.__module__ == "examples.tiny"
