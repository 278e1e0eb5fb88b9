"""Plants the faults: each runs in a process of its own, in one of several copies of the tree."""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.mutants.operators import Mutant
from scripts.mutants.testing import import_the_rest, run_tests
from scripts.mutants.tests_of import TESTS

_NOT_COPIED = (".git", ".venv", ".gpu", "outputs", "__pycache__", ".hypothesis", "*.egg-info")
_START_SECONDS = 15.0
"""What a process takes, on a busy machine, before its first test."""
_BASELINE_SECONDS = 240.0
"""What a file of tests may take without a fault. Tests that are not done then are not used."""


@dataclass
class Job:
    """Tests to run in one process: those of a file without a fault, or those of one fault."""

    files: list[str]
    mutant: Mutant | None = None
    tests: list[str] | None = None
    began: float = 0.0
    deadline: float = float("inf")


@dataclass
class Run:
    """What was asked for, and what is known so far."""

    root: Path
    out: Path
    budget_seconds: float
    """the longest that the tests of one fault may take, counted without a fault"""
    all_tests: bool
    """those too that do not run the changed line"""
    baseline: dict[str, dict[str, dict]] = field(default_factory=dict)
    """test file -> test -> what it did without a fault"""

    def note(self, record: dict) -> None:
        """Append a line to the results, on disk at once."""
        with open(self.out, "a") as file:
            file.write(json.dumps(record) + "\n")


def read_records(path: Path) -> list[dict]:
    """The results so far. A last line that was cut off is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def run(asked: Run, mutants: list[Mutant], workers: int, seconds: float) -> None:
    """Run what is left of the mutants in a random order, until the time is over."""
    end = time.monotonic() + seconds
    records = read_records(asked.out)
    asked.baseline = {r["file"]: r["tests"] for r in records if r["kind"] == "baseline"}
    files = sorted({file for mutant in mutants for file in TESTS[mutant.file]})
    baselines = [Job([file]) for file in files if file not in asked.baseline]
    random.Random(0).shuffle(mutants)
    os.environ["ROOT"] = str(asked.root)
    import_the_rest(asked.root)
    with tempfile.TemporaryDirectory(prefix="mutants", ignore_cleanup_errors=True) as temporary:
        folders = list(_copies(asked.root, Path(temporary), workers))
        _loop(asked, baselines, mutants, folders, end)


def _copies(root: Path, temporary: Path, number: int) -> Iterator[Path]:
    """Copies of the tree with compiled Python files, each in a folder with the files that its runs need."""
    import compileall

    first = temporary / "0"
    shutil.copytree(root, first / "tree", ignore=shutil.ignore_patterns(*_NOT_COPIED))
    compileall.compile_dir(first / "tree", quiet=1)
    for place in range(number):
        folder = temporary / str(place)
        if place > 0:
            shutil.copytree(first / "tree", folder / "tree")
        yield folder


def _loop(
    asked: Run, baselines: list[Job], mutants: list[Mutant], folders: list[Path], end: float
) -> None:
    running: dict[int, tuple[Path, Job]] = {}
    free = list(folders)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    try:
        while time.monotonic() < end and (baselines or mutants or running):
            while free and (job := _next_job(asked, baselines, mutants)):
                folder = free.pop()
                running[_start(asked, folder, job)] = folder, job
            for pid in list(running):
                if _has_ended(asked, pid, *running[pid]):
                    free.append(running.pop(pid)[0])
            time.sleep(0.01)
    finally:
        for pid, (folder, _) in running.items():
            _kill_all(pid, folder)
            os.waitpid(pid, 0)
        print(f"{len(mutants) + len(running)} mutants left", flush=True)


def _has_ended(asked: Run, pid: int, folder: Path, job: Job) -> bool:
    """Note the result if the process has ended. End it if it has taken too long."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended and time.monotonic() < job.deadline:
        return False
    _kill_all(pid, folder)
    if not ended:
        os.waitpid(pid, 0)
    _finish(asked, folder, job, os.waitstatus_to_exitcode(status) if ended else None)
    return True


