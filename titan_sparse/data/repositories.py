"""A folder of source files as long documents: one a subfolder (repository, package), or all of it
as one."""

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from titan_sparse.data.sources import LazyTexts, join_files


def open_folder(source: str, whole: bool) -> LazyTexts:
    """Documents of all text files below `source`, joined in the order of their names, each after a
    line with its name.

    Each folder directly in `source` is a document, and the files that lie loose in `source` are one
    more. With `whole`, everything is one document. Names that begin with a dot (.git), links, empty
    files, and files with a zero byte near their beginning, which are no text, are left out. Raises
    ValueError if there is no such folder or no such file.
    """
    root = Path(source).expanduser()
    if not root.is_dir():
        raise ValueError(f"{source} is no folder; with --document folder or source write one")
    files_by_document: dict[str, list[tuple[str, Path]]] = defaultdict(list)
    for path in _text_files(root):
        name = path.relative_to(root).as_posix()
        if whole:
            document = root.name
        elif "/" in name:
            document = name.partition("/")[0]
        else:
            document = ""
        files_by_document[document].append((name, path))
    if not files_by_document:
        raise ValueError(f"{source} holds no text files")
    documents = [files_by_document[document] for document in sorted(files_by_document)]
    return LazyTexts(documents, join_files)


def _text_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        # In place: os.walk goes on by this list, so whole hidden folders are never entered.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if name.startswith(".") or path.is_symlink() or not path.is_file():
                continue
            if _is_text(path):
                yield path


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        beginning = file.read(8192)
    return beginning != b"" and b"\0" not in beginning
