"""Seconds that a job under torchrun loses when a rank is killed: from kill -9 to the end of the next step.

    python -m scripts.benchmarks.restart [--device cpu] [--ranks 2] [--restarts 2] [--json OUT] \\
        [--training.seq_len 32768 ...]

Each restart kills the last rank as its second step begins. All attempts share the compile caches;
the first one finds those of earlier runs, unless --fresh_caches gives it empty ones. Other options
are taken as train.py takes them.

detection: until torchrun sends SIGTERM to the others. teardown: until it starts new processes.
imports: until they have loaded the program. setup: process group, data, model. load: the checkpoint.
first step: with compiling.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.benchmarks.options import positive

ROOT = Path(__file__).parents[2]

PHASES = ("detection", "teardown", "imports", "setup", "load", "first step")

RANK = "--as-rank"
"""Option with which this program starts itself as a rank: the folder of the marks follows."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--restarts", type=positive, default=2)
    parser.add_argument("--fresh_caches", action="store_true", help="begin with nothing compiled")
    parser.add_argument("--json", "--out", type=Path, help="write the numbers here")
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds_to_first_step = run(args, options, folder)
        rows = [phases(folder, attempt) for attempt in range(1, args.restarts + 1)]
    print(f"attempt 0: {seconds_to_first_step:.1f} s from its start to the end of its first step")
    print("  ".join(f"{name:>10}" for name in ("restart", *PHASES, "total")))
    for attempt, row in enumerate(rows, 1):
        cells = [f"{row[name]:10.1f}" for name in (*PHASES, "total")]
        print("  ".join([f"{attempt:10}", *cells]))
    if args.json:
        # Not above: it loads torch, whose loading is measured in ranks.
        from scripts.benchmarks.provenance import provenance

        args.json, path = str(args.json), args.json
        result = provenance(args, args.device)
        result["options"]["train"] = options
        result |= {"seconds_to_first_step": seconds_to_first_step, "rows": rows}
        path.write_text(json.dumps(result, indent=1) + "\n")


def run(args: argparse.Namespace, options: list[str], folder: Path) -> float:
    """The job with its restarts. Leaves marks in `folder`. Returns the seconds of attempt 0 from its
    start to the end of its first step."""
    words = [
        *("--config", "train_configs/demo_cpu.toml"),
        *("--training.device", args.device),
        *("--training.steps", str(args.restarts + 2)),
        *("--training.output_dir", str(folder / "run")),
        *("--parallelism.cp", str(args.ranks)),
        *("--lr_scheduler.warmup_steps", "1"),
        *("--checkpoint.enable", "--checkpoint.interval", "1"),
        *options,
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(args.ranks), "--max-restarts", str(args.restarts)]
    program = ["-m", "scripts.benchmarks.restart", RANK, str(folder)]
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", "1")
    if args.fresh_caches:
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        environment["TRITON_CACHE_DIR"] = str(folder / "triton")
    began = time.time()
    with subprocess.Popen(
        [*torchrun, *program, *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        output = []
        closings = 0
        for line in job.stdout:
            output.append(line)
            # torchrun's own line, for each rank that is left.
            if "closing signal SIGTERM" in line and not (folder / f"closing{closings}").exists():
                mark(folder / f"closing{closings}")
            if re.match(r"resumed at step", line):
                closings += 1
    if job.returncode:
        sys.exit("".join(output[-60:]) + f"\nthe job ended with status {job.returncode}")
    return when(folder / "stepped0") - began


def phases(folder: Path, attempt: int) -> dict[str, float]:
    """The seconds of the phases of this restart, the first is 1."""
    killed = when(folder / f"killed{attempt - 1}")
    closing = folder / f"closing{attempt - 1}"
    ends = [
        # None where all other ranks have ended by themselves before torchrun looks.
        when(closing) if closing.exists() else killed,
        when(folder / f"started{attempt}"),
        when(folder / f"imported{attempt}"),
        when(folder / f"built{attempt}"),
        when(folder / f"loaded{attempt}"),
        when(folder / f"stepped{attempt}"),
    ]
    row = {}
    before = killed
    for name, end in zip(PHASES, ends, strict=True):
        row[name] = round(end - before, 2)
        before = end
    row["total"] = round(before - killed, 2)
    return row


def mark(path: Path) -> None:
    """Write down that something happens now, unless another rank has."""
    if not path.exists():
        path.write_text(str(time.time()))


def when(path: Path) -> float:
    """The time of a mark."""
    return float(path.read_text())


def rank_main(folder: Path, words: list[str]) -> int:
    """A rank: the training program, with marks on its way."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    mark(folder / f"started{attempt}")

    from titan_sparse import train
    from titan_sparse.trainer import Trainer

    mark(folder / f"imported{attempt}")
    load, step = Trainer._load, Trainer.step
    is_last_rank = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    is_killed = is_last_rank and attempt < int(os.environ["TORCHELASTIC_MAX_RESTARTS"])
    steps = 0

    def marked_load(self: Trainer) -> None:
        mark(folder / f"built{attempt}")
        load(self)
        mark(folder / f"loaded{attempt}")

    def marked_step(self: Trainer) -> bool:
        nonlocal steps
        if is_killed and steps == 1:
            mark(folder / f"killed{attempt}")
            os.kill(os.getpid(), signal.SIGKILL)
        stopped = step(self)
        steps += 1
        mark(folder / f"stepped{attempt}")
        return stopped

    Trainer._load, Trainer.step = marked_load, marked_step
    sys.argv = ["train.py", *words]
    return train.main()


if __name__ == "__main__":
    if RANK in sys.argv[1:2]:
        sys.exit(rank_main(Path(sys.argv[2]), sys.argv[3:]))
    main()
