"""Runs tests in a process forked from one that has imported everything but our own code.

What a test needs is its own code, imported anew from a copy of the tree: an import of torch for each
fault would take longer than its tests.
"""

import gc
import importlib
import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from multiprocessing import forkserver, util
from pathlib import Path

import pytest

OWN = ("titan_sparse", "tests", "scripts", "__main__", "__mp_main__", "train")
_LISTING = """
import contextlib, importlib, sys
for name in sys.argv[1:]:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
print("\\nMODULES", *sys.modules)
"""
_IMPORTED = [
    "pytest",
    "hypothesis",
    "datasets",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "torch.utils.tensorboard",
    "torch.distributed.run",
    "multiprocessing.resource_tracker",
    "titan_sparse.trainer",
    "titan_sparse.models.huggingface",
]
PRELOADED = ["datasets", "titan_sparse.trainer"]
"""What tests/distributed.py asks for."""
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""A forked process must find no threads, and no GPU."""


def import_the_rest(root: Path) -> None:
    """Import here all modules that our own would, except our own."""
    os.environ |= SETTINGS
    sys.dont_write_bytecode = True
    command = [sys.executable, "-c", _LISTING, *_IMPORTED]
    printed = subprocess.run(
        command, cwd=root, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    names = printed.rpartition("MODULES")[2].split()
    for name in names:
        if name.partition(".")[0] not in OWN:
            try:
                importlib.import_module(name)
            except Exception:  # some only exist after others were imported in their own way
                continue
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def run_tests(folder: Path, files: list[str], wanted: list[str] | None, sources: list[str]) -> int:
    """pytest over the copy in folder/tree. Returns its status.

    wanted: the tests, in this order; None for all of the files. They stop at the first failure.
    With None all are run, and what lines of `sources` each has run is written too. The results are
    in folder/result.json.
    """
    tree = folder / "tree"
    os.chdir(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if path and path != os.environ["ROOT"])]
    temporary = folder / "tmp"
    os.environ |= {"PYTHONPATH": str(tree), "TMPDIR": str(temporary)}
    importlib.invalidate_caches()
    recorder = Recorder(folder, wanted, {str(tree / source): source for source in sources})
    _start_fork_server(recorder)
    recorder.trace()
    words = [*files, "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
    words += ["-m", "not gpu and not slow and not faults", f"--basetemp={temporary / 'pytest'}"]
    status = pytest.main(words + (["-x"] if wanted is not None else []), plugins=[recorder])
    sys.settrace(None)
    return int(status)


class Recorder:
    """A plugin of pytest: chooses and orders the tests, and notes what they did."""

    def __init__(self, folder: Path, wanted: list[str] | None, sources: dict[str, str]):
        self.folder = folder
        self.wanted = wanted
        self.sources = sources
        self.lines: dict[str, set[int]] = defaultdict(set)
        self.current = ""
        self.tests: dict[str, dict] = {}
        sys.addaudithook(self._notice_programs)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list) -> None:
        if self.wanted is None:
            return
        places = {name: place for place, name in enumerate(self.wanted)}
        chosen = [item for item in items if item.nodeid in places]
        items[:] = sorted(chosen, key=lambda item: places[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.current = nodeid
        (self.folder / "current").write_text(nodeid)
        new = {"seconds": 0.0, "outcome": "passed", "opaque": False, "setup": {}, "lines": {}}
        self.tests[nodeid] = new

    def pytest_runtest_logreport(self, report) -> None:
        test = self.tests[report.nodeid]
        test["seconds"] += report.duration
        if report.outcome != "passed":
            test["outcome"] = report.outcome
        # What fixtures do is shared with the other tests of the file.
        place = test["setup" if report.when == "setup" else "lines"]
        for source, lines in self.lines.items():
            place[source] = sorted(lines | set(place.get(source, [])))
        self.lines.clear()

    def _notice_programs(self, event: str, _) -> None:
        """What another program runs, or a forked child, is not seen here."""
        if event in ("subprocess.Popen", "os.fork") and self.current in self.tests:
            self.tests[self.current]["opaque"] = True

    def trace(self) -> None:
        if self.wanted is None:
            threading.settrace(self._on_call)
            sys.settrace(self._on_call)

    def _on_call(self, frame, event: str, _):
        return self._on_line if frame.f_code.co_filename in self.sources else None

    def _on_line(self, frame, event: str, _):
        self.lines[self.sources[frame.f_code.co_filename]].add(frame.f_lineno)
        return self._on_line

    def trace_rank(self) -> None:
        """In a process that a test has started from the fork server."""
        self.lines.clear()
        self.current = (self.folder / "current").read_text()
        self.trace()
        util.Finalize(None, self._write_rank, exitpriority=100)

    def _write_rank(self) -> None:
        lines = {source: sorted(lines) for source, lines in self.lines.items()}
        record = {"test": self.current, "lines": lines}
        unfinished = self.folder / "ranks" / f"{os.getpid()}.unfinished"
        unfinished.write_text(json.dumps(record))
        unfinished.replace(unfinished.with_suffix(".json"))

    def pytest_runtest_logfinish(self) -> None:
        """On disk after each test, so that a process that is killed loses only its last."""
        for path in (self.folder / "ranks").glob("*.json"):
            record = json.loads(path.read_text())
            path.unlink()
            if record["test"] in self.tests:
                place = self.tests[record["test"]]["lines"]
                for source, lines in record["lines"].items():
                    place[source] = sorted({*place.get(source, []), *lines})
        unfinished = self.folder / "unfinished"
        unfinished.write_text(json.dumps(self.tests))
        unfinished.replace(self.folder / "result.json")


def _start_fork_server(recorder: Recorder) -> None:
    """The server that tests start their ranks from, forked from here instead of a new Python."""
    server = forkserver._forkserver
    server.set_forkserver_preload(PRELOADED)

    def fork(_, arguments: list[str], descriptors: list[int]) -> int:
        pid = os.fork()
        if pid:
            return pid
        keep = {0, 1, 2, *descriptors}
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in keep:
                try:
                    os.close(int(name))
                except OSError:
                    continue  # the one that listed them
        util.register_after_fork(recorder, Recorder.trace_rank)
        exec(arguments[-1], {})
        os._exit(0)

    original = util.spawnv_passfds
    util.spawnv_passfds = fork
    try:
        server.ensure_running()
    finally:
        util.spawnv_passfds = original
