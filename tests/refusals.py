"""What is refused is one line that says what is wrong and what to write."""

import contextlib
import resource
from collections.abc import Callable, Iterator

import pytest


@contextlib.contextmanager
def refused(
    words: str, kind: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> Iterator[pytest.ExceptionInfo]:
    """The block raises an error of one line, in which the regular expression `words` is found."""
    with pytest.raises(kind, match=words) as caught:
        yield caught
    assert "\n" not in str(caught.value), caught.value


def error_of(capsys: pytest.CaptureFixture, main: Callable[[list[str]], int], *words: str) -> str:
    """The line with which a command refuses its words, and ends with status 2."""
    capsys.readouterr()
    assert main([*words]) == 2
    error = capsys.readouterr().err
    # Texts that are read show their progress before it.
    [line] = [line for line in error.splitlines() if line and "examples/s" not in line]
    assert line.startswith("error: "), error
    return line


@contextlib.contextmanager
def room_for(file_bytes: int) -> Iterator[None]:
    """Inside, no file can become longer, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
