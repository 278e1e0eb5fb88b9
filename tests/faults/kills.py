"""A run that is killed at random moments, over and over, and must lose nothing.

A tiny run that saves after every step is killed with SIGKILL and started again. After each kill
every folder step-N must be whole, the next start must resume from the newest, and every loss that
was ever written must equal, to the bit, that of the run that nothing happened to.
"""

import itertools
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
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

    def settings(self, folder: Path, run: str) -> dict[str, object]:
        own = {
            "training.steps": STEPS,
            "training.output_dir": folder / run,
            "data.source": folder / "texts",
            "parallelism.cp": self.ranks,
            "checkpoint.interval": 1,
            "checkpoint.keep_latest_k": 2,
            "checkpoint.async_mode": self.async_mode,
        }
        return SETTINGS | own | (ON_GPU if self.device == "cuda" else {})


def kill_many(case: Case, kills: int, seed: int, folder: Path) -> list[str]:
    """So many kills of a run, at moments of every kind, and then an orderly end. Returns what was lost."""
    chance = random.Random(seed)
    write_texts(folder / "texts")
    options = {"ranks": case.ranks, "forks": case.device == "cpu"}
    undisturbed = case.settings(folder, "undisturbed") | {
        "training.steps": STEPS_OF_A_KILL * (kills + 2),
        "lr_scheduler.total_steps": STEPS,
        "checkpoint.enable": "false",
        "checkpoint.async_mode": "disabled",
    }
    status, text = run_job(words_of(undisturbed), folder / "undisturbed.log", 300, **options)
    assert status == 0, text
    losses = {line["step"]: line["loss"] for line in metrics(folder / "undisturbed")}

    words = words_of(case.settings(folder, "run"))
    moments = list(itertools.islice(itertools.cycle(MOMENTS), kills))
    chance.shuffle(moments)
    problems: list[str] = []
    newest = None
    for number, moment in enumerate([*moments, "an orderly end"]):
        with ForkedJob(words, folder / f"output-{number}", **options) as job:
            if moment == "an orderly end":
                _wait(job, lambda job=job: len(job.steps()) > 2)
                job.signal(signal.SIGTERM)
                problems += [job.text()[-1000:]] if job.wait() else []
            else:
                _wait_for(job, moment, folder / "run/checkpoint", chance)
                problems += [] if job.is_running() else [f"ended: {job.text()[-1000:]}"]
                problems += _kill(job, case, chance)
        problems += _lost(job, folder / "run", newest, losses)
        newest, broken = whole_checkpoints(folder / "run/checkpoint")
        problems += broken
    if job.steps()[-1:] != [newest] or list(folder.glob("run/checkpoint/*.incomplete")):
        problems.append(f"stopped after {job.steps()[-1:]}, the newest save is {newest}")
    return problems


def _wait_for(job: ForkedJob, moment: str, checkpoints: Path, chance: random.Random) -> None:
    if moment == "starting":
        time.sleep(chance.uniform(0, 3))
        return
    steps = chance.randint(1, 4)
    _wait(job, lambda: len(job.steps()) >= steps)
    pattern, spread = MOMENTS[moment]
    there = set(checkpoints.glob("step-*")) if moment == "rotating" else set()
    _wait(job, lambda: any(path not in there for path in checkpoints.glob(pattern)))
    time.sleep(chance.uniform(0, spread))


def _kill(job: ForkedJob, case: Case, chance: random.Random) -> list[str]:
    if case.victims == "all":
        job.signal(signal.SIGKILL)
        return []
    victim = chance.randrange(case.ranks)
    job.signal(signal.SIGKILL, [victim])
    time.sleep(0.1)
    job.signal(signal.SIGTERM, [rank for rank in range(case.ranks) if rank != victim])
    try:
        job.wait(END_SECONDS)
    except TimeoutError as error:
        return [f"after the kill of rank {victim} and a SIGTERM: {error}"]
    return []


def _lost(job: ForkedJob, run: Path, newest: int | None, losses: dict[int, float]) -> list[str]:
    """Whether the start resumed from the newest checkpoint, which is not lost, and repeated its losses."""
    problems = []
    resumed = [int(step) for step in re.findall(r"^resumed at step (\d+)", job.text(), re.M)]
    steps = job.steps()
    if (steps or resumed) and resumed != ([] if newest is None else [newest]):
        problems.append(f"resumed at {resumed}, the newest checkpoint was {newest}")
    if steps and steps[0] != (newest or 0) + 1:
        problems.append(f"went on with step {steps[0]}, the newest was {newest}")
    lines = metrics(run)
    if not {line["step"] for line in lines}.issuperset(steps):
        problems.append(f"metrics.jsonl lacks steps of {steps}")
    others = [line for line in lines if line["loss"] != losses.get(line["step"])]
    if others:
        problems.append(f"another loss: {others[0]}")
    if (whole_checkpoints(run / "checkpoint")[0] or 0) < (newest or 0):
        problems.append(f"checkpoint {newest} is lost")
    return problems


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
