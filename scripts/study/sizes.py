"""How large the study is: full, short, and a toy that only shows that it runs. Imports no torch."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

RULER = (
    "niah_single_1",
    "niah_single_2@own",
    "niah_single_3@own",
    "niah_multikey_1@own",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue@own",
    "niah_multiquery@own",
    "vt",
    "cwe",
    "fwe",
)
"""All tasks of titan_sparse.evaluation.ruler_tasks."""


@dataclass(frozen=True)
class Asked:
    """Prompts. lengths: tokens. depths: of needles, evenly spaced. needles: of each length and
    depth. samples: prompts of each task of RULER and length."""

    lengths: tuple[int, ...]
    depths: int
    needles: int
    tasks: tuple[str, ...]
    samples: int


@dataclass(frozen=True)
class TextSize:
    """How much text part 0 prepares.

    context: tokens. windows: contexts to train on, at most, by kind. held_out: documents of each
    kind, at most. most_characters: of each installed package. has_sdists: False takes installed
    packages alone, which are code and prose.
    """

    context: int
    windows: dict[str, int]
    held_out: int
    most_characters: int
    has_sdists: bool
    asked: Asked


@dataclass(frozen=True)
class Size:
    """Of the whole study.

    original: the model's context in tokens, which is extended to text.context. A step is one
    sequence of that. common: keys that all runs share. asked: of text.asked the part that is asked.
    windows: held-out contexts of each kind, for the loss by position. generates_ruler: whether
    RULER's tasks are also answered by generation. seconds: of a step or a forward, {"dense",
    "sparse"}, for --list. reserve_seconds: with less time left than that nothing is begun.
    """

    name: str
    text: TextSize
    original: int
    steps: int
    compile: bool
    windows: int
    asked: Asked
    generates_ruler: bool
    moba_chunk: int
    fixed_columns: int
    fixed_slashes: int
    window: int
    window_sinks: int
    common: dict[str, Any] = field(default_factory=dict)
    reserve_seconds: float = 60


REAL_TEXT = TextSize(
    context=65536,
    # 13 million tokens; less where packages hold less.
    windows={"code": 90, "prose": 80, "mixed": 50},
    held_out=16,
    most_characters=4_000_000,
    has_sdists=True,
    asked=Asked((4096, 8192, 16384, 32768, 65536), depths=5, needles=4, tasks=RULER, samples=5),
)
FULL = Size(
    "full",
    REAL_TEXT,
    original=8192,
    steps=300,
    compile=True,
    windows=12,
    asked=REAL_TEXT.asked,
    generates_ruler=True,
    # MoBA: chunks as large a share of the context as published (4096 of 524288). Fixed budgets as
    # published. The window visits an eighth of the pairs.
    moba_chunk=512,
    fixed_columns=1000,
    fixed_slashes=48,
    window=4096,
    window_sinks=64,
    common={
        "training.dtype": "bfloat16",
        "training.device": "cuda",
        "training.loss_chunk_tokens": 8192,
        "attention.backend": "triton",
        "metrics.log_every": 1,
        "metrics.recall_every": 20,
    },
)
SHORT = dataclasses.replace(
    FULL,
    name="short",
    steps=30,
    compile=False,
    windows=3,
    asked=dataclasses.replace(
        REAL_TEXT.asked,
        needles=1,
        tasks=("niah_multikey_1@own", "niah_multiquery@own", "vt"),
        samples=2,
    ),
    generates_ruler=False,
    common=FULL.common | {"metrics.recall_every": 8},
    reserve_seconds=40,
)
TOY_ASKED = Asked((512, 1024), depths=2, needles=1, tasks=("fwe",), samples=1)
TOY = Size(
    "toy",
    TextSize(
        context=1024,
        windows={"code": 16, "prose": 16},
        held_out=4,
        most_characters=20_000,
        has_sdists=False,
        asked=TOY_ASKED,
    ),
    original=512,
    steps=4,
    compile=False,
    windows=2,
    asked=TOY_ASKED,
    generates_ruler=True,
    moba_chunk=32,
    fixed_columns=32,
    fixed_slashes=6,
    window=128,
    window_sinks=8,
    common={
        "training.dtype": "float32",
        "training.device": "cpu",
        "training.loss_chunk_tokens": 1024,
        "attention.block_size": 32,
        "metrics.log_every": 1,
        "metrics.recall_every": 2,
        "metrics.recall_rows": 16,
    },
    reserve_seconds=0,
)
SIZES = {size.name: size for size in (FULL, SHORT, TOY)}
