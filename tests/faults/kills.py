"""A run that is killed at random moments, over and over, and must lose nothing.

    python -m tests.faults.kills --kills 70 --async-mode async_with_pinned_mem --device cuda

A tiny run that saves after every step is killed with SIGKILL and started again. After each kill
every folder step-N must be whole, the next start must resume from the newest, and every loss that
was ever written must equal, to the bit, that of the run that nothing happened to. Options that are
not its own go to train.py.
"""

import argparse
import collections
import dataclasses
import hashlib
import itertools
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.benchmarks.provenance import provenance
from tests.faults.jobs import SETTINGS, ForkedJob, metrics, run_job, words_of
from tests.runs import write_texts

MOMENTS = ("starting", "training", "writing", "publishing", "rotating")
"""What is waited for before a kill."""

KEPT = 2
KILLS_OF_A_RUN = 20
STEPS_OF_A_KILL = 10
"""More than a run makes, on average, from its start to a kill."""

END_SECONDS = 15
"""A rank whose peer is dead must be gone so long after a SIGTERM."""


@dataclasses.dataclass(frozen=True)
class Case:
    async_mode: str
    ranks: int
    victims: str
    """all, or one: a random rank; the others then get a SIGTERM, as from torchrun"""
    device: str = "cpu"
    steps: int = 2000
    """of the run, which no kill lets it reach"""
    options: tuple[tuple[str, str], ...] = ()
    """more keys of the configuration, and their values"""

    def settings(self, texts: Path) -> dict[str, object]:
        """Of the command line, but for the folder of the run."""
        on_device: dict[str, object] = {}
        if self.device == "cuda":
            # The eager backend has nothing to compile.
            on_device = {
                "training.device": "cuda",
                "training.deterministic": "true",
                "attention.backend": "eager",
            }
        return (
            SETTINGS
            | {
                "training.steps": self.steps,
                "data.source": texts,
                "parallelism.cp": self.ranks,
                "checkpoint.interval": 1,
                "checkpoint.keep_latest_k": KEPT,
                "checkpoint.async_mode": self.async_mode,
            }
            | on_device
            | dict(self.options)
        )


