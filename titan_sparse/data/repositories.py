"""A folder of source files as long documents: one a subfolder (repository, package), or all of it
as one."""

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from titan_sparse.data.sources import LazyTexts, join_files

logger = logging.getLogger("titan_sparse")


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
    left_out: Counter[str] = Counter()
    for folder, folders, files in os.walk(root, onerror=_refuse):
        below = [Path(folder, name) for name in sorted(folders)]
        # In place: os.walk goes on by this list, so whole hidden folders are never entered.
        folders[:] = [path.name for path in below if not _reason(path)]
        for path in [*below, *(Path(folder, name) for name in sorted(files))]:
            reason = _reason(path)
            if reason:
                left_out[reason] += 1
            elif not path.is_dir():
                yield path
    if left_out:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
        logger.info("%s: these were not read: %s", root, counts)


def _reason(path: Path) -> str:
    """Why a file or folder is left out, empty for one that is read."""
    if path.name.startswith("."):
        return "hidden"
    if path.is_symlink():
        return "links"
    if path.is_dir():
        return ""
    if not path.is_file():
        return "neither file nor folder"
    with path.open("rb") as file:
        beginning = file.read(8192)
    if not beginning:
        return "empty"
    return "binary" if b"\0" in beginning else ""


def _refuse(error: OSError) -> NoReturn:
    raise ValueError(f"{error.filename} cannot be listed: {error.strerror}")
