"""Turn text into shards of tokens (shards.py) with parallel processes. After an interruption,
finished shards are kept."""

import hashlib
import json
import logging
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from titan_sparse.config.sections import Data
from titan_sparse.data.chat_template import exported_files
from titan_sparse.data.documents import READER, FileState, file_states
from titan_sparse.data.recipe import OPTIONS, Recipe, open_rows, unpack
from titan_sparse.data.shards import (
    FORMAT,
    FORMAT_OF_CHATS,
    META,
    PLAN,
    read_offsets,
    shard_path,
    token_dtype,
    write_json,
    write_shard,
)
from titan_sparse.data.tokenizer import Encoded, load_tokenizer
from titan_sparse.models.huggingface_files import write_files

logger = logging.getLogger("titan_sparse")


class Writer:
    """Writes any shard of a recipe; each process has one."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe = recipe
        self.folder = folder
        self.tokenizer = load_tokenizer(recipe.tokenizer, recipe.split_special_tokens)
        self.rows = open_rows(recipe, self.tokenizer)
        self.encoder = self.rows.encoder
        # Identifies the files that the rows are read from; empty for a dataset in memory.
        self.source_digest = _source_digest(self.rows.source.files)
        self.dtype = token_dtype(self.tokenizer.vocab_size)
        rows_for_128_shards = -(-len(self.rows) // 128)
        self.shard_rows = recipe.shard_rows or min(max(rows_for_128_shards, 1), 16384)
        self.shards = -(-len(self.rows) // self.shard_rows)

    def write(self, number: int) -> int:
        """Write a shard; returns its number. The shard's .json holds what was kept."""
        if self.encoder:
            self.encoder.skipped.clear()
        # Filled as write_shard() goes through the documents.
        left_out: Counter[str] = Counter(empty=0, filtered=0)
        documents = self._kept_documents(number, left_out)
        offsets, learned = write_shard(self.folder, number, documents, self.dtype)
        counts = {"number": number, "documents": len(offsets) - 1, "tokens": offsets[-1]}
        counts |= left_out
        if self.encoder:
            counts["learned"] = learned
            counts["skipped"] = dict(self.encoder.skipped)
        self._check_source()
        # Written last: a shard with this file is complete.
        write_json(shard_path(self.folder, number, "json"), counts)
        return number

    def _check_source(self) -> None:
        """Raises ValueError if a file has changed since the source was opened."""
        paths = [path for path, *_ in self.rows.source.files]
        if _source_digest(file_states(paths)) != self.source_digest:
            raise ValueError(
                f"the files of {self.recipe.source} have changed while they were read; delete "
                f"{self.folder}, and run the same command again"
            )

    def _kept_documents(self, number: int, left_out: Counter[str]) -> Iterator[Encoded]:
        """The documents of a shard that are within the limits; the others are counted."""
        first = number * self.shard_rows
        for row in range(first, min(first + self.shard_rows, len(self.rows))):
            for document in self.rows.documents(row):
                # Without the end-of-document token.
                length = len(document.tokens) - 1
                if length == 0:
                    left_out["empty"] += 1
                elif self.recipe.min_length <= length <= (self.recipe.max_length or length):
                    yield document
                else:
                    left_out["filtered"] += 1


def histogram(lengths: NDArray[np.int64]) -> dict[str, list[int]]:
    """Documents by length: {power of two: [documents, their tokens]}.

    A power of two counts the documents with at least that many tokens and less than twice as many.
    """
    found = {}
    exponents = np.frexp(lengths)[1] - 1
    for exponent in np.unique(exponents).tolist():
        within = lengths[exponents == exponent]
        found[str(1 << exponent)] = [len(within), int(within.sum())]
    return found


def prepare(recipe: Recipe, out: str, processes: int = 1) -> dict[str, Any]:
    """Write the folder `out`, or what is missing of it. Returns the content of meta.json.

    Raises ValueError for a source or options that cannot be used, for an `out` that was begun with
    another source, tokenizer, option, or version of the rules (READER), and if no document is left.
    """
    folder = Path(out).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{out} is a file; write a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / PLAN).is_file():
        raise ValueError(f"{out} holds other files; write a new or empty folder")
    if recipe.reads_mds:
        unpack(recipe.source)
    writer = Writer(recipe, folder)
    # With these files, the folder can also be used as data.tokenizer.
    lent = Data(tokenizer=recipe.tokenizer, chat_template=recipe.chat_template)
    beside = exported_files(lent, "", writer.tokenizer)
    if writer.encoder and writer.encoder.notice:
        logger.warning(writer.encoder.notice)
    _check_plan(folder, out, _plan(writer))

    numbers = range(writer.shards)
    missing = [number for number in numbers if not shard_path(folder, number, "json").is_file()]
    done = writer.shards - len(missing)
    written = _write_shards(writer, missing, processes)
    for _ in tqdm(written, initial=done, total=writer.shards, unit="shard", disable=None):
        pass
    return _finish(writer, out, beside)