@dataclasses.dataclass
class Kill:
    moment: str
    """what was waited for, one of MOMENTS"""
    found: str
    """what the folder of checkpoints shows about the moment that was hit"""
    newest: int | None
    """step of the newest whole checkpoint after it; None: there is none yet"""
    problems: list[str]
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
        self.run = folder / "run"
        self.checkpoints = self.run / "checkpoint"
        self.newest: int | None = None
        self.starts = 0
        # Of the last start, until its first step.
        self.start_seconds = 3.0
        settings = case.settings(folder.parent / "texts")
        self.words = words_of(settings | {"training.output_dir": self.run})

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
        problems += self._problems_of_start(job)
        newest, broken = whole_checkpoints(self.checkpoints)
        problems += broken
        incomplete = list(self.checkpoints.glob("*.incomplete"))
        if len(incomplete) > 2:
            problems.append(f"{len(incomplete)} folders .incomplete")
        if (newest or 0) < (self.newest or 0):
            problems.append(f"checkpoint {self.newest} is lost, the newest is {newest}")
        found = self._found(job)
        self.newest = newest
        return Kill(moment, found, newest, problems)

    def finish(self) -> list[str]:
        """Start it once more and have it stop after a few steps, in order. Returns what is wrong."""
        with self.start() as job:
            _wait(job, lambda: len(job.steps()) > 2)
            job.signal(signal.SIGTERM)
            status = job.wait()
        problems = self._problems_of_start(job)
        if status != 0:
            problems.append(f"status {status} at the end: {job.text()[-1000:]}")
        newest, broken = whole_checkpoints(self.checkpoints)
        if job.steps()[-1:] != [newest]:
            problems.append(f"stopped after step {job.steps()[-1:]}, the newest save is {newest}")
        left_over = [path.name for path in self.checkpoints.glob("*.incomplete")]
        if left_over:
            problems.append(f"{left_over} stay")
        return problems + broken

    def _wait_for(self, job: ForkedJob, moment: str) -> None:
        began = time.monotonic()
        if moment == "starting":
            time.sleep(self.random.uniform(0, self.start_seconds))
            return
        _wait(job, lambda: bool(job.steps()))
        self.start_seconds = time.monotonic() - began
        steps = self.random.randint(1, 4)
        _wait(job, lambda: len(job.steps()) >= steps)
        there = {path.name for path in self.checkpoints.glob("step-*")}
        pattern, spread = {
            "training": ("*", 0.1),
            "writing": ("*.incomplete", 0.02),
            "publishing": ("*.incomplete/checksums.sha256", 0.001),
            "rotating": ("step-*[0-9]", 0.003),
        }[moment]
        if moment == "rotating":
            _wait(job, lambda: any(p.name not in there for p in self.checkpoints.glob(pattern)))
        elif moment != "training":
            _wait(job, lambda: any(self.checkpoints.glob(pattern)))
        time.sleep(self.random.uniform(0, spread))

    def _kill_now(self, job: ForkedJob) -> list[str]:
        if self.case.victims == "all":
            job.signal(signal.SIGKILL)
            return []
        victim = self.random.randrange(self.case.ranks)
        job.signal(signal.SIGKILL, [victim])
        others = [rank for rank in range(self.case.ranks) if rank != victim]
        time.sleep(0.1)
        job.signal(signal.SIGTERM, others)
        try:
            job.wait(END_SECONDS)
        except TimeoutError as error:
            return [f"after the kill of rank {victim} and a SIGTERM: {error}"]
        return []

    def _problems_of_start(self, job: ForkedJob) -> list[str]:
        """Whether the start resumed from the newest checkpoint and repeated its losses."""
        problems = []
        resumed = re.findall(r"^resumed at step (\d+)", job.text(), re.MULTILINE)
        steps = job.steps()
        if (steps or resumed) and [int(step) for step in resumed] != (
            [] if self.newest is None else [self.newest]
        ):
            problems.append(f"resumed at {resumed}, the newest checkpoint was {self.newest}")
        if steps and steps[0] != (self.newest or 0) + 1:
            problems.append(f"went on with step {steps[0]}, the newest was {self.newest}")
        try:
            lines = metrics(self.run)
        except ValueError as error:
            return [*problems, f"metrics.jsonl: {error}"]
        logged = {line["step"] for line in lines}
        if not logged.issuperset(steps):
            problems.append(f"metrics.jsonl lacks steps of {steps}")
        for line in lines:
            wanted = self.losses.get(line["step"])
            if line["loss"] != wanted:
                problems.append(f"loss {line['loss']!r} of step {line['step']} is not {wanted!r}")
                break
        return problems

    def _found(self, job: ForkedJob) -> str:
        """Which part of a save was cut short, judged by the files it left."""
        if not job.steps():
            return "before the first step"
        incomplete = list(self.checkpoints.glob("*.incomplete"))
        saved = len(list(self.checkpoints.glob("step-*"))) - len(incomplete)
        for path in incomplete:
            step = int(path.stem.removeprefix("step-"))
            if step < (self.newest or 0):
                return "rotating"
            if (path / "checksums.sha256").exists():
                return "publishing"
            return "writing" if any(path.iterdir()) else "beginning to write"
        return "rotating" if saved > KEPT else "between saves"


def whole_checkpoints(folder: Path) -> tuple[int | None, list[str]]:
    """The newest step whose checkpoint is whole, None without one, and what is wrong with others.

    Looks at the files alone, as sha256sum --check does.
    """
    newest = None
    problems = []
    for path in folder.glob("step-*"):
        match = re.fullmatch(r"step-(\d+)", path.name)
        if not match:
            continue
        problem = _broken(path)
        if problem:
            problems.append(f"{path.name} is not whole: {problem}")
        else:
            newest = max(newest or 0, int(match[1]))
    return newest, problems


def _broken(checkpoint: Path) -> str:
    sums = checkpoint / "checksums.sha256"
    if not sums.exists():
        return "no checksums"
    listed = dict(reversed(line.split("  ", 1)) for line in sums.read_text().splitlines())
    there = {path.name for path in checkpoint.iterdir()} - {sums.name}
    if there != set(listed) or ".metadata" not in listed:
        return f"files {sorted(there)}, checksums of {sorted(listed)}"
    for name, wanted in listed.items():
        if hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() != wanted:
            return f"{name} has another checksum"
    return ""


