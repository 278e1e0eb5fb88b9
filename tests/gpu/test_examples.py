"""examples/ on GPUs, from a folder of weights: bf16, FSDP2, one GPU and two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed import torchrun

pytest.importorskip("accelerate")

ROOT = Path(__file__).parents[2]
WORDS = ["--bf16", "--tokens", "2048", "--steps", "2"]
_PATHS = [str(ROOT / "examples"), str(ROOT), os.environ.get("PYTHONPATH", "")]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(_PATHS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with its tokenizer, as save_pretrained() writes them."""
    folder = str(tmp_path_factory.mktemp("model"))
    code = (
        "from tiny import tiny_model, tiny_tokenizer\n"
        "from titan_sparse.integrations.transformers import register\n"
        "register()\n"
        f"tiny_model().save_pretrained({folder!r})\n"
        f"tiny_tokenizer().save_pretrained({folder!r})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=ENVIRONMENT)
    return folder


def losses(module: str, gpus: int, words: list[str], out: Path) -> list[float]:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    command = torchrun(gpus, ROOT / "examples" / f"{module}.py", *words, "--out", out)
    subprocess.run(command, check=True, cwd=ROOT, env=ENVIRONMENT)
    assert (out / "model.safetensors").exists()
    log = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [line["loss"] for line in log if "loss" in line]


@pytest.mark.parametrize("layout", ["striped", "balanced"])
def test_trainer(folder, layout, tmp_path):
    words = ["--model", folder, *WORDS, "--layout", layout]
    one = losses("trainer", 1, words, tmp_path / "one")
    assert len(one) == 2
    two = losses("trainer", 2, words, tmp_path / "two")
    assert two == pytest.approx(one, rel=2e-3)


def test_trl_sft(folder, tmp_path):
    pytest.importorskip("trl")
    turns = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
    data = tmp_path / "data.jsonl"
    data.write_text((json.dumps({"messages": turns}) + "\n") * 2000)
    words = ["--model", folder, "--data", str(data), *WORDS]
    one = losses("trl_sft", 1, words, tmp_path / "one")
    two = losses("trl_sft", 2, words, tmp_path / "two")
    assert two == pytest.approx(one, rel=2e-3)
