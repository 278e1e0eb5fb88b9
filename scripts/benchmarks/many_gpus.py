"""All measurements of long sequences over several GPUs, by one command, for all GPUs there are.

    python -m scripts.benchmarks.many_gpus --out many --seconds 570

1  attention scaling on 1, 2, 4 and 8 GPUs (the goal on 4 is 0.88 of one GPU's speed, on 8 0.85),
   beside torch's context_parallel; a ring and a double ring over two simulated nodes
2  packed documents and a window. MagiAttention published 459 and 360 TFLOP/s per GPU
3  Qwen3-8B's step at 1,048,576 tokens, sparse and dense. TRL published 380 s on 8 GPUs
4  Llama-3.1-8B at 524,288 tokens, Qwen2.5-3B at 2,097,152
5  a soak of 200 steps with kills. NCCL parity and hangs: make test-gpu

Each run is a program of its own, with less than eight minutes. Its results are OUT/NAME.json. What
is complete is not done again: with --seconds, what would not fit any more is left, and the same
command goes on. If a run fails, its error is printed, and the others go on. What needs more GPUs
than there are is named and not run.

Status 0: all runs that were asked for and can run here are complete; 1: some failed; 3: none
failed, and some are left.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from scripts.benchmarks import steps
from scripts.benchmarks.harness import write
from scripts.benchmarks.options import parser_of, positive
from scripts.benchmarks.provenance import ROOT

LIMIT_SECONDS = 470
"""Of a run."""
ORPHANS_SECONDS = 5
"""Until ranks have seen that their torchrun is dead, and have given their memory back."""
LAST_LINES = 15
"""Of a program that failed, which are printed."""
LEFT = 3
"""The exit status if some runs are left."""

ATTENTION = "scripts.benchmarks.context_parallel"
TRAIN = "titan_sparse.train"
SOAK = "tests.faults.soak"


class Job(NamedTuple):
    """A program that is started once.

    ranks: GPUs that it needs. seconds: that it takes on H200s with NVLink, from empty caches.
    files: {name of a result: the words that make it}; only context_parallel makes several.
    """

    part: int
    name: str
    ranks: int
    seconds: float
    module: str
    files: dict[str, list[str]]

    def command(self, out: Path, names: list[str]) -> list[str]:
        """The command that writes these files into the folder `out`."""
        python = [sys.executable, "-m"]
        torchrun = [*python, "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", str(self.ranks), "-m", self.module]
        if self.module == ATTENTION:
            words = []
            for name in names:
                words += ["+", *self.files[name], "--out", str(out / f"{name}.json")]
            return [*torchrun, *words[1:]]
        [name] = names
        if self.module == TRAIN:
            return [*torchrun, *self.files[name], "--training.output_dir", str(out / "runs" / name)]
        return [*python, self.module, *self.files[name], "--out", str(out / f"{name}.json")]


# Runs ---------------------------------------------------------------------------------------------

STEP = """
--config train_configs/{config}.toml --parallelism.cp {ranks}
--training.seq_len {tokens} --training.steps 2
--attention.vertical_slash.max_verticals {verticals}
--attention.vertical_slash.max_slashes {slashes}
--training.gradient_accumulation_steps 1
--training.mlp_chunk_tokens 16384
--data.source python --data.join_packages --data.tokenizer bytes
--data.min_document_length 65536
--checkpoint.enable false
--metrics.log_every 1 --metrics.tensorboard false --metrics.recall_every 1000
"""
"""One step to warm up, in which recall is measured, and one timed."""

SMALLER = "--activation_checkpoint.attention_recompute 1 --attention.backend triton"
OFFLOADED = f"{SMALLER} --optimizer.offload"
DENSE = "--attention.pattern dense --attention.layout zigzag --attention.schedule ring"
FOUR_LAYERS = f"{DENSE} --model.layers 4"

STEPS = {
    8: [
        (3, "qwen3_8b_1m", "", 1048576, 230, ""),
        (3, "qwen3_8b_1m", "_dense", 1048576, 190, FOUR_LAYERS),
        (3, "qwen3_8b_1m", "_dense_all_layers", 1048576, 460, DENSE),
        (4, "llama3_1_8b_512k", "", 524288, 150, ""),
        (4, "qwen2_5_3b_512k", "", 2097152, 300, ""),
    ],
    4: [
        (3, "qwen3_8b_1m", "", 524288, 150, ""),
        (3, "qwen3_8b_1m", "_dense", 524288, 110, FOUR_LAYERS),
        (4, "llama3_1_8b_512k", "", 524288, 140, ""),
        (4, "qwen2_5_3b_512k", "", 1048576, 140, ""),
    ],
    2: [
        (3, "qwen3_8b_1m", "", 262144, 150, OFFLOADED),
        (3, "qwen3_8b_1m", "_dense", 262144, 100, FOUR_LAYERS),
        (4, "llama3_1_8b_512k", "", 524288, 190, OFFLOADED),
        (4, "qwen2_5_3b_512k", "", 1048576, 210, SMALLER),
    ],
}
"""Steps of whole models: part, file of train_configs, suffix, tokens, seconds, words.