def _wait(job: ForkedJob, condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while job.is_running() and time.monotonic() < deadline and not condition():
        time.sleep(0.0005)


def undisturbed(case: Case, folder: Path, steps: int) -> dict[int, float]:
    """The loss of each step, up to `steps`, of a run that saves nothing."""
    name = f"undisturbed-{case.ranks}"
    settings = case.settings(folder / "texts") | {
        "training.output_dir": folder / name,
        "training.steps": steps,
        "lr_scheduler.total_steps": case.steps,
        "checkpoint.enable": "false",
        "checkpoint.async_mode": "disabled",
    }
    status, text = run_job(
        words_of(settings),
        folder / f"output-{name}",
        300,
        ranks=case.ranks,
        forks=case.device == "cpu",
    )
    assert status == 0, text
    return {line["step"]: line["loss"] for line in metrics(folder / name)}


def kill_many(
    cases: list[Case], kills: int, seed: int, folder: Path, jobs: int = 1
) -> list[tuple[Case, Kill]]:
    """Run this many kills, split over the cases, with `jobs` runs at a time. All files are in `folder`."""
    write_texts(folder / "texts")
    # Runs of at most KILLS_OF_A_RUN kills, the cases in turn.
    runs: list[tuple[Case, int]] = []
    while kills:
        length = min(KILLS_OF_A_RUN, -(-kills // max(len(cases), jobs)))
        for case in cases:
            runs.append((case, min(length, kills)))
            kills -= runs[-1][1]

    losses = {}
    steps = STEPS_OF_A_KILL * (max(length for _, length in runs) + 2)
    for case in cases:
        if case.ranks not in losses:
            losses[case.ranks] = undisturbed(case, folder, steps)

    def one_run(number: int) -> list[tuple[Case, Kill]]:
        case, length = runs[number]
        run_folder = folder / f"chain-{number}"
        done = kill_in_a_row(case, length, run_folder, losses[case.ranks], seed + number)
        return [(case, kill) for kill in done]

    with ThreadPoolExecutor(jobs) as pool:
        return list(itertools.chain.from_iterable(pool.map(one_run, range(len(runs)))))


def kill_in_a_row(
    case: Case, kills: int, folder: Path, losses: dict[int, float], seed: int
) -> list[Kill]:
    """So many kills of one run, at moments of every kind, and then an orderly end."""
    if not kills:
        return []
    folder.mkdir()
    moments = list(itertools.islice(itertools.cycle(MOMENTS), kills))
    random.Random(seed).shuffle(moments)
    chain = Chain(case, folder, losses, seed)
    done = [chain.kill(moment) for moment in moments]
    done[-1].problems.extend(chain.finish())
    return done


def cases_of(async_modes: list[str], ranks: list[int], device: str) -> list[Case]:
    """All of them. Where there are several ranks, one is killed or all are."""
    cases = []
    for mode, size in itertools.product(async_modes, ranks):
        for victims in ("all", "one") if size > 1 else ("all",):
            cases.append(Case(mode, size, victims, device))
    return cases


def options_of(words: list[str]) -> tuple[tuple[str, str], ...]:
    return tuple(zip([word.removeprefix("--") for word in words[::2]], words[1::2], strict=True))


def summary(done: list[tuple[Case, Kill]]) -> dict[str, object]:
    """What came of the kills, in numbers, and what was wrong in words."""
    by_case: dict[str, dict[str, int]] = {}
    for case, kill in done:
        counts = by_case.setdefault(_name(case), {"kills": 0, "recovered": 0})
        counts["kills"] += 1
        counts["recovered"] += not kill.problems
    return {
        "kills": len(done),
        "recovered": sum(not kill.problems for _, kill in done),
        "by_case": by_case,
        "hit": dict(collections.Counter(kill.found for _, kill in done).most_common()),
        "problems": [
            f"{_name(case)}, {kill.moment}: {problem}"
            for case, kill in done
            for problem in kill.problems
        ],
    }


def _name(case: Case) -> str:
    return f"{case.async_mode}, {case.ranks} ranks, {case.victims} killed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    modes = ["disabled", "async", "async_with_pinned_mem"]
    parser.add_argument("--async-mode", nargs="+", choices=modes, default=modes[:2])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the numbers, JSON")
    args, words = parser.parse_known_args()

    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    cases = [
        dataclasses.replace(case, options=options_of(words))
        for case in cases_of(args.async_mode, args.ranks, args.device)
    ]
    found = summary(kill_many(cases, args.kills, args.seed, folder, args.jobs))
    seconds = time.monotonic() - began
    args.out = args.out and str(args.out)
    results = provenance(args, args.device) | {"train": words} | found | {"seconds": round(seconds)}
    if args.out:
        Path(args.out).write_text(json.dumps(results, indent=1) + "\n")
    for problem in found["problems"]:
        print(problem)
    print(
        f"{found['recovered']} of {found['kills']} kills recovered to the bit in {seconds:.0f} s; "
        f"hit: {found['hit']}"
    )
    if found["problems"]:
        print(f"the runs are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
