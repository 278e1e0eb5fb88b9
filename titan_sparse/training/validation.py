"""[validation]: position loss and needles during training, which they do not change."""

import dataclasses
import hashlib
import json
import logging
import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from titan_sparse.config import Config, Data, needle_lengths
from titan_sparse.config.reading import config_errors
from titan_sparse.config.sources import format_of, single_source, source_weights
from titan_sparse.data.chat_template import as_prepared, load_template
from titan_sparse.data.documents import open_documents
from titan_sparse.data.shards import adds_bos, is_prepared
from titan_sparse.data.tokenizer import Tokenizer
from titan_sparse.evaluation import generation, needle, pictures, position
from titan_sparse.evaluation.answers import Sample, score_samples
from titan_sparse.evaluation.scorer import Scorer, Sequence
from titan_sparse.models.flavours import resolve
from titan_sparse.training.metrics import MetricsLog, json_ready
from titan_sparse.training.metrics_output import JsonLines

logger = logging.getLogger("titan_sparse")

_TEXT_TOKENS = 128
"""Most tokens that the model writes after validation.prompt."""
_TEMPERATURE = 0.7
"""With which these are drawn: a model that has learned little would repeat the most likely one."""


class Validator:
    """Read the sequences of the [validation] section once, and measure with them.

    Create it before any process group. Raises ValueError for a source that cannot be read, or
    lengths that are too short for a needle.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        section = self.section = config.validation
        self.length = config.training.seq_len
        self.output_dir = config.training.output_dir
        self.steps = config.training.steps
        self.sequences: list[Sequence] = []
        self.needles: list[Sample] = []
        self.prompt: NDArray[np.int64] | None = None
        if not section.enable:
            return
        with config_errors("[validation]: "):
            data = _data(config)
            documents = open_documents(data, tokenizer, config.model.initial_hf)
            self.sequences = position.first_windows(
                documents, data.min_document_length, self.length, self.length, section.windows
            )
        with config_errors("validation.needle_lengths: "):
            self.needles = needle.needle_samples(
                documents,
                needle_lengths(section),
                needle.depths(section.needle_depths),
                section.needle_samples,
                config.training.seed,
            )
        with config_errors("[validation]: "):
            if section.prompt:
                generation.refuse_linear_layers(resolve(**vars(config.model)))
                template = None
                if documents.sample_format.format == "messages":
                    template = load_template(data, config.model.initial_hf, tokenizer)
                self.prompt = generation.encode_prompt(
                    section.prompt, tokenizer, template, config.data.add_bos
                )

    def content_digest(self) -> str:
        """Identify the sequences and prompts. All ranks must have the same digest."""
        digest = hashlib.sha256()
        # All that the model reads.
        prompts = [] if self.prompt is None else [self.prompt]
        prompts += [needle.prompt for needle in self.needles]
        for tokens in [sequence.tokens for sequence in self.sequences] + prompts:
            digest.update(tokens.tobytes())
        return digest.hexdigest()

    def is_due(self, step: int) -> bool:
        """True if validation is due after `step`: every validation.every steps, and after the last
        one. Step 0 is the start."""
        section = self.section
        is_regular = step == self.steps or step % section.every == 0
        return section.enable and (is_regular if step > 0 else section.at_start)

    def run(self, scorer: Scorer, step: int, metrics: MetricsLog) -> dict[str, Any]:
        """Measure. Collective. Rank 0 appends to <output_dir>/validation.jsonl, TensorBoard, and
        metrics.trackers."""
        # A kernel or a library might draw from torch's generators.
        devices = [scorer.device] if scorer.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            losses = position.position_loss(
                scorer, self.sequences, self.length, self.section.position_buckets
            )
            record: dict[str, Any] = {"step": step, **losses}
            if self.needles:
                records = score_samples(scorer, self.needles, generate=False)
                record["needle"] = {**needle.means(records), "cells": needle.by_cell(records)}
            if self.prompt is not None:
                record["text"] = self._text(scorer)
        if dist.get_rank() == 0:
            lines = JsonLines(os.path.join(self.output_dir, "validation.jsonl"))
            lines.write(json_ready(record))
            lines.close()
            metrics.write_scalars(step, _scalars(record))
            board = metrics.board_from(step)
            if board is not None and self.needles:
                for name in ("score", "correct"):
                    figure = pictures.needle_figure(record["needle"]["cells"], name)
                    board.add_figure(f"validation_needle/{name}_by_depth", figure, step)
            if board is not None and self.prompt is not None:
                board.add_text("validation/text", f"    {record['text']}", step)
            logger.info(_line(record))
        return record

    def _text(self, scorer: Scorer) -> str:
        """The text that the model writes after validation.prompt. Collective."""
        columns = generation.stream(
            scorer, [self.prompt], _TEXT_TOKENS, lambda text: text[-1] in scorer.ends, _TEMPERATURE
        )
        # Compiled blocks would be compiled anew for every length.
        with torch.compiler.set_stance("force_eager"):
            text = "".join(generation.decoded(columns, scorer.tokenizer, scorer.ends))
        scorer.release()
        return text


def _data(config: Config) -> Data:
    """The [data] section with which validation.source is read."""
    data = config.data
    section = config.validation
    source = single_source(section.source or data.source, "validation.source")
    is_of_data = section.source in ("", data.source)
    split = section.split or (data.split if is_of_data else "train")
    # Keys that choose a part of data.source do not apply to another source.
    if is_prepared(source) and not is_of_data:
        least = data.min_document_length
        return Data(source=source, tokenizer=data.tokenizer, split=split, min_document_length=least)
    read = dataclasses.replace(
        data,
        source=source,
        format=format_of(data, source, "validation.source"),
        split=split,
        sequences="packed",
    )
    # As was trained, also where the tokens of data.source are prepared.
    read.add_bos = adds_bos(data)
    if read.format != "text" and source not in source_weights(data.source):
        made = as_prepared(data)
        read.chat_template = made.chat_template
        read.chat_template_kwargs = made.chat_template_kwargs
        read.loss_on = made.loss_on
    if not is_of_data:
        read.subset = ""
        read.join_packages &= source == "python"
    return read


def _scalars(record: dict[str, Any]) -> dict[str, float | None]:
    """By tags of TensorBoard."""
    values = {f"validation/{name}": record[name] for name in ("loss", "perplexity")}
    for bucket in record["buckets"]:
        values[f"validation_loss_by_position/{bucket['start']}"] = bucket["loss"]
    if "needle" in record:
        for name in ("score", "exact", "correct", "loss"):
            values[f"validation_needle/{name}"] = record["needle"][name]
    return values


def _line(record: dict[str, Any]) -> str:
    """For people."""
    when = f"after step {record['step']}" if record["step"] else "before the first step"
    parts = [
        f"validation {when}: loss {record['loss']:.4f}",
        f"perplexity {record['perplexity']:.3f}",
    ]
    known = [bucket for bucket in record["buckets"] if bucket["loss"] is not None]
    losses = " ".join(f"{bucket['loss']:.3f}" for bucket in known)
    start, stop = known[0]["start"], known[-1]["stop"]
    if len(known) > 1:
        parts.append(
            f"loss by position, from token {start:,} to {stop:,} in {len(known)} parts: {losses}"
        )
    if "needle" in record:
        parts.append(f"needles found {100 * record['needle']['score']:.0f} %")
    line = ", ".join(parts)
    if "text" in record:
        # A model that has learned little may write letters that would disturb a terminal.
        line += f"\n  text that it writes: {json.dumps(record['text'], ensure_ascii=False)}"
    return line
