"""Files of one JSON object a line, such as metrics.jsonl: written line by line, whole or not at all,
and read back. Imports no torch."""

import errno
import json
import os
from pathlib import Path
from typing import Any

_BLOCK = 1 << 16
"""Bytes that are read at a time in search of the last line."""


class JsonLines:
    """A file that lines are added to. What a process that was killed left of a line is cut off.

    Raises OSError, naming the file, where it cannot be opened or read, or is a link, which might have
    been put there to have its target overwritten.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self.descriptor = os.open(self.path, flags, 0o666)
        self._end_last_line()

    def write(self, record: dict[str, Any]) -> None:
        """Add a line, in one write. Raises OSError, naming the file, where it does not fit, or where
        the file was deleted; it is as it was then."""
        line = (json.dumps(record) + "\n").encode()
        status = os.fstat(self.descriptor)
        if status.st_nlink == 0:
            raise FileNotFoundError(
                errno.ENOENT, "the file was deleted while the run goes on", self.path
            )
        end = status.st_size
        try:
            written = os.write(self.descriptor, line)
        except OSError as error:
            raise OSError(error.errno, f"cannot write: {error.strerror}", self.path) from error
        if written < len(line):
            os.ftruncate(self.descriptor, end)
            raise OSError(
                errno.ENOSPC,
                f"only {written} of a line's {len(line)} bytes could be written, the disk is full",
                self.path,
            )

    def close(self) -> None:
        """Nothing can be written any more."""
        os.close(self.descriptor)

    def _end_last_line(self) -> None:
        # From the end: the lines of a long run are hundreds of megabytes.
        size = os.fstat(self.descriptor).st_size
        begin, last = size, b""
        while begin > 0 and b"\n" not in last:
            block = min(_BLOCK, begin)
            begin -= block
            last = os.pread(self.descriptor, block, begin) + last
        last = last[last.rfind(b"\n") + 1 :]
        if not last:
            return
        if _parsed(last) is None:
            os.ftruncate(self.descriptor, size - len(last))
        else:
            os.write(self.descriptor, b"\n")


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a file, one a line. A last line that is cut short is left out.

    Raises ValueError, one line, for another line that is no object, OSError for the file.
    """
    # What follows the end of the last line: nothing, or a line whose writer was killed or writes it.
    *lines, rest = Path(path).read_bytes().split(b"\n")
    objects = [_parsed(line) for line in lines]
    last = _parsed(rest)
    if None in objects:
        raise ValueError(f"{path}: line {objects.index(None) + 1} is no JSON object")
    return objects if last is None else [*objects, last]


def read_metrics(run: str | Path) -> dict[int, dict[str, Any]]:
    """The lines of a run's metrics.jsonl by step.

    Of a step that is there twice, after resuming, the later line counts. A last line that is cut
    short is left out. run: an output_dir or the file. Raises ValueError, one line, if there is no
    such file or a line is no step's metrics.
    """
    path = Path(run)
    if path.is_dir():
        path = path / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(
            f"{run} is neither a run's output_dir with metrics.jsonl nor such a file; "
            "write one of them"
        )
    lines = read_lines(path)
    for number, line in enumerate(lines, 1):
        if type(line.get("step")) is not int:
            raise ValueError(f"{path}: line {number} is no step's metrics")
    return {line["step"]: line for line in lines}


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The JSON object, None where it is none."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