def _next_job(asked: Run, baselines: list[Job], mutants: list[Mutant]) -> Job | None:
    """A mutant can be run when all of its test files have been run without it."""
    if baselines:
        job = baselines.pop(0)
        job.deadline = time.monotonic() + _BASELINE_SECONDS
        return job
    for place, mutant in enumerate(mutants):
        if all(file in asked.baseline for file in TESTS[mutant.file]):
            del mutants[place]
            tests, seconds = choose_tests(asked, mutant)
            if not tests:
                asked.note(_record(mutant, "untested", "no test", 0, 0, 0.0))
                return _next_job(asked, baselines, mutants)
            files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
            job = Job(files, mutant, tests)
            job.deadline = time.monotonic() + max(30.0, 3 * seconds + _START_SECONDS)
            return job
    return None


def choose_tests(asked: Run, mutant: Mutant) -> tuple[list[str], float]:
    """The tests that run the changed statement, quick files first, and their seconds without a fault."""
    by_file = []
    for file in TESTS[mutant.file]:
        tests = asked.baseline[file]
        in_setup = any(_runs(test["setup"], mutant) for test in tests.values())
        chosen = []
        for name, test in tests.items():
            touches = in_setup or mutant.at_import or test["opaque"] or _runs(test["lines"], mutant)
            if test["outcome"] == "passed" and (touches or asked.all_tests):
                chosen.append((test["seconds"], name))
        if chosen:
            by_file.append(sorted(chosen))
    by_file.sort(key=lambda chosen: sum(seconds for seconds, _ in chosen))
    names, total = [], 0.0
    for seconds, name in (test for chosen in by_file for test in chosen):
        if names and total + seconds > asked.budget_seconds:
            continue
        names.append(name)
        total += seconds
    return names, total


def _runs(lines: dict[str, list[int]], mutant: Mutant) -> bool:
    first, last = mutant.lines
    return any(first <= line <= last for line in lines.get(mutant.file, []))


def _start(asked: Run, folder: Path, job: Job) -> int:
    """Fork the process of a job; its id."""
    job.began = time.monotonic()
    for name in ("tmp", "ranks"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    (folder / "result.json").unlink(missing_ok=True)
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if job.mutant is not None:
            _plant(asked.root, folder / "tree", job.mutant)
        status = run_tests(folder, job.files, job.tests, list(TESTS))
    finally:
        os._exit(status)


def _plant(root: Path, tree: Path, mutant: Mutant) -> None:
    path = tree / mutant.file
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()
    path.write_text(mutant.applied((root / mutant.file).read_text()))


def _kill_all(pid: int, folder: Path) -> None:
    """The process and what it has started, which may be in sessions of their own."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass  # it and its group are gone
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(path / "cwd").startswith(f"{folder}/"):
                os.kill(int(path.name), signal.SIGKILL)
        except OSError:
            continue  # gone, or not ours


def _finish(asked: Run, folder: Path, job: Job, status: int | None) -> None:
    """Note the result of a job. status: None if it was killed for the time it took."""
    seconds = round(time.monotonic() - job.began, 2)
    result = folder / "result.json"
    tests = json.loads(result.read_text()) if result.exists() else {}
    if job.mutant is None:
        asked.baseline[job.files[0]] = tests
        asked.note({"kind": "baseline", "file": job.files[0], "tests": tests})
        bad = [name for name, test in tests.items() if test["outcome"] == "failed"]
        print(f"{job.files[0]}: {len(tests)} tests, {seconds} s, failed: {bad}", flush=True)
        if not tests:
            print((folder / "log").read_text()[-3000:])
        return
    shutil.copyfile(asked.root / job.mutant.file, folder / "tree" / job.mutant.file)
    failed = [name for name, test in tests.items() if test["outcome"] == "failed"]
    # 3: pytest itself failed. 5: there was no test.
    outcomes = {None: "timeout", 0: "survived", 3: "untested", 5: "untested"}
    outcome = outcomes.get(status, "killed")
    by = failed[0] if failed else f"status {status}"
    asked.note(_record(job.mutant, outcome, by, len(tests), len(job.tests or []), seconds))


def _record(
    mutant: Mutant, outcome: str, by: str, tests: int, chosen: int, seconds: float
) -> dict[str, Any]:
    """A line of the results. tests: those that were run, of the chosen ones."""
    return {
        "kind": "mutant",
        "name": mutant.name,
        "key": mutant.key,
        "outcome": outcome,
        "by": by,
        "tests": tests,
        "chosen": chosen,
        "seconds": seconds,
    }
