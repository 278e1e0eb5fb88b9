"""Which files a source or a tokenizer is read from. Only names and sizes are looked at.

os.path, unlike Path, takes a name that is too long for one that does not exist.
"""

import os.path
from pathlib import Path

from titan_sparse.config.reading import require, show

ENDINGS = (".txt", ".jsonl", ".jsonl.zst", ".parquet")
"""Of data files."""


def is_path(source: str) -> bool:
    """True for what exists, and for what can only be meant as a path: a typing error must not go to
    the hub."""
    looks_like_path = source.startswith((".", "/", "~")) or source.endswith(ENDINGS)
    return looks_like_path or os.path.exists(source)


def data_files(source: str, key: str = "data.source") -> tuple[list[str], str]:
    """The sorted data files of a file or folder, and the one ending that they share.

    Raises ConfigError, naming `key`, if there is no such path, or no data file with a byte in it. Hidden
    files and folders in a folder are left out.
    """
    named = f"{key} = {show(source)}"
    path = Path(source).expanduser()
    require(
        os.path.exists(path),
        f'{named}: no such file or folder; write a path that exists, or "python"',
    )
    files = []
    endings = set()
    for file in _candidates(path):
        if not is_hidden(file, path):
            files.append(file)
            endings.add(_ending(file))
    require(len(files) > 0, f"{named} holds no data files; write a path of {', '.join(ENDINGS)}")
    require(
        len(endings) == 1,
        f"{named} mixes {', '.join(sorted(endings))}; write a folder with files of one ending",
    )
    require(
        any(file.stat().st_size for file in files),
        f"{named} holds only empty files; write a path of files with text",
    )
    return [str(file) for file in files], endings.pop()


def hidden_files(source: str) -> int:
    """The number of data files that data_files() leaves out of a folder, as they are hidden."""
    path = Path(source).expanduser()
    return sum(is_hidden(file, path) for file in _candidates(path))


def is_hidden(file: Path, folder: Path) -> bool:
    """Whether a name below `folder` begins with a dot: .ipynb_checkpoints, and copies of
    editors."""
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _candidates(path: Path) -> list[Path]:
    """The file, or the folder's files, that have the ending of a data file; sorted."""
    found = path.rglob("*") if path.is_dir() else [path]
    return [file for file in sorted(found) if _ending(file) and file.is_file()]


def tokenizer_file(name: str) -> Path:
    """The tokenizer.json that data.tokenizer names, by its own path or by that of its folder.

    Raises ConfigError if there is no such file.
    """
    path = Path(name).expanduser()
    if os.path.isdir(path):
        path = path / "tokenizer.json"
    require(
        os.path.isfile(path),
        f'data.tokenizer = {show(name)}: no such file; write "bytes" or the path of a '
        "tokenizer.json",
    )
    return path


def _ending(path: Path) -> str:
    """The ending of a data file, empty for other files."""
    for ending in ENDINGS:
        if path.name.endswith(ending):
            return ending
    return ""
