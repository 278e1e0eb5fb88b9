"""examples/ without a trainer: attend() alone, and one sequence over several processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import torchrun

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
