"""The types that a user's editor sees: attend() and what belongs to it, checked by mypy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

USER = """
import torch
from torch import Tensor
from typing import assert_type

from titan_sparse import ContextParallel, attend, masks, patterns, recording
from titan_sparse.attention.attend import Auxiliary

q = torch.randn(1, 4, 256, 32)
mask = masks.Documents([100, 156]) & masks.SlidingWindow(64)
pattern = patterns.VerticalSlash(recall=0.9, max_verticals=16)
with recording(recall_rows=8) as seen:
    out = attend(q, q, q, mask, pattern, block_size=64)
assert_type(out, Tensor)
assert_type(out.sum(), Tensor)
both = attend(q, q, q, return_aux=True)
assert_type(both, tuple[Tensor, Auxiliary])
assert_type(both[1].lse, Tensor)
assert_type(seen.density(), Tensor)


def spread(cp: ContextParallel) -> Tensor:
    local = cp.shard(q, dim=2)
    return cp.unshard(attend(local, local, local, cp=cp), dim=2)
"""
MISTAKES = """
import torch

from titan_sparse import attend, masks, patterns

q = torch.randn(1, 4, 256, 32)
attend(q, q, q, mask="causal")
attend(q, q, q, patern=patterns.Dense())
patterns.VerticalSlash(recal=0.9)
masks.Documents(3)
"""


def checked(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """mypy's verdict on a user's file, outside of the repository and with the strict rules."""
    file = folder / "user.py"
    file.write_text(source)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports", "silent", str(file)]
    environment = os.environ | {"MYPYPATH": str(ROOT), "MYPY_CACHE_DIR": str(folder / "cache")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_users_file(tmp_path):
    pytest.importorskip("mypy")
    right = checked(USER, tmp_path)
    assert right.returncode == 0, right.stdout
    wrong = checked(MISTAKES, tmp_path)
    lines = [int(line.split(":")[1]) for line in wrong.stdout.splitlines() if ": error:" in line]
    assert sorted(set(lines)) == [7, 8, 9, 10], wrong.stdout