Fewer GPUs have fewer tokens, and dense steps fewer layers.
"""


def runs(gpus: int) -> list[Job]:
    """All parts in order, including runs that need more GPUs than there are."""
    found = []
    full = "--repeats 3 --warm-ups 1"
    for ranks, seconds in ((1, 50), (2, 65), (4, 95), (8, 85)):
        files = {}
        schedules = "all_gather ring double_ring" if ranks > 2 else "all_gather ring"
        for backend in ("triton", "flex"):
            for tokens in (524288, 1048576):
                files[f"scaling_{ranks}x_{tokens}_{backend}"] = (
                    f"scaling --seq-lens {tokens} --backend {backend} "
                    f"--schedules {schedules} --gradient-dtypes float32 {full}"
                )
        # A dense call over a million tokens takes 13 s on two GPUs.
        for tokens in {1: [], 2: [524288]}.get(ranks, [524288, 1048576]):
            words = f"dense --schedules ring --seq-lens {tokens} --repeats 1 --warm-ups 1"
            files[f"dense_{ranks}x_{tokens}"] = words
        found.append(run_of(1, "scaling", ranks, seconds, ATTENTION, files))
    for ranks in (4, 8):
        files = {}
        for tokens in (524288, 1048576):
            files[f"nodes_{ranks}x_{tokens}"] = (
                f"scaling --pretend-nodes 2 --seq-lens {tokens} {full} --backend triton "
                "--schedules ring double_ring"
            )
        found.append(run_of(1, "nodes", ranks, 80, ATTENTION, files))
    # Everything is asked for on 8 GPUs, and on as many as there are.
    largest = max(ranks for ranks in (1, 2, 4, 8) if ranks <= gpus)
    for ranks in sorted({largest, 8} - {1}):
        files = {}
        # Long sequences of documents are much alike, and take long.
        for tokens, packs in ((8192, 2), (65536, 1)):
            files[f"masks_{ranks}x_{tokens}"] = (
                f"varlen --varlen-masks documents window --packs {packs} --stages 1 2 "
                f"--seq-lens {tokens * ranks} {full}"
            )
        found.append(run_of(2, "masks", ranks, 105, ATTENTION, files))
        for part, config, suffix, tokens, seconds, more in STEPS[ranks]:
            name = f"step_{ranks}x_{config}{suffix}_{tokens}"
            # Budgets are 5 % of the pairs at any length.
            slashes = tokens * 384 // 1048576
            words = STEP.format(
                config=config, ranks=ranks, tokens=tokens, verticals=tokens // 200, slashes=slashes
            )
            found.append(
                Job(part, name, ranks, seconds, TRAIN, {name: [*words.split(), *more.split()]})
            )
        words = f"--device cuda --ranks {ranks} --steps 200 --kill-every 100"
        found.append(run_of(5, "soak", ranks, 135, SOAK, {f"soak_{ranks}x": words}))
    return sorted(found, key=lambda run: run.part)


def run_of(
    part: int, kind: str, ranks: int, seconds: float, module: str, files: dict[str, str]
) -> Job:
    split = {name: words.split() for name, words in files.items()}
    return Job(part, f"{kind}_{ranks}x", ranks, seconds, module, split)


# Driver -------------------------------------------------------------------------------------------


def main(words: list[str]) -> int:
    args = parse(words)
    gpus = args.gpus or torch.cuda.device_count()
    if not gpus:
        print("there is no GPU here; start it where there are 2 or more", file=sys.stderr)
        return 2
    names = tuple(args.only) if args.only else ("",)
    asked = []
    for run in runs(gpus):
        if run.part in args.parts and run.name.startswith(names):
            asked.append(run)
    out = Path(args.out)
    (out / "logs").mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + args.seconds if args.seconds else math.inf
    statuses = set()
    for run in asked:
        status = carry_out(run, out, gpus, ends)
        statuses.add(status.partition(":")[0])
        print(f"part {run.part}  {run.name}: {status}", flush=True)
    if "failed" in statuses:
        return 1
    return LEFT if "left" in statuses else 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = parser_of("scripts.benchmarks.many_gpus", __doc__)
    add = parser.add_argument
    add("--out", default="outputs/many_gpus", help="folder of the results")
    add("--parts", type=int, nargs="+", choices=range(1, 6), default=[1, 2, 3, 4, 5])
    add("--only", nargs="+", default=[], help="of these parts, runs whose names begin so")
    add("--seconds", type=float, help="for all runs together; default: as long as it takes")
    add("--gpus", type=positive, help="use fewer than there are")
    return parser.parse_args(words)


def carry_out(run: Job, out: Path, gpus: int, ends: float) -> str:
    """Make the run's files that are missing.

    Returns "complete", "was complete", "left", "failed: " and how, or why it cannot run here. ends:
    when there is no more time, on the monotonic clock.
    """
    missing = [name for name in run.files if not read(out, name).get("complete")]
    if not missing:
        return "was complete"
    if run.ranks > gpus:
        return f"needs {run.ranks} GPUs, found {gpus}"
    if run.seconds > ends - time.monotonic():
        return "left"
    began = time.monotonic()
    error = start(run, out, missing, min(LIMIT_SECONDS, ends - began))
    if error:
        return f"failed: {error}"
    seconds = round(time.monotonic() - began, 1)
    for name in missing:
        if run.module == TRAIN:
            result = steps.collect([(name, out / "runs" / name)])
        else:
            result = read(out, name)
        write(out / f"{name}.json", result | {"complete": True, "run_seconds": seconds})
    return "complete"


def start(run: Job, out: Path, names: list[str], limit: float) -> str | None:
    """Start the run's program. Returns None, or how it has failed, with its last lines."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # torchrun would say 1 thread, which an optimizer on the CPU feels.
    threads = str(max(1, (os.cpu_count() or 1) // run.ranks))
    environment = {"OMP_NUM_THREADS": threads} | os.environ | {"PYTHONPATH": path}
    log = out / "logs" / f"{run.name}.log"
    with open(log, "w") as file:
        job = subprocess.Popen(
            run.command(out.resolve(), names),
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group that can be killed as a whole
        )
        try:
            status = job.wait(limit)
            how = f"status {status}" if status else None
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
            time.sleep(ORPHANS_SECONDS)
            how = f"not over after {limit:.0f} s"
    last = log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
    return f"{how}: " + "\n".join(last) if how else None


def read(out: Path, name: str) -> dict:
    """A result; {} where there is none."""
    path = out / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
