"""A run that is killed at random moments, over and over, and must lose nothing.

A tiny run that saves after every step is killed with SIGKILL and started again. After each kill
every folder step-N must be whole, the next start must resume from the newest, and every loss that
was ever written must equal, to the bit, that of the run that nothing happened to.
"""

import collections
import itertools
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.jobs import SETTINGS, ForkedJob, metrics, run_job, words_of
from tests.runs import write_texts

MOMENTS = {
    "starting": ("", 0.0),
    "training": ("*", 0.1),
    "writing": ("*.incomplete", 0.02),
    "publishing": ("*.incomplete/checksums.sha256", 0.001),
    "rotating": ("step-*[0-9]", 0.003),
}
"""What is waited for before a kill: a new path among the checkpoints, and up to so many seconds more."""

STEPS = 2000
"""Of the run, which no kill lets it reach."""

STEPS_OF_A_KILL = 10
"""More than a run makes, on average, from its start to a kill."""

KILLS_OF_A_RUN = 20

END_SECONDS = 15
"""A rank whose peer is dead must be gone so long after a SIGTERM."""

ON_GPU = {
    "training.device": "cuda",
    "training.deterministic": "true",
    # The eager backend has nothing to compile.
    "attention.backend": "eager",
}


@dataclass(frozen=True)
class Case:
    async_mode: str
    ranks: int
    victims: str
    """all, or one: a random rank; the others then get a SIGTERM, as from torchrun"""
    device: str = "cpu"

    def words(self, texts: Path, run: Path, **others: object) -> list[str]:
        settings = SETTINGS | {
            "training.steps": STEPS,
            "training.output_dir": run,
            "data.source": texts,
            "parallelism.cp": self.ranks,
            "checkpoint.interval": 1,
            "checkpoint.keep_latest_k": 2,
            "checkpoint.async_mode": self.async_mode,
        }
        on_device = ON_GPU if self.device == "cuda" else {}
        others = {key.replace("__", "."): value for key, value in others.items()}
        return words_of(settings | on_device | others)


@dataclass
class Kill:
    found: str
    """what the folder of checkpoints shows about the moment that was hit"""
    problems: list[str] = field(default_factory=list)
    """empty: nothing was lost"""


class Chain:
    """A run in `folder`, on the texts beside it, that is killed again and again.

    losses: of the undisturbed run, by step.
    """

    def __init__(self, case: Case, folder: Path, losses: dict[int, float], seed: int):
        self.case = case
        self.folder = folder
        self.losses = losses
        self.random = random.Random(seed)
        self.checkpoints = folder / "run/checkpoint"
        self.newest: int | None = None
        """step of the newest whole checkpoint"""
        self.starts = 0
        self.words = case.words(folder.parent / "texts", folder / "run")

    def start(self) -> ForkedJob:
        self.starts += 1
        output = self.folder / f"output-{self.starts}"
        return ForkedJob(self.words, output, self.case.ranks, forks=self.case.device == "cpu")

    def kill(self, moment: str) -> Kill:
        with self.start() as job:
            self._wait_for(job, moment)
            ended = not job.is_running()
            problems = self._kill_now(job)
            if ended:
                problems.append(f"ended by itself: {job.text()[-1000:]}")
        left = list(self.checkpoints.glob("*.incomplete"))
        found = "between saves" if job.steps() else "before the first step"
        for path in left:
            old = int(path.stem.removeprefix("step-")) < (self.newest or 0)
            found = "rotating" if old else "writing"
            if not old and (path / "checksums.sha256").exists():
                found = "publishing"
        if len(left) > 2:
            problems.append(f"{len(left)} folders .incomplete")
        return Kill(found, problems + self._problems(job))

    def finish(self) -> list[str]:
        """Start it once more and have it stop after a few steps, in order. Returns what is wrong."""
        with self.start() as job:
            _wait(job, lambda: len(job.steps()) > 2)
            job.signal(signal.SIGTERM)
            status = job.wait()
        problems = self._problems(job)
        if status != 0:
            problems.append(f"status {status} at the end: {job.text()[-1000:]}")
        if job.steps()[-1:] != [self.newest]:
            problems.append(f"stopped after {job.steps()[-1:]}, the newest save is {self.newest}")
        if list(self.checkpoints.glob("*.incomplete")):
            problems.append("folders .incomplete stay")
        return problems

    def _wait_for(self, job: ForkedJob, moment: str) -> None:
        if moment == "starting":
            time.sleep(self.random.uniform(0, 3))
            return
        steps = self.random.randint(1, 4)
        _wait(job, lambda: len(job.steps()) >= steps)
        pattern, spread = MOMENTS[moment]
        there = set(self.checkpoints.glob("step-*")) if moment == "rotating" else set()
        _wait(job, lambda: any(path not in there for path in self.checkpoints.glob(pattern)))
        time.sleep(self.random.uniform(0, spread))

    def _kill_now(self, job: ForkedJob) -> list[str]:
        if self.case.victims == "all":
            job.signal(signal.SIGKILL)
            return []
        victim = self.random.randrange(self.case.ranks)
        job.signal(signal.SIGKILL, [victim])
        time.sleep(0.1)
        job.signal(signal.SIGTERM, [rank for rank in range(self.case.ranks) if rank != victim])
        try:
            job.wait(END_SECONDS)
        except TimeoutError as error:
            return [f"after the kill of rank {victim} and a SIGTERM: {error}"]
        return []

    def _problems(self, job: ForkedJob) -> list[str]:
        """Whether the start resumed from the newest checkpoint, repeated its losses, and left whole
        checkpoints."""
        problems = []
        resumed = [int(step) for step in re.findall(r"^resumed at step (\d+)", job.text(), re.M)]
        steps = job.steps()
        if (steps or resumed) and resumed != ([] if self.newest is None else [self.newest]):
            problems.append(f"resumed at {resumed}, the newest checkpoint was {self.newest}")
        if steps and steps[0] != (self.newest or 0) + 1:
            problems.append(f"went on with step {steps[0]}, the newest was {self.newest}")
        lines = metrics(self.folder / "run")
        if not {line["step"] for line in lines}.issuperset(steps):
            problems.append(f"metrics.jsonl lacks steps of {steps}")
        problems += [
            f"loss {line['loss']!r} of step {line['step']} is another"
            for line in lines
            if line["loss"] != self.losses.get(line["step"])
        ][:1]
        newest, broken = whole_checkpoints(self.checkpoints)
        if (newest or 0) < (self.newest or 0):
            problems.append(f"checkpoint {self.newest} is lost, the newest is {newest}")
        self.newest = newest
        return problems + broken


