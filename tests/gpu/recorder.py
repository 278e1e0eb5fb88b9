"""Notes which of the listed branches this process runs.

The list and the notes are in the folder that GPU_BRANCHES_FOLDER names: branches.json as
write_list() leaves it, and a file of keys for each process. A note is written at once, as a
process may be killed.

On Python 3.12 the interpreter itself reports the instructions of the listed functions, each once, on
all threads; so autograd's threads count, and nothing else gets slower. Python 3.11 has only
sys.settrace(), which does not see autograd's threads. What torch.compile has compiled is not seen.
Only the standard library: it runs before anything else is imported.
"""

import json
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType

FOLDER = "GPU_BRANCHES_FOLDER"
_LIST = "branches.json"
_TOOL = 4
"""One of the numbers of sys.monitoring that no profiler, debugger or coverage tool claims."""

Span = tuple[int, int, int, int]
"""first line, first column, last line, last column"""


def write_list(folder: Path, spans: dict[str, list[tuple[str, Span]]]) -> None:
    """What start() reads. spans: {absolute path of a file: (key, span) of its branches}."""
    (folder / _LIST).write_text(json.dumps(spans))


def noted(folder: Path) -> set[str]:
    """The keys of the branches that any process has noted."""
    keys: set[str] = set()
    for file in folder.glob("*.txt"):
        keys.update(file.read_text().splitlines())
    return keys


def note_tests(folder: Path, names: set[str]) -> None:
    """Which tests a run of pytest ran."""
    (folder / f"{os.getpid()}.tests").write_text("\n".join(sorted(names)))


def tests_noted(folder: Path) -> set[str]:
    """The names of the tests that any run of pytest has noted."""
    names: set[str] = set()
    for file in folder.glob("*.tests"):
        names.update(file.read_text().splitlines())
    return names


def start() -> None:
    """Note what this process runs from here on. Does nothing without GPU_BRANCHES_FOLDER."""
    folder = os.environ.get(FOLDER)
    if not folder or not (Path(folder) / _LIST).is_file():
        return
    recorder = _Recorder(Path(folder))
    if sys.version_info >= (3, 12):
        _watch_instructions(recorder)
    else:
        _trace(recorder)


class _Recorder:
    """The listed branches, and which of them have run. Threads may share it: a key may come twice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spans = json.loads((folder / _LIST).read_text())
        self.noted: set[str] = set()
        self.keys_of_code: dict[CodeType, dict[int, list[str]]] = {}

    def keys(self, code: CodeType) -> dict[int, list[str]]:
        """{offset of an instruction: keys of the branches that it is in}; empty for most code."""
        if code.co_filename not in self.spans:
            return {}
        if code not in self.keys_of_code:
            self.keys_of_code[code] = dict(_keys_by_offset(code, self.spans[code.co_filename]))
        return self.keys_of_code[code]

    def note(self, keys: Iterable[str]) -> None:
        """These branches have run."""
        new = [key for key in keys if key not in self.noted]
        if not new:
            return
        self.noted.update(new)
        with open(self.folder / f"{os.getpid()}.txt", "a") as file:
            file.writelines(f"{key}\n" for key in new)


def _keys_by_offset(code: CodeType, spans: list) -> Iterable[tuple[int, list[str]]]:
    for number, (line, last_line, column, last_column) in enumerate(code.co_positions()):
        if None in (line, last_line, column, last_column):
            continue
        inside = [
            key
            for key, (first, first_column, last, end) in spans
            if (first, first_column) <= (line, column) and (last_line, last_column) <= (last, end)
        ]
        if inside:
            # Every instruction takes two bytes.
            yield 2 * number, inside


def _watch_instructions(recorder: _Recorder) -> None:
    """Through sys.monitoring, of Python 3.12."""
    monitoring = sys.monitoring
    events = monitoring.events
    monitoring.use_tool_id(_TOOL, "gpu branches")

    def started(code: CodeType, offset: int) -> object:
        if recorder.keys(code):
            monitoring.set_local_events(_TOOL, code, events.INSTRUCTION)
        return monitoring.DISABLE

    def executed(code: CodeType, offset: int) -> object:
        recorder.note(recorder.keys(code).get(offset, ()))
        return monitoring.DISABLE

    monitoring.register_callback(_TOOL, events.PY_START, started)
    monitoring.register_callback(_TOOL, events.INSTRUCTION, executed)
    monitoring.set_events(_TOOL, events.PY_START)


def _trace(recorder: _Recorder) -> None:
    """Through sys.settrace(), where there is nothing better."""

    def called(frame: FrameType, event: str, argument: object):
        if not recorder.keys(frame.f_code):
            return None
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return executed

    def executed(frame: FrameType, event: str, argument: object):
        if event == "opcode":
            recorder.note(recorder.keys(frame.f_code).get(frame.f_lasti, ()))
        return executed

    sys.settrace(called)
    threading.settrace(called)
