"""Documents of tokens: of texts (Python files of this machine, local data files, or a Hugging Face
dataset), which are tokenized when first needed, or of prepared shards."""

import functools
import hashlib
import importlib.util
import json
import logging
import os
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from titan_sparse.config.sections import Data
from titan_sparse.config.sources import data_files, is_path
from titan_sparse.data.chats import ChatEncoder
from titan_sparse.data.rows import (
    FORMS,
    Row,
    chat_form,
    columns_to_read,
    file_rows,
    needed_columns,
    no_column,
    table_row,
)
from titan_sparse.data.shards import TokenShards, is_prepared
from titan_sparse.data.tokenizer import Encoded, SampleFormat, Tokenizer, begun
from titan_sparse.options.values import full_disk_at, one_line, show

logger = logging.getLogger("titan_sparse")

READER = 5
"""Version of the rules that turn a source into rows and tokens: rows.py, chats.py, recipe.py, and
tokenizer.py. It is in the name of the cache of rows and in the plan.json of prepare_data. Increase
it when the same source would give other rows or tokens: then a cache is read anew, and a folder
that is not finished is not continued."""
CACHED_AT_ONCE = 1 << 20
"""Letters of rows that are held in memory while a cache is written."""
NOT_STDLIB = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class LazyTexts:
    """The texts of all documents, in an order that is the same in each run. Text `i` is
    `read(items[i])`, when it is asked for.

    `files` are the states of all files that they come from, in the order of the texts. `skipped` of
    the texts are empty because of data.bad_rows = "skip".
    """

    items: Sequence[Any]
    read: Callable[[Any], str]
    files: Sequence["FileState"] = ()
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int, /) -> str:
        return self.read(self.items[index])


def open_source(data: Data) -> LazyTexts:
    """Open the documents that the [data] section names."""
    if data.source == "python":
        source = _open_python(data.join_packages)
    elif is_path(data.source):
        source = _open_files(data)
    else:
        source = _open_dataset(data)
    if len(source) == 0:
        raise ValueError(
            f'data.source = "{data.source}" holds no documents; write a source that holds some'
        )
    return source


def _open_python(join_packages: bool) -> LazyTexts:
    """The standard library's and torch's own files: real, long-range text that needs no
    download."""
    files = sorted(_python_files())
    states = file_states(path for _, path in files)
    if not join_packages:
        return LazyTexts(files, lambda file: _read(file[1]), states)
    files_by_package = defaultdict(list)
    for name, path in files:
        files_by_package[name.rpartition("/")[0]].append((name, path))
    return LazyTexts(list(files_by_package.values()), join_files, states)


