"""Where the text comes from: Python files of this machine, local data files, or a Hugging Face
dataset."""

import importlib.util
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from titan_sparse.config.sections import Data
from titan_sparse.config.text_files import data_files, is_path

Dataset = Any
"""A datasets.Dataset; that library is imported only where a source needs it, as it takes a
second."""

# Ending of a data file -> the builder of the `datasets` library that reads it.
BUILDERS = {".txt": "text", ".jsonl": "json", ".jsonl.zst": "json", ".parquet": "parquet"}
NOT_STDLIB = {"site-packages", "dist-packages"}
STRING_DTYPES = {"string", "large_string", "string_view"}


class Source(Protocol):
    """The texts of all documents, in an order that is the same in each run; a list of str is
    one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> str: ...


class LazyTexts:
    """A Source that reads document `i` by `read(items[i])` when it is asked for."""

    def __init__(self, items: Sequence[Any], read: Callable[[Any], str]) -> None:
        self.items = items
        self.read = read

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int, /) -> str:
        return self.read(self.items[index])


def open_source(data: Data) -> Source:
    """Open the documents that the [data] section names; only the list of them is read here.

    Raises ValueError, naming the key, for a source, column, subset or split that does not exist or
    has no documents.
    """
    if data.source == "python":
        source = _open_python(data.join_packages)
    elif is_path(data.source):
        source = _open_dataset(_load_files(data), data)
    else:
        source = _open_dataset(_load_from_hub(data), data)
    if len(source) == 0:
        raise ValueError(
            f'data.source = "{data.source}" holds no documents; write a source that holds some'
        )
    return source


def _open_python(join_packages: bool) -> Source:
    """The standard library's and torch's own files: real, long-range text that needs no
    download."""
    files = sorted(_python_files())
    if not join_packages:
        return LazyTexts(files, _read_named)
    files_by_package = defaultdict(list)
    for name, path in files:
        package = name.rpartition("/")[0]
        files_by_package[package].append((name, path))
    return LazyTexts(list(files_by_package.values()), join_files)


def _python_files() -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of each file; the name, unlike the path, is equal on all machines."""
    for root_name, root in _python_roots():
        for path in root.rglob("*.py"):
            relative = path.relative_to(root)
            if not NOT_STDLIB.isdisjoint(relative.parts):
                continue
            if path.is_file() and path.stat().st_size > 0:
                yield f"{root_name}/{relative.as_posix()}", path


def _python_roots() -> Iterator[tuple[str, Path]]:
    yield "stdlib", Path(sysconfig.get_paths()["stdlib"])
    # find_spec locates a top-level package without running it.
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        yield "torch", Path(spec.origin).parent


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _read_named(file: tuple[str, Path]) -> str:
    _, path = file
    return _read(path)


def join_files(files: list[tuple[str, Path]]) -> str:
    """One text of (name, path) pairs: each file after a line with its name.

    Bytes that are no UTF-8 are replaced.
    """
    texts = []
    for name, path in files:
        texts.append(f"# {name}\n{_read(path)}")
    return "\n".join(texts)


def _load_files(data: Data) -> Dataset:
    import datasets

    if data.subset or data.split != "train":
        raise ValueError(
            "data.subset and data.split choose within a Hugging Face dataset; "
            f'leave them out, or as "" and "train", for the files of data.source = "{data.source}"'
        )
    files, ending = data_files(data.source)
    options = {"sample_by": "document"} if ending == ".txt" else {}
    # What it logs of a broken file is told below, in one line.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        return datasets.load_dataset(BUILDERS[ending], data_files=files, split="train", **options)
    # Each reader has its own errors: pyarrow's, zstandard's, those of the library around them.
    except Exception as error:
        reason = _one_line(error.__cause__ or error)
        raise ValueError(f'data.source = "{data.source}" cannot be read: {reason}') from error


def _load_from_hub(data: Data) -> Dataset:
    import datasets

    try:
        return datasets.load_dataset(data.source, data.subset or None, split=data.split)
    # OSError: not found or no connection; ValueError: no such subset or split; RuntimeError: needs
    # a loading script.
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f'data.source = "{data.source}" (data.subset = "{data.subset}", data.split = '
            f'"{data.split}") is no path and cannot be loaded as a Hugging Face dataset: '
            f"{_one_line(error)}"
        ) from error


def _open_dataset(dataset: Dataset, data: Data) -> Source:
    field = data.text_field
    if field not in dataset.column_names:
        columns = ", ".join(dataset.column_names)
        raise ValueError(
            f'data.text_field = "{field}" is no column of "{data.source}"; write one of: {columns}'
        )
    if getattr(dataset.features[field], "dtype", None) not in STRING_DTYPES:
        raise ValueError(
            f'data.text_field = "{field}" holds no text in "{data.source}"; '
            "write a column of strings"
        )
    texts = dataset.select_columns([field])
    # A null becomes an empty document, which the loader skips.
    return LazyTexts(range(len(texts)), lambda row: texts[row][field] or "")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
