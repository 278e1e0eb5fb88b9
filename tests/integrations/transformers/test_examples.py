"""examples/: both train on one process and on two, with the same losses, and save what they trained."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.distributed import run_processes
from tests.integrations.transformers.trainer_runs import assert_same, numbers, read, write

ROOT = Path(__file__).parents[3]
RUNS = {
    "trainer": ["trainer", "--tiny"],
    "trl_sft": ["trl_sft", "--tiny"],
}


def run_all(folder: str, runs: dict[str, list[str]] = RUNS) -> None:
    """Each run as a program; rank 0 writes FOLDER/NAME-PROCESSES.json."""
    # As for a program that is started by its path.
    sys.path.insert(0, str(ROOT / "examples"))
    for name, (module, *words) in runs.items():
        pytest.importorskip("trl")
        sys.argv = [module, *words, "--out", f"{folder}/{name}"]
        trainer = importlib.import_module(module).main()
        # With an adapter, Trainer would look for some, and torch would warn that there are none.
        assert trainer.args.ddp_find_unused_parameters is False
        write(folder, name, [line for line in numbers(trainer) if "loss" in line])
    sys.path.remove(str(ROOT / "examples"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("trl")
    folder = str(tmp_path_factory.mktemp("examples"))
    with pytest.MonkeyPatch.context() as kept:
        kept.setattr(sys, "argv", sys.argv)
        run_all(folder)
    run_processes(2, run_all, folder)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_like_one(folder, name):
    lines = read(folder, name, 1)
    assert_same(read(folder, name, 2), lines)
    losses = [line["loss"] for line in lines]
    assert len(losses) == 3 and losses[2] < losses[0]


@pytest.mark.slow
def test_sparse_attention(folder, tmp_path, monkeypatch):
    """The results differ from dense attention. Random weights attend nearly evenly, so rounding
    changes some selected keys, and two processes are only close to one.
    """
    monkeypatch.setattr(sys, "argv", sys.argv)
    sparse = {"sparse": ["trainer", "--tiny", "--sparse", "--layout", "zigzag"]}
    run_all(str(tmp_path), sparse)
    run_processes(2, run_all, str(tmp_path), sparse)
    one = read(tmp_path, "sparse", 1)
    for found, wanted in zip(read(tmp_path, "sparse", 2), one, strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=5e-4)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=5e-3)
    dense = read(folder, "trainer", 1)[0]["grad_norm"]
    assert one[0]["grad_norm"] != pytest.approx(dense, rel=1e-5)


def test_what_they_save(folder):
    for name in ("trainer", "trl_sft"):
        saved = Path(folder, name)
        assert (saved / "model.safetensors").exists()
        state = json.loads((saved / "trainer_state.json").read_text())
        assert state["global_step"] == 3
    assert (Path(folder, "trl_sft") / "tokenizer.json").exists()
