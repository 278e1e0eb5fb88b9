"""What a start leaves in the run folder: who began what and where, a log of every rank, and traces.

<output_dir>/starts/<UTC date and time>/ has start.json, the start's config.toml, and rank<N>.log.
<output_dir>/profile/rank<N>.json is a profiler trace of a few steps, for chrome://tracing or Perfetto.
"""

import contextlib
import datetime
import functools
import importlib.metadata
import itertools
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

from titan_sparse.config import Config, Profiling, save

STARTS = "starts"

_PACKAGES = ("torch", "triton", "flash-attn-4", "torchtitan", "torchao", "numpy", "tokenizers")

_GIT_SECONDS = 10.0


def begin_start(config: Config, device: torch.device) -> Path:
    """Make this start's folder, write start.json, and log to rank<N>.log from now on. Collective.

    Call it once the process group exists. All ranks get the same folder, and no two starts do.
    Raises OSError, on all ranks, where rank 0 cannot make it.
    """
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, _this_rank(device))
    output_dir = Path(config.training.output_dir)
    answer: list[str | OSError] = [""]
    if dist.get_rank() == 0:
        try:
            folder = _new_folder(output_dir / STARTS)
            start = json.dumps(_describe(ranks), indent=1)
            (folder / "start.json").write_text(start + "\n", encoding="utf-8")
            save(config, folder)
            answer = [folder.name]
        except OSError as error:
            answer = [error]
    dist.broadcast_object_list(answer, device=torch.device("cpu"))
    if isinstance(answer[0], OSError):
        raise answer[0]
    folder = output_dir / STARTS / answer[0]
    # Other hosts may have disks of their own.
    folder.mkdir(parents=True, exist_ok=True)
    _log_to(folder / f"rank{dist.get_rank()}.log")
    return folder


def log_error(error: BaseException) -> None:
    """Write an error's traceback to this rank's log, and only there.

    For errors that are caught and reported in another way. What ends the process uncaught is written anyway.
    """
    trace = (type(error), error, error.__traceback__)
    record = logging.LogRecord(
        "titan_sparse", logging.ERROR, __file__, 0, "ended by an error", None, trace
    )
    for handler in logging.getLogger().handlers:
        if isinstance(handler, RankLog):
            handler.handle(record)


def _new_folder(parent: Path) -> Path:
    """A folder that no other start has, named after the time."""
    parent.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d_%H-%M-%S")
    for number in itertools.count(1):
        # A job may be restarted within a second.
        folder = parent / (now if number == 1 else f"{now}_{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def _this_rank(device: torch.device) -> dict[str, Any]:
    return {
        "rank": dist.get_rank(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def _describe(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
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


def versions() -> dict[str, str | None]:
    """Versions of this package and of the packages that it computes with. A missing package has None,
    and so has CUDA in a build without it."""
    # The package is loaded, as this is a part of it. Nothing below imports it from above.
    found: dict[str, str | None] = {"titan_sparse": sys.modules["titan_sparse"].__version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    # With the build, such as 2.11.0+cu128.
    found["torch"] = torch.__version__
    found["cuda"] = torch.version.cuda
    return found


def git_commit(file: Path) -> dict[str, Any] | None:
    """The commit of the checkout that holds `file`, and whether it has changes that are not in it.

    None where git does not know the file, such as a package installed below a checkout of something
    else, or where there is no git.
    """
    # As git sets them for its hooks: they would name another repository.
    environment = {key: os.environ[key] for key in os.environ if not key.startswith("GIT_")}

    def git(*words: str) -> str:
        result = subprocess.run(
            ("git", *words),
            cwd=file.parent,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=_GIT_SECONDS,
        )
        return result.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        commit = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed_files": len(changed.splitlines())}


class RankLog(logging.FileHandler):
    """A rank's log file."""


def _log_to(path: Path) -> None:
    """Also write what this process logs (INFO and above) to a file. The terminal shows the same as
    before."""
    root, ours = logging.getLogger(), logging.getLogger("titan_sparse")
    if not root.handlers and logging.lastResort is not None:
        # Python shows warnings with this handler, but only while there is no other handler.
        root.addHandler(logging.lastResort)
    levels = {True: ours.getEffectiveLevel(), False: root.level}
    log = RankLog(path, encoding="utf-8")
    log.setLevel(logging.INFO)
    log.setFormatter(
        logging.Formatter(f"%(asctime)s rank {dist.get_rank()} %(levelname)s %(name)s: %(message)s")
    )
    # The root logger, and those that do not hand their records on to it, such as torch's.
    known = logging.root.manager.loggerDict.values()
    apart = [item for item in known if isinstance(item, logging.Logger) and not item.propagate]
    for logger in (root, *apart):
        for handler in logger.handlers[:]:
            if isinstance(handler, RankLog):  # of an earlier run in this process
                logger.removeHandler(handler)
                handler.close()
            elif logger is root:
                handler.addFilter(lambda r: r.levelno >= levels[r.name.startswith("titan_sparse")])
        logger.addHandler(log)
    root.setLevel(min(root.level, logging.INFO))
    ours.setLevel(logging.INFO)
    _log_uncaught_errors()


@functools.cache
def _log_uncaught_errors() -> None:
    """What ends the process is in the log before it is printed on the terminal."""
    print_error = sys.excepthook

    def log_and_print(kind, error, traceback) -> None:
        log_error(error)
        print_error(kind, error, traceback)

    sys.excepthook = log_and_print


@contextlib.contextmanager
def profiler(profiling: Profiling, output_dir: str, rank: int) -> Iterator[Callable[[int], None]]:
    """Profiles what runs inside, unless profiling.enable is false. Gives what to call after each step,
    with its number from 1.

    Writes <output_dir>/profile/rank<r>.json after the steps asked for. The first traced step waits
    for what was queued before it, and the last one for its own work, so that a trace has the work of
    its steps and no other.
    """
    if not profiling.enable:
        yield lambda step: None
        return

    def write(profile) -> None:
        folder = os.path.join(output_dir, "profile")
        os.makedirs(folder, exist_ok=True)
        profile.export_chrome_trace(os.path.join(folder, f"rank{rank}.json"))

    before = profiling.first_step - 1
    warmup = min(1, before)
    schedule = torch.profiler.schedule(
        wait=before - warmup, warmup=warmup, active=profiling.steps, repeat=1
    )
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(
        activities=activities,
        schedule=schedule,
        on_trace_ready=write,
        with_stack=profiling.with_stack,
    ) as profile:

        def step_done(step: int) -> None:
            if step in (before, before + profiling.steps) and torch.cuda.is_available():
                torch.cuda.synchronize()
            profile.step()

        yield step_done
