"""The sources of text: Python files of this machine, local data files, or a Hugging Face
dataset."""

import hashlib
import importlib.util
import json
import logging
import os
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm import tqdm

from titan_sparse.config.sections import Data
from titan_sparse.config.sources import data_files, is_path
from titan_sparse.data.rows import Row, file_rows, needed_columns, table_row

logger = logging.getLogger("titan_sparse")

READER = 2
"""Version of rows.py in the cache's name. Increase it when rows.py reads something differently."""
CACHED_AT_ONCE = 1 << 20
"""Letters of rows that are held in memory while a cache is written."""
NOT_STDLIB = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class LazyTexts:
    """The texts of all documents, in an order that is the same in each run. Text `i` is
    `read(items[i])`, when it is asked for.

    `skipped` of them are empty because of data.bad_rows = "skip".
    """

    items: Sequence[Any]
    read: Callable[[Any], str]
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
    if not join_packages:
        return LazyTexts(files, lambda file: _read(file[1]))
    files_by_package = defaultdict(list)
    for name, path in files:
        files_by_package[name.rpartition("/")[0]].append((name, path))
    return LazyTexts(list(files_by_package.values()), join_files)


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
    table = _cached_rows(files, data)
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
    texts = table.column("text")
    return LazyTexts(range(len(texts)), lambda row: texts[row].as_py(), len(problems))


def _cached_rows(files: list[str], data: Data) -> Any:
    """The rows of the files as a pyarrow.Table with the columns text and problem, mapped from a
    cache.

    All rows are read now, or were read for the cache, so errors are reported before training.
    """
    import filelock
    import pyarrow

    states = _file_states(files)
    field = data.text_field if data.format == "text" else data.messages_field
    key = json.dumps([READER, states, field, data.format, data.bad_rows])
    path = _cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()}.arrow"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # One rank of a node reads, and the others wait.
            with filelock.FileLock(path.with_suffix(".lock"), poll_interval=0.01):
                if not path.exists():
                    _write_cache(path, states, field, data)
        return pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(
            f'data.source = "{data.source}": its cache is damaged ({_one_line(error)}); delete {path}'
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f'data.source = "{data.source}": {_one_line(error)}') from error


def _cache_folder() -> Path:
    """A folder next to the cache of the `datasets` library, without importing it, which takes a
    second."""
    home = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{home}/huggingface")
    folder = os.environ.get("HF_DATASETS_CACHE", f"{home}/datasets")
    return Path(folder).expanduser() / "titan_sparse"


FileState = tuple[str, int, int, int, int]


def _file_states(files: Sequence[str | Path]) -> list[FileState]:
    """Path, inode, size and both times of every file. Writing a file changes at least one of them.

    The modification time alone is not enough, because it can be set, and copies keep it.
    """
    stats = [(os.path.realpath(file), os.stat(file)) for file in files]
    return [(path, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for path, s in stats]


def _write_cache(path: Path, states: list[FileState], field: str, data: Data) -> None:
    """Write the rows of the files, completely or not at all."""
    import pyarrow

    string = pyarrow.large_string()
    schema = pyarrow.schema([("text", string), ("problem", string)])
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
        if _file_states(files) != states:
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
            f"{_one_line(error)}"
        ) from error
    is_text = data.format == "text"
    field = data.text_field if is_text else data.messages_field
    needed = needed_columns(data.format, field)
    for name in needed:
        if name not in dataset.column_names:
            key = f'data.text_field = "{field}"' if is_text else f'data.format = "{data.format}"'
            raise ValueError(
                f'data.source = "{data.source}" has no column "{name}", which {key} needs; it has: '
                f"{', '.join(dataset.column_names)}"
            )
    taken = [name for name in [*needed, "tools"] if name in dataset.column_names]
    rows = dataset.select_columns(taken).with_format("arrow")

    def read(number: int) -> str:
        where = f"{data.source}, row {number + 1}"
        row = table_row(where, rows[number : number + 1], field, data.format)
        _refuse_bad(row, data)
        if row.problem:
            logger.warning('data.bad_rows = "skip": %s', row.problem)
        return row.text

    return LazyTexts(range(len(rows)), read)


def _refuse_bad(row: Row, data: Data) -> None:
    if row.problem and data.bad_rows == "refuse":
        raise ValueError(f'{row.problem}; correct it, or write data.bad_rows = "skip"')


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