def whole_checkpoints(folder: Path) -> tuple[int | None, list[str]]:
    """The newest step whose checkpoint is whole, None without one, and what is wrong with others.

    Looks at the files alone, with sha256sum.
    """
    newest = None
    problems = []
    for path in folder.glob("step-*"):
        if not re.fullmatch(r"step-\d+", path.name):
            continue
        check = ["sha256sum", "--check", "--strict", "--quiet", "checksums.sha256"]
        done = subprocess.run(check, cwd=path, capture_output=True, text=True)
        there = {entry.name for entry in path.iterdir()} - {"checksums.sha256"}
        listed = set()
        if done.returncode == 0:
            lines = (path / "checksums.sha256").read_text().splitlines()
            listed = {line.split("  ", 1)[1] for line in lines}
        if there != listed or ".metadata" not in listed:
            problems.append(f"{path.name} is not whole: {done.stderr}{sorted(there ^ listed)}")
        else:
            newest = max(newest or 0, int(path.name.removeprefix("step-")))
    return newest, problems


def _wait(job: ForkedJob, condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while job.is_running() and time.monotonic() < deadline and not condition():
        time.sleep(0.0005)


def undisturbed(case: Case, folder: Path, steps: int) -> dict[int, float]:
    """The loss of each step, up to `steps`, of a run that saves nothing."""
    run = folder / f"undisturbed-{case.ranks}"
    words = case.words(
        folder / "texts",
        run,
        training__steps=steps,
        lr_scheduler__total_steps=STEPS,
        checkpoint__enable="false",
        checkpoint__async_mode="disabled",
    )
    output = folder / f"output-{run.name}"
    status, text = run_job(words, output, 300, ranks=case.ranks, forks=case.device == "cpu")
    assert status == 0, text
    return {line["step"]: line["loss"] for line in metrics(run)}


def kill_many(
    cases: list[Case], kills: int, seed: int, folder: Path, jobs: int = 1
) -> dict[str, object]:
    """This many kills, split over the cases, with `jobs` runs at a time. All files are in `folder`.

    Returns what came of them, in numbers, and what was wrong in words.
    """
    write_texts(folder / "texts")
    # Runs of at most KILLS_OF_A_RUN kills, the cases in turn.
    length = min(KILLS_OF_A_RUN, -(-kills // max(len(cases), jobs)))
    lengths = [length] * (kills // length) + [kills % length] * (kills % length > 0)
    steps = STEPS_OF_A_KILL * (length + 2)
    losses = {case.ranks: undisturbed(case, folder, steps) for case in cases}

    def one_run(number: int, case: Case, length: int) -> list[tuple[Case, Kill]]:
        """So many kills of one run, at moments of every kind, and then an orderly end."""
        (folder / f"chain-{number}").mkdir()
        moments = list(itertools.islice(itertools.cycle(MOMENTS), length))
        random.Random(seed + number).shuffle(moments)
        chain = Chain(case, folder / f"chain-{number}", losses[case.ranks], seed + number)
        done = [(case, chain.kill(moment)) for moment in moments]
        done[-1][1].problems.extend(chain.finish())
        return done

    with ThreadPoolExecutor(jobs) as pool:
        runs = pool.map(one_run, itertools.count(), itertools.cycle(cases), lengths)
        done = list(itertools.chain.from_iterable(runs))
    return {
        "kills": len(done),
        "recovered": sum(not kill.problems for _, kill in done),
        "hit": collections.Counter(kill.found for _, kill in done),
        "problems": [f"{case}: {problem}" for case, kill in done for problem in kill.problems],
    }


def cases_of(async_modes: list[str], ranks: list[int], device: str = "cpu") -> list[Case]:
    """All of them. Where there are several ranks, one is killed or all are."""
    return [
        Case(mode, size, victims, device)
        for mode, size in itertools.product(async_modes, ranks)
        for victims in (("all", "one") if size > 1 else ("all",))
    ]
