"""Starts that must be refused: wrong values of every key, odd files and folders, wrong launch environments."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from titan_sparse.config.sections import KINDS

GOOD = """
[data]
source = "{folder}/texts"
[training]
output_dir = "{folder}/run"
steps = 1
seq_len = 64
dtype = "float32"
device = "cpu"
[attention]
pattern = "dense"
block_size = 16
[lr_scheduler]
warmup_steps = 0
[metrics]
tensorboard = false
"""
"""A start that runs, one step on the CPU."""

HUGE = (2**63 - 1, 2**64, 10**14, 10**23)


@dataclass
class BadStart:
    """Words of the command line after GOOD, and what the one line must name."""

    words: list[str]
    named: str
    toml: bytes | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        text = " ".join([*self.words, *(f"{k}={v}" for k, v in self.environment.items())])
        return text or repr((self.toml or b"")[:40])


def wrong_values() -> list[BadStart]:
    """Of every key a value of the wrong type, and of every number values out of range."""
    starts = []
    for key, kind in KINDS.items():
        values: list[object] = []
        if kind is bool:
            values = ["yes", "1", ""]
        elif kind is int:
            values = ["x", "1.5", "", "-2", "nan", *HUGE]
        elif kind is float:
            values = ["x", "", "-2", "nan", "inf", "1e400", "-1e300"]
        elif get_args(kind):
            values = ["nothing", ""]
        starts += [BadStart([f"--{key}={value}"], key) for value in values]
    return starts
