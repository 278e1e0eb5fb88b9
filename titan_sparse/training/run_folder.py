"""The records of a run in its folder: who began what and where, a log of every rank, traces, and at
the end a picture.

<output_dir>/starts/<UTC date and time>/ has start.json, the start's config.toml, and
rank<N>.log. <output_dir>/profile/rank<N>.json is a profiler trace of a few steps, for
chrome://tracing or Perfetto.
"""

import contextlib
import datetime
import importlib.metadata
import json
import logging
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan_sparse.config import Config, Profiling, save, trains_random_base
from titan_sparse.config.sources import source_formats
from titan_sparse.evaluation.pictures import training_figure
from titan_sparse.training.checkpoint.folders import free_name
from titan_sparse.training.faults.process_groups import on_first_rank
from titan_sparse.training.metrics_output import read_metrics

logger = logging.getLogger("titan_sparse")

_RANK_LOG = "rank log"
"""Name of the handler of logging that writes a rank's file."""

_PACKAGES = ("torch", "triton", "flash-attn-4", "torchtitan", "torchao", "numpy", "tokenizers")


def begin_start(config: Config, device: torch.device) -> Path:
    """Make this start's folder, write start.json, and log to rank<N>.log
    from now on. Collective."""
    this_rank = {
        "rank": dist.get_rank(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, this_rank)
    starts = Path(config.training.output_dir, "starts")

    def make() -> str:
        """A folder that no other start has, named after the time. A job may be
        restarted in a second."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d_%H-%M-%S")
        folder = free_name(starts / now, first="")
        folder.mkdir(parents=True)
        start = {
            "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": shlex.join(sys.orig_argv),
            "working_directory": os.getcwd(),
            "git": git_commit(Path(__file__)),
            "versions": {"python": platform.python_version(), **versions()},
            "world_size": len(ranks),
            "restart_count": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "hosts": sorted({rank["host"] for rank in ranks}),
            "ranks": ranks,
        }
        (folder / "start.json").write_text(json.dumps(start, indent=1) + "\n", encoding="utf-8")
        save(config, folder)
        return folder.name

    folder = starts / on_first_rank(make)
    # Other hosts may have disks of their own.
    folder.mkdir(parents=True, exist_ok=True)
    _log_to(folder / f"rank{dist.get_rank()}.log")
    return folder


def log_error(error: BaseException) -> None:
    """Write an error's traceback to this rank's log, and only there. The terminal gets one line."""
    trace = (type(error), error, error.__traceback__)
    record = logger.makeRecord(
        logger.name, logging.ERROR, __file__, 0, "ended by an error", (), trace
    )
    for handler in logging.getLogger().handlers:
        if handler.name == _RANK_LOG:
            handler.handle(record)


def versions() -> dict[str, str | None]:
    """Versions of this package and of what it computes with; None: it is missing."""
    # The package is loaded, as this is a part of it. Nothing below imports it from above.
    found: dict[str, str | None] = {"titan_sparse": sys.modules["titan_sparse"].__version__}
    found |= {name: version_of(name) for name in _PACKAGES}
    # With the build, such as 2.11.0+cu128.
    found["torch"] = torch.__version__
    found["cuda"] = torch.version.cuda
    return found


def version_of(package: str) -> str | None:
    """The version of a package; None: it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit(file: Path) -> dict[str, Any] | None:
    """The commit of the checkout that holds `file`, and the number of files changed since. None
    where git does not know the file, or where there is no git."""

    def git(*words: str) -> str:
        return subprocess.check_output(
            ("git", *words), cwd=file.parent, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        changed = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD"), "changed_files": len(changed.splitlines())}
    except (OSError, subprocess.SubprocessError):
        return None


def _log_to(path: Path) -> None:
    """Also write what this process logs to a file: of this package from INFO on. The terminal shows
    the same as before."""
    root, ours = logging.getLogger(), logging.getLogger("titan_sparse")
    if not root.handlers:
        # Python shows warnings with this handler, but only while there is no other handler.
        root.addHandler(logging.lastResort)
    for handler in root.handlers[:]:
        if handler.name == _RANK_LOG:  # of an earlier run in this process
            root.removeHandler(handler)
            handler.close()
        else:
            handler.setLevel(max(handler.level, ours.getEffectiveLevel()))
    ours.setLevel(logging.INFO)
    log = logging.FileHandler(path, encoding="utf-8")
    log.name = _RANK_LOG
    log.setFormatter(
        logging.Formatter(f"%(asctime)s rank {dist.get_rank()} %(levelname)s %(name)s: %(message)s")
    )
    root.addHandler(log)


@contextlib.contextmanager
def profiler(profiling: Profiling, output_dir: str, rank: int) -> Iterator[Callable[[int], None]]:
    """Profiles what runs inside, if profiling.enable. Gives what to call after each step, with its
    number from 1."""
    if not profiling.enable:
        yield lambda step: None
        return
    path = Path(output_dir, "profile", f"rank{rank}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    before = profiling.first_step - 1
    warmup = min(1, before)
    schedule = torch.profiler.schedule(
        wait=before - warmup, warmup=warmup, active=profiling.steps, repeat=1
    )
    with torch.profiler.profile(
        schedule=schedule,
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(path)),
        with_stack=profiling.with_stack,
    ) as profile:

        def step_done(step: int) -> None:
            # A trace has the work of its steps and no other.
            if step in (before, before + profiling.steps) and torch.cuda.is_available():
                torch.cuda.synchronize()
            profile.step()

        yield step_done


def report_end(config: Config, began_after: int, step: int, stopped: bool) -> None:
    """Log how a run has ended, after `step`. After training.steps, also draw how it went, and log
    the commands that come next.

    began_after: the step that it was resumed at. stopped: by a signal.
    """
    if stopped:
        logger.info("stopped by a signal after step %d", step)
    elif began_after >= config.training.steps:
        logger.info(
            "the run had already finished (training.steps = %d), and its results are in %s. To train "
            "on, write more training.steps. To start anew, write another training.output_dir, or "
            "delete that folder",
            config.training.steps,
            config.training.output_dir,
        )
    else:
        logger.info("finished %d steps", step)
        if dist.get_rank() == 0 and config.metrics.tensorboard:
            picture = draw_training(config.training.output_dir)
            logger.info("wrote %s, a picture of loss, density, and recall", picture)
        if dist.get_rank() == 0 and (commands := next_commands(config)):
            logger.info("\n  ".join(["what you can do next:", *commands]))


def draw_training(folder: str) -> Path:
    """Write training.png into a run's output_dir, of all steps logged there. Returns its path."""
    lines = dict(sorted(read_metrics(folder).items()))
    validated = {}
    if (path := Path(folder, "validation.jsonl")).is_file():
        validated = {step: line["loss"] for step, line in read_metrics(path).items()}
    picture = Path(folder, "training.png")
    training_figure(lines, dict(sorted(validated.items()))).savefig(picture, dpi=120)
    return picture


def next_commands(config: Config) -> list[str]:
    """The commands that a finished run of this configuration is good for."""
    run = config.training.output_dir
    commands = []
    if config.metrics.tensorboard:
        commands.append(["tensorboard", "--logdir", run])
    if config.checkpoint.enable:
        evaluate = ["titan-sparse", "evaluate", "--config", f"{run}/config.toml"]
        evaluate += ["--checkpoint", run, "--tasks", "position", "--out", f"{run}/evaluation"]
        parts = list(source_formats(config.data).items())
        if len(parts) > 1:
            # It reads one source.
            evaluate += ["--data.source", parts[0][0], "--data.format", parts[0][1]]
        commands.append(evaluate)
        # What adapters of random weights are made for is in no folder.
        if not (config.lora.rank and trains_random_base(config)):
            commands.append(["titan-sparse", "export_hf", run, f"{run}/exported"])
    return [shlex.join(words) for words in commands]