_writer: Writer | None = None
"""The writer of a worker process."""


def _start_worker(recipe: Recipe, folder: Path) -> None:
    global _writer
    # The parent process handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _writer = Writer(recipe, folder)


def _write(number: int) -> int:
    # Files may have changed since the first process opened them.
    _check_plan(_writer.folder, str(_writer.folder), _plan(_writer))
    return _writer.write(number)


def _write_shards(writer: Writer, missing: list[int], processes: int) -> Iterator[int]:
    """Write the missing shards; yields the number of each when it is complete."""
    processes = min(processes, len(missing))
    if processes <= 1:
        for number in missing:
            yield writer.write(number)
        return
    # Do not fork this process, because the libraries that read and tokenize have started threads.
    # The fork server has only imported them.
    context = get_context("forkserver")
    context.set_forkserver_preload(["datasets", "transformers", __name__])
    pool = ProcessPoolExecutor(processes, context, _start_worker, (writer.recipe, writer.folder))
    try:
        futures = [pool.submit(_write, number) for number in missing]
        for future in as_completed(futures):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _plan(writer: Writer) -> dict[str, Any]:
    """The content of plan.json: everything that decides what the shards of `writer` hold."""
    recipe, tokenizer = writer.recipe, writer.tokenizer
    path = Path(recipe.source).expanduser()
    digests = {"tokenizer_digest": tokenizer.digest, "source_files": writer.source_digest}
    if writer.encoder:
        digests["template_digest"] = writer.rows.sample_format.template
    if recipe.source_tokenizer:
        digests["source_tokenizer_digest"] = writer.rows.source_tokenizer.digest
    return {
        "format": FORMAT_OF_CHATS if writer.encoder else FORMAT,
        "reader": READER,
        # A plan has a format of its own.
        **{{"format": "row_format"}.get(name, name): getattr(recipe, name) for name in OPTIONS},
        **digests,
        "source": str(path.resolve()) if path.exists() else recipe.source,
        "end_of_document": tokenizer.end_of_document,
        # Not the option: most tokenizers have no such token.
        "add_bos": bool(len(writer.rows.begin) and writer.rows.sample_format.takes_bos),
        "vocab_size": tokenizer.vocab_size,
        "shard_rows": writer.shard_rows,
        "rows": len(writer.rows),
    }


def _source_digest(files: Sequence[FileState]) -> str:
    return hashlib.sha256(json.dumps(files).encode()).hexdigest() if files else ""


def _check_plan(folder: Path, out: str, plan: dict[str, Any]) -> None:
    """Write the plan, or compare it with the one that `out` was begun with."""
    path = folder / PLAN
    if not path.is_file():
        write_json(path, plan)
        return
    saved = _read_counts(path)
    differences = []
    for key, value in plan.items():
        # Two paths that are written differently name the same file if the digests are equal.
        if key in ("tokenizer", "source_tokenizer", "chat_template") or saved.get(key) == value:
            continue
        if key == "source_files":
            differences.append("the source's files have changed")
        elif key == "reader":
            other = "another version of titan_sparse, which reads or tokenizes differently"
            differences.append(other)
        else:
            differences.append(f"{key} was {saved.get(key)} and is {value}")
    if differences:
        raise ValueError(
            f"{out} was begun with something else ({'; '.join(differences)}); "
            "write another folder, or delete this one"
        )


def _finish(writer: Writer, out: str, beside: dict[str, bytes]) -> dict[str, Any]:
    """Write the files `beside` and meta.json, which makes the folder complete."""
    folder = writer.folder
    shards = []
    lengths = []
    total: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for number in range(writer.shards):
        shard = _read_counts(shard_path(folder, number, "json"))
        # Also check shards of an interrupted run: the files must match what was counted.
        offsets = read_offsets(out, folder, shard, writer.dtype, writer.encoder is not None)
        lengths.append(np.diff(offsets) - 1)
        shards.append({key: shard[key] for key in ("number", "documents", "tokens")})
        skipped.update(shard.pop("skipped", {}))
        total.update(shard)
    if total["documents"] == 0:
        reason = "no document is within --min-length and --max-length"
        if skipped:
            reason = f"all chats are skipped, most because {skipped.most_common(1)[0][0]}"
        raise ValueError(f"{writer.recipe.source}: {reason}")
    meta = {
        **_read_counts(folder / PLAN),
        "dtype": writer.dtype,
        **{key: total[key] for key in ("documents", "tokens", "empty", "filtered")},
        "bad_rows_skipped": writer.rows.source.skipped + skipped.total(),
        "histogram": histogram(np.concatenate(lengths)),
        "shards": shards,
    }
    if writer.encoder:
        meta["learned"] = total["learned"]
        meta["skipped"] = dict(skipped.most_common())
    write_files(beside, folder)
    write_json(folder / META, meta)
    return meta


def _read_counts(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; delete it and run again") from error
