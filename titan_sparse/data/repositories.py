"""A folder of source files as long documents: one a subfolder (repository, package), or all of it as one."""

import os
from collections.abc import Iterator
from pathlib import Path

from titan_sparse.data.sources import LazyTexts, join_files


def open_folder(source: str, whole: bool) -> LazyTexts:
    """Documents of all text files below `source`, joined in the order of their names, each after a line with its name.

    One document is a folder directly in `source`, and one more the files that lie in it loose; `whole`: all is one document.
    Left out: names that begin with a dot (.git), links, empty files and files with a zero byte near their beginning, which
    are no text. Raises ValueError if there is no such folder or no such file.
    """
    root = Path(source).expanduser()
    if not root.is_dir():
        raise ValueError(f"{source} is no folder; with --document folder or source write one")
    groups: dict[str, list[tuple[str, Path]]] = {}
    for path in _text_files(root):
        name = path.relative_to(root).as_posix()
        first = name.partition("/")[0] if "/" in name else ""
        groups.setdefault(root.name if whole else first, []).append((name, path))
    if not groups:
        raise ValueError(f"{source} holds no text files")
    return LazyTexts([groups[name] for name in sorted(groups)], join_files)


def _text_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        # In place: os.walk goes on by this list, so whole hidden folders are never entered.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if (
                not name.startswith(".")
                and not path.is_symlink()
                and path.is_file()
                and _is_text(path)
            ):
                yield path


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        beginning = file.read(8192)
    return beginning != b"" and b"\0" not in beginning