def _python_files() -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of each file. The name is equal on all machines, and the path is not."""
    roots = {"stdlib": Path(sysconfig.get_paths()["stdlib"])}
    # find_spec finds a top-level package without running it.
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        roots["torch"] = Path(spec.origin).parent
    for root_name, root in roots.items():
        for path in root.rglob("*.py"):
            relative = path.relative_to(root)
            if NOT_STDLIB.isdisjoint(relative.parts) and path.is_file() and path.stat().st_size:
                yield f"{root_name}/{relative.as_posix()}", path


def _read(path: Path) -> str:
    # As bytes, because read_text() would turn CRLF into LF.
    return path.read_bytes().decode("utf-8-sig", errors="replace")


def join_files(files: list[tuple[str, Path]]) -> str:
    """One text of (name, path) pairs: each file after a line with its name.

    Bytes that are not UTF-8 are replaced.
    """
    return "\n".join(f"# {name}\n{_read(path)}" for name, path in files)


def _open_files(data: Data) -> LazyTexts:
    if data.subset or data.split != "train":
        raise ValueError(
            "data.subset and data.split choose within a Hugging Face dataset; "
            f'leave them out, or as "" and "train", for the files of data.source = "{data.source}"'
        )
    files, others = data_files(data.source)
    if others:
        logger.info("data.source = %s: these were not read: %s", data.source, others)
    states = file_states(files)
    table = _cached_rows(states, data)
    problems = table.column("problem").drop_null()
    if len(problems):
        logger.warning(
            'data.bad_rows = "skip": %d of %d rows of %s are skipped; the first: %s',
            len(problems),
            len(table),
            data.source,
            problems[0],
        )
    if len(problems) == len(table) > 0:
        raise ValueError(f'data.source = "{data.source}" has only bad rows; {problems[0]}')
    for form in table.column("form").unique().to_pylist():
        _log_form(data.source, form)
    texts = table.column("text")
    return LazyTexts(range(len(texts)), lambda row: texts[row].as_py(), states, len(problems))


def _cached_rows(states: list["FileState"], data: Data) -> Any:
    """The rows of the files as a pyarrow.Table with the columns text, problem, and form, mapped
    from a cache.

    All rows are read now, or were read for the cache, so errors are reported before training.
    """
    import filelock
    import pyarrow

    field = _field(data)
    key = json.dumps([READER, states, field, data.format, data.bad_rows])
    path = _cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()}.arrow"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # One rank of a node reads, and the others wait.
            with filelock.FileLock(path.with_suffix(".lock"), poll_interval=0.01):
                if not path.exists():
                    with full_disk_at(path.parent):
                        _write_cache(path, states, field, data)
        return pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(
            f'data.source = "{data.source}": its cache is damaged ({one_line(error)}); delete {path}'
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f'data.source = "{data.source}": {one_line(error)}') from error


def _cache_folder() -> Path:
    """A folder next to the cache of the `datasets` library, without importing it, which takes a
    second."""
    home = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{home}/huggingface")
    folder = os.environ.get("HF_DATASETS_CACHE", f"{home}/datasets")
    return Path(folder).expanduser() / "titan_sparse"


FileState = tuple[str, int, int, int, int]


def file_states(files: Iterable[str | Path]) -> list[FileState]:
    """Path, inode, size (-1 if the file is gone) and both times of every file. Writing a file
    changes at least one of them.

    The modification time alone is not enough, because it can be set, and copies keep it. A path has
    the real folder, and the name by which the file is read: a link may have another ending than its
    target.
    """
    real_folder = functools.cache(os.path.realpath)
    states = []
    for file in files:
        folder, name = os.path.split(file)
        path = os.path.join(real_folder(folder), name)
        try:
            s = os.stat(file)
            states.append((path, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))
        except FileNotFoundError:
            states.append((path, 0, -1, 0, 0))
    return states


def _write_cache(path: Path, states: list[FileState], field: str, data: Data) -> None:
    """Write the rows of the files, completely or not at all."""
    import pyarrow

    string = pyarrow.large_string()
    schema = pyarrow.schema([("text", string), ("problem", string), ("form", pyarrow.string())])
    temporary = path.with_suffix(".tmp")
    files = [Path(name) for name, *_ in states]
    rows_of_files = (file_rows(file, field, data.format) for file in files)
    rows = tqdm(chain.from_iterable(rows_of_files), unit=" rows", delay=5, disable=None)
    letters = 0
    batch: list[dict[str, Any]] = []
    try:
        with pyarrow.ipc.new_file(str(temporary), schema) as file:
            for row in rows:
                _refuse_bad(row, data)
                batch.append(row._asdict())
                letters += len(row.text)
                if letters > CACHED_AT_ONCE:
                    file.write(pyarrow.RecordBatch.from_pylist(batch, schema))
                    letters, batch = 0, []
            file.write(pyarrow.RecordBatch.from_pylist(batch, schema))
        if file_states(files) != states:
            raise ValueError("it was changed while it was read; try again")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _open_dataset(data: Data) -> LazyTexts:
    # Only here, because the import takes a second.
    import datasets

    try:
        dataset = datasets.load_dataset(data.source, data.subset or None, split=data.split)
    # OSError: not found or no connection; ValueError: no such subset or split; RuntimeError: needs
    # a loading script.
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f'data.source = "{data.source}" (data.subset = "{data.subset}", data.split = '
            f'"{data.split}") is not a path and cannot be loaded as a Hugging Face dataset: '
            f"{one_line(error)}"
        ) from error
    field, names = _field(data), dataset.column_names
    form = chat_form(data.format, field, names)
    _log_form(data.source, form)
    for name in [] if form else needed_columns(data.format, field):
        if name not in names:
            raise ValueError(
                f'data.source = "{data.source}": {no_column(name, data.format, names)}'
            )
    taken = columns_to_read(data.format, field, names)
    rows = dataset.select_columns(taken).with_format("arrow")
    states = file_states(entry["filename"] for entry in dataset.cache_files)

    def read(number: int) -> str:
        where = f"{data.source}, row {number + 1}"
        row = table_row(where, rows[number : number + 1], field, data.format)
        _refuse_bad(row, data)
        if row.problem:
            logger.warning('data.bad_rows = "skip": %s', row.problem)
        return row.text

    return LazyTexts(range(len(rows)), read, states)


def _field(data: Data) -> str:
    """The column of the text or messages."""
    return data.text_field if data.format == "text" else data.messages_field


def _log_form(source: str, form: str) -> None:
    if form:
        columns = " and ".join(f'"{name}"' for name in FORMS[form][0])
        logger.info("data.source = %s: rows with %s (the %s form)", source, columns, form)


def _refuse_bad(row: Row, data: Data) -> None:
    if row.problem and data.bad_rows == "refuse":
        raise ValueError(f'{row.problem}; correct it, or write data.bad_rows = "skip"')


MOST_KEPT = 1 << 24
"""Tokens of texts that stay in memory, so that a document that continues is not read again."""


class TokenizedTexts:
    """Documents of a source. They are tokenized when they, or their lengths, are asked for.

    With an `encoder`, the texts of the source are samples of chats. `add_bos` says whether texts
    begin with the tokenizer's `begin`. Lengths are kept in memory, and so are MOST_KEPT tokens.
    Lengths and tokens include the tokens that are added.
    """

    total_tokens = 0
    """of all documents; 0, because they are not known before reading them"""

    def __init__(
        self,
        source: LazyTexts | list[str],
        tokenizer: Tokenizer,
        encoder: ChatEncoder | None = None,
        add_bos: bool = True,
    ) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.encoder = encoder
        # What stands before a text, int32 [n].
        self.begin = tokenizer.begin if add_bos else tokenizer.begin[:0]
        self.sample_format = encoder.sample_format if encoder else SampleFormat()
        # Lengths include the end-of-document token, so 0 means "not known yet".
        self._lengths = np.zeros(len(source), dtype=np.int64)
        # The documents read last, the oldest first.
        self._encoded: dict[int, Encoded] = {}
        self._kept = 0

    def __len__(self) -> int:
        return len(self.source)

    def longest(self) -> int | None:
        """None: it is not known before all texts are read."""
        return None

    def length(self, index: int) -> int:
        if self._lengths[index] == 0:
            self._lengths[index] = len(self[index].tokens)
        return int(self._lengths[index])

    def __getitem__(self, index: int) -> Encoded:
        if index not in self._encoded:
            known = set(self.encoder.skipped) if self.encoder else set()
            (document,) = self.documents(index)
            for reason in self.encoder.skipped.keys() - known if self.encoder else ():
                logger.warning('data.bad_rows = "skip": chats are skipped: %s', reason)
            self._encoded[index] = document
            self._kept += len(document.tokens)
            while self._kept > MOST_KEPT and len(self._encoded) > 1:
                self._kept -= len(self._encoded.pop(next(iter(self._encoded))).tokens)
        return self._encoded[index]

    def raw(self, index: int) -> bytes:
        """A document as it is on disk, before it is tokenized."""
        return self.source[index].encode("utf-8", "surrogatepass")

    def documents(self, row: int) -> Iterator[Encoded]:
        """The document of a row, for prepare_data."""
        text = self.source[row]
        if self.encoder:
            yield self.encoder.encode(text)
        else:
            yield self.framed(self.tokenizer.encode(text))

    def framed(self, ids: NDArray[np.integer]) -> Encoded:
        """A document of these tokens, int [n], between `begin` and the end-of-document token.

        Neither is added where the text has it already, and an empty text has no beginning.
        """
        end = self.tokenizer.end_of_document
        if len(ids):
            ids = begun(ids, self.begin)
        if len(ids) == 0 or ids[-1] != end:
            ids = np.append(ids, np.asarray(end, dtype=ids.dtype))
        return Encoded(ids)


Documents = TokenizedTexts | TokenShards
"""What a stream cuts into sequences."""

ROW_OPTIONS = (
    "text_field",
    "messages_field",
    "loss_on",
    "chat_template",
    "chat_template_kwargs",
    "subset",
    "split",
    "bad_rows",
)
"""Keys of [data], and of prepare_data, that say how rows are read."""


def open_documents(data: Data, tokenizer: Tokenizer, model_folder: str = "") -> Documents:
    """Open one part of data.source, whose format is data.format.

    model_folder: model.initial_hf, for its chat template. Raises ValueError, naming the key, if the
    part cannot be opened or an option would be ignored.
    """
    if is_prepared(data.source):
        shards = TokenShards(data.source, tokenizer)
        # prepare_data has already applied these. The file of a run may say so too.
        for name in ("format", *ROW_OPTIONS, "split_special_tokens"):
            value, applied = getattr(data, name), shards.option(name)
            if value not in (getattr(Data(), name), applied):
                raise ValueError(
                    f"data.{name} = {show(value)} would be ignored with the prepared tokens of "
                    f'data.source = "{data.source}", which were made with {show(applied)}; leave it out'
                )
        if not data.add_bos and not shards.sample_format.takes_bos:
            shards.begin = shards.begin[:0]
        if len(shards.begin) and not data.add_bos:
            raise ValueError(
                f'data.add_bos = false: the tokens of data.source = "{data.source}" were prepared with '
                "a token before each text; prepare them with --no-add-bos, or leave data.add_bos out"
            )
        return shards
    encoder = None if data.format == "text" else ChatEncoder(data, tokenizer, model_folder)
    if encoder and encoder.notice:
        logger.warning("%s: %s", data.source, encoder.notice)
    return TokenizedTexts(open_source(data), tokenizer, encoder, data.add_bos)
