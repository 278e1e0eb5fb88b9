"""Prompts of the study: needles and RULER's tasks, made once and kept as tokens.

They take minutes to make, and words that another machine may not have installed.
"""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from scripts.study.sizes import Asked
from titan_sparse.config import Config
from titan_sparse.data.documents import open_documents
from titan_sparse.data.tokenizer import load_tokenizer
from titan_sparse.evaluation.answers import Sample
from titan_sparse.evaluation.haystack import Haystack
from titan_sparse.evaluation.needle import depths, needle_samples
from titan_sparse.evaluation.ruler import ruler_samples

_SEED = 0


def write_prompts(folder: Path, asked: Asked) -> None:
    """Write folder/prompts.json and prompts.npy, hidden in the prose that is held out.

    Raises ValueError for a length that does not hold a task.
    """
    tokenizer = load_tokenizer(str(folder / "prose"))
    config = Config()
    config.data.source = str(folder / "prose")
    config.data.tokenizer = str(folder / "prose")
    haystack = Haystack(open_documents(config.data, tokenizer), tokenizer)
    lengths = list(asked.lengths)
    samples = needle_samples(haystack, lengths, depths(asked.depths), asked.needles, _SEED)
    for task in asked.tasks:
        samples += ruler_samples(haystack, [task], lengths, asked.samples, _SEED)
        print(f"prompts: {task}", flush=True)
    records = []
    for sample in samples:
        records.append(asdict(sample) | {"prompt": len(sample.prompt), "answer": sample.answer})
    tokens = np.concatenate([sample.prompt for sample in samples])
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    np.save(folder / "prompts.npy", tokens.astype(dtype))
    text = json.dumps(records, default=lambda ids: ids.tolist())
    (folder / "prompts.json").write_text(text + "\n", encoding="utf-8")


def read_prompts(folder: Path) -> list[Sample]:
    """All that write_prompts() wrote; a needle's `about` has a depth, a task's of RULER its name."""
    tokens = np.load(folder / "prompts.npy").astype(np.int64)
    samples = []
    start = 0
    for record in json.loads((folder / "prompts.json").read_text(encoding="utf-8")):
        stop = start + record["prompt"]
        record["prompt"] = tokens[start:stop]
        record["answer"] = np.array(record["answer"], dtype=np.int64)
        record["references"] = tuple(record["references"])
        samples.append(Sample(**record))
        start = stop
    return samples


def needles(samples: list[Sample], count: int) -> list[Sample]:
    """Of each length and depth the first `count`."""
    return _first([sample for sample in samples if "depth" in sample.about], count)


def ruler(samples: list[Sample], tasks: tuple[str, ...], count: int) -> list[Sample]:
    """Of each of these tasks and each length the first `count`."""
    return _first([sample for sample in samples if sample.about.get("task") in tasks], count)


def _first(samples: list[Sample], count: int) -> list[Sample]:
    """Of the samples that are about the same thing the first `count`."""
    seen: dict[str, int] = {}
    chosen = []
    for sample in samples:
        about = str(sample.about)
        seen[about] = seen.get(about, 0) + 1
        if seen[about] <= count:
            chosen.append(sample)
    return chosen
