"""All tables of long sequences over several GPUs, by one command, for as many GPUs as there are.

    python -m scripts.benchmarks.many_gpus --out many --seconds 570
    python -m scripts.benchmarks.many_gpus --out many --list
    python -m scripts.benchmarks.many_gpus --out toy --device cpu --toy

1  attention scaling on 1, 2, 4 and 8 GPUs, beside torch's context_parallel; a double ring over two
   pretended nodes
2  packed documents and a window, beside what MagiAttention published
3  Qwen3-8B's step at 1,048,576 tokens, sparse and dense, beside what TRL published
4  Llama-3.1-8B at 524,288 tokens, Qwen2.5-3B at 2,097,152
5  a soak of 200 steps with kills. NCCL parity and hangs: make test-gpu

Each run is a program of its own, with less than eight minutes. Its results are OUT/NAME.json. What
is complete is not done again: with --seconds, what would not fit any more is left, and the same
command goes on. A run that fails is recorded with its error, and the others go on. What needs more
GPUs than there are is recorded as not run. At the end all results in OUT are printed as tables with
the goals beside them, and written to OUT/tables.md.

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
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from scripts.benchmarks import steps
from scripts.benchmarks.harness import write
from scripts.benchmarks.options import parser_of, positive
from scripts.benchmarks.provenance import output_of, provenance, versions

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 470
"""Of a run."""
ORPHANS_SECONDS = 5
"""Until ranks have seen that their torchrun is dead, and have given their memory back."""
LAST_LINES = 15
"""Of a program that failed, which are recorded."""
LEFT = 3
"""The exit status if some runs are left."""


class Run(NamedTuple):
    """A program that is started once.

    ranks: GPUs that it needs. seconds: that it takes on H200s with NVLink, from empty caches.
    module: of context_parallel, tests.faults.soak, or titan_sparse.train. files: {name of a
    result: the words that make it}; only context_parallel makes several.
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

ATTENTION = "scripts.benchmarks.context_parallel"
TRAIN = "titan_sparse.train"
SOAK = "tests.faults.soak"

FULL = ["--repeats", "3", "--warm-ups", "1"]
TOY = ["--device", "cpu", "--repeats", "1", "--warm-ups", "0", "--head-dim", "16"]
TOY += ["--block-size", "64", "--heads", "2:1"]
TOY_SPARSE = ["--density", "0.4", "--verticals", "0.04"]


def runs(gpus: int, toy: bool) -> list[Run]:
    """All parts in order, including runs that need more GPUs than there are."""
    largest = max(ranks for ranks in (1, 2, 4, 8) if ranks <= gpus)
    # Everything is asked for on 8; what is here is measured too.
    here_and_8 = [ranks for ranks in dict.fromkeys((largest, 8)) if ranks > 1]
    found = [scaling(ranks, toy) for ranks in (1, 2, 4, 8)]
    found += [nodes(ranks, toy) for ranks in (4, 8)]
    found += [masks(ranks, toy) for ranks in here_and_8]
    for ranks in here_and_8:
        found += [toy_step(ranks)] if toy else steps_of(ranks)
        words = ["--device", "cpu" if toy else "cuda", "--ranks", str(ranks)]
        words += [
            "--steps",
            *(["12", "--kill-every", "8"] if toy else ["200", "--kill-every", "100"]),
        ]
        found.append(Run(5, f"soak_{ranks}x", ranks, 135, SOAK, {f"soak_{ranks}x": words}))
    return sorted(found, key=lambda run: run.part)


def scaling(ranks: int, toy: bool) -> Run:
    """Sparse attention by all schedules, and dense beside torch's."""
    lengths = (1024,) if toy else (524288, 1048576)
    sizes = [*TOY, *TOY_SPARSE] if toy else FULL
    schedules = ["all_gather", "ring", *(["double_ring"] if ranks > 2 else [])]
    files = {}
    for backend in ("eager",) if toy else ("triton", "flex"):
        for seq_len in lengths:
            files[f"scaling_{ranks}x_{seq_len}_{backend}"] = [
                *("scaling", "--seq-lens", str(seq_len), "--backend", backend),
                *("--schedules", *schedules, "--gradient-dtypes", "float32", *sizes),
            ]
    # A dense call over a million tokens takes 13 s on two GPUs.
    for seq_len in lengths if ranks > 2 else lengths[:1] if ranks == 2 else ():
        words = ["dense", "--brief", "--seq-lens", str(seq_len), *sizes, "--repeats", "1"]
        files[f"dense_{ranks}x_{seq_len}"] = words
    seconds = {1: 50, 2: 65, 4: 95, 8: 85}[ranks]
    return Run(1, f"scaling_{ranks}x", ranks, seconds, ATTENTION, files)


def nodes(ranks: int, toy: bool) -> Run:
    """double_ring over two pretended nodes, beside its computing and its transfers alone."""
    sizes = [*TOY, *TOY_SPARSE] if toy else [*FULL, "--backend", "triton"]
    files = {}
    for seq_len in (1024,) if toy else (524288, 1048576):
        words = ["nodes", "--pretend-nodes", "2", "--seq-lens", str(seq_len), *sizes]
        files[f"nodes_{ranks}x_{seq_len}"] = words
    return Run(1, f"nodes_{ranks}x", ranks, 80, ATTENTION, files)


def masks(ranks: int, toy: bool) -> Run:
    """Packed documents and a window by group_cast, ring and all_gather."""
    sizes = [*TOY, "--window", "128"] if toy else FULL
    files = {}
    for tokens in (512,) if toy else (8192, 65536):
        # Long sequences of documents are much alike, and take long.
        packs = "1" if tokens > 8192 else "2"
        files[f"masks_{ranks}x_{tokens}"] = [
            *("varlen", "--varlen-masks", "documents", "window", "--packs", packs),
            *("--stages", "1", "2", "--seq-lens", str(tokens * ranks), *sizes),
        ]
    return Run(2, f"masks_{ranks}x", ranks, 105, ATTENTION, files)


STEP_WORDS = [
    *("--training.gradient_accumulation_steps", "1"),
    *("--training.mlp_chunk_tokens", "16384"),
    *("--data.source", "python", "--data.join_packages", "--data.tokenizer", "bytes"),
    *("--data.min_document_length", "65536"),
    *("--checkpoint.enable", "false"),
    *("--metrics.log_every", "1", "--metrics.tensorboard", "false"),
    # Recall is measured in the first step, which is not timed.
    *("--metrics.recall_every", "1000"),
]
SMALLER = ["--activation_checkpoint.attention_recompute", "1", "--attention.backend", "triton"]
OFFLOADED = [*SMALLER, "--optimizer.offload"]
DENSE = ["--attention.pattern", "dense", "--attention.layout", "zigzag"]
DENSE += ["--attention.schedule", "ring"]
FOUR_LAYERS = [*DENSE, "--model.layers", "4"]

STEPS = {
    8: [
        (3, "qwen3_8b_1m", "", 1048576, 230, []),
        (3, "qwen3_8b_1m", "_dense", 1048576, 190, FOUR_LAYERS),
        (3, "qwen3_8b_1m", "_dense_all_layers", 1048576, 460, DENSE),
        (4, "llama3_1_8b_512k", "", 524288, 150, []),
        (4, "qwen2_5_3b_512k", "", 2097152, 300, []),
    ],
    4: [
        (3, "qwen3_8b_1m", "", 524288, 150, []),
        (3, "qwen3_8b_1m", "_dense", 524288, 110, FOUR_LAYERS),
        (4, "llama3_1_8b_512k", "", 524288, 140, []),
        (4, "qwen2_5_3b_512k", "", 1048576, 140, []),
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


def steps_of(ranks: int) -> list[Run]:
    """One step to warm up, and one timed. Budgets are 5 % of the pairs at any length."""
    found = []
    for part, config, suffix, tokens, seconds, words in STEPS[ranks]:
        name = f"step_{ranks}x_{config}{suffix}_{tokens}"
        options = [
            *("--config", f"train_configs/{config}.toml", "--parallelism.cp", str(ranks)),
            *("--training.seq_len", str(tokens), "--training.steps", "2"),
            *("--attention.vertical_slash.max_verticals", str(tokens // 200)),
            *("--attention.vertical_slash.max_slashes", str(tokens * 384 // 1048576)),
            *STEP_WORDS,
            *words,
        ]
        found.append(Run(part, name, ranks, seconds, TRAIN, {name: options}))
    return found


def toy_step(ranks: int) -> Run:
    options = [
        *("--config", "train_configs/demo_cpu.toml", "--parallelism.cp", str(ranks)),
        *(
            "--training.steps",
            "2",
            "--training.seq_len",
            "1024",
            "--lr_scheduler.warmup_steps",
            "1",
        ),
        *("--attention.vertical_slash.dense_below", "256", "--checkpoint.enable", "false"),
        *("--metrics.log_every", "1", "--metrics.tensorboard", "false"),
    ]
    return Run(3, f"step_{ranks}x_toy", ranks, 20, TRAIN, {f"step_{ranks}x_toy": options})


# Driver -------------------------------------------------------------------------------------------


def main(words: list[str]) -> int:
    args = parse(words)
    gpus = args.gpus or (2 if args.device == "cpu" else torch.cuda.device_count())
    if not gpus:
        print("there is no GPU here; write --device cpu --toy to try it out", file=sys.stderr)
        return 2
    asked = [run for run in runs(gpus, args.toy) if run.part in args.parts]
    if args.only:
        asked = [run for run in asked if run.name.startswith(tuple(args.only))]
    if args.list:
        for run in asked:
            seconds = f"{run.seconds:8.0f} s" if run.ranks <= gpus else "   no GPUs"
            print(f"part {run.part} {run.name:<44} {run.ranks} GPUs {seconds}")
        return 0
    out = Path(args.out)
    (out / "logs").mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + args.seconds if args.seconds else math.inf
    statuses = set()
    for run in asked:
        status = carry_out(run, args, gpus, ends)
        statuses.add(status)
        print(f"part {run.part}  {run.name}: {status}", flush=True)
    text = tables(out)
    (out / "tables.md").write_text(text)
    print(text)
    if "failed" in statuses:
        return 1
    return LEFT if "left" in statuses else 0


def parse(words: list[str]) -> argparse.Namespace:
    """The options; exits with status 2 on a mistake."""
    parser = parser_of("scripts.benchmarks.many_gpus", __doc__)
    add = parser.add_argument
    add("--out", default="outputs/many_gpus", help="folder of the results")
    add("--parts", type=int, nargs="+", choices=range(1, 6), default=range(1, 6))
    add("--only", nargs="+", default=[], help="of these parts, runs whose names begin so")
    add("--again", action="store_true", help="what is complete too")
    add("--list", action="store_true", help="print the runs with their expected seconds, and stop")
    add("--seconds", type=float, help="for all runs together; default: as long as it takes")
    add("--gpus", type=positive, help="use fewer than there are")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--toy", action="store_true", help="sizes for a CPU, which say nothing")
    args = parser.parse_args(words)
    if (args.device == "cpu") != args.toy:
        parser.error("--device cpu and --toy go together; write both or none")
    args.parts = list(args.parts)
    return args


def carry_out(run: Run, args: argparse.Namespace, gpus: int, ends: float) -> str:
    """Make the run's files that are missing.

    Returns "complete", "was complete", "failed", "left", or why it cannot run here. ends: when
    there is no more time, on the monotonic clock.
    """
    out = Path(args.out)
    missing = list(run.files)
    if not args.again:
        missing = [name for name in missing if not read(out, name).get("complete")]
    if not missing:
        return "was complete"
    if run.ranks > gpus:
        return not_run(args, missing, f"needs {run.ranks} GPUs, found {gpus}")
    flex = [name for name in missing if name.endswith("_flex")]
    if flex and versions()["flash-attn-4"] is None:
        status = not_run(args, flex, "flash-attn-4 is not installed")
        missing = [name for name in missing if name not in flex]
        if not missing:
            return status
    if run.seconds > ends - time.monotonic():
        return "left"
    for name in missing:
        # Rows of an earlier try would look like this one's.
        (out / f"{name}.json").unlink(missing_ok=True)
    began = time.monotonic()
    error = start(run, out, missing, min(LIMIT_SECONDS, ends - began))
    for name in missing:
        if run.module == TRAIN and not error:
            result = steps.collect([(name, out / "runs" / name)]) | {"ranks": run.ranks}
        else:
            result = read(out, name) or header(args) | {"rows": []}
        if not result.get("complete"):
            result |= {"error": error} if error else {"complete": True}
        seconds = round(time.monotonic() - began, 1)
        write(out / f"{name}.json", result | {"run_seconds": seconds})
    if error:
        print(error, flush=True)
    return "failed" if error else "complete"


def header(args: argparse.Namespace) -> dict:
    """provenance(), computed in a child process: asking for a GPU's name creates a CUDA context."""
    about = provenance(args, "cpu")
    if args.device == "cuda":
        names = output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
        about["gpu"] = names.partition("\n")[0] or None
    return about


def not_run(args: argparse.Namespace, names: list[str], why: str) -> str:
    """Record it, unless there are rows of an earlier call. Returns "not run: " and why."""
    out = Path(args.out)
    for name in names:
        if not read(out, name).get("rows"):
            write(out / f"{name}.json", header(args) | {"not_run": why, "rows": []})
    return f"not run: {why}"


def start(run: Run, out: Path, names: list[str], limit: float) -> str | None:
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


# Tables -------------------------------------------------------------------------------------------

GOALS_OF_ALONE = {4: 0.88, 8: 0.85}
"""Share of one GPU's speed, by the number of GPUs."""
TIMES = "fwd + bwd, ms"
TABLES = {
    "scaling": (
        "1. Attention scaling",
        ("seq_len", "ranks", "backend", "schedule", TIMES, "visited_tflops", "of_alone", "goal"),
    ),
    "dense": (
        "1. Dense attention",
        ("seq_len", "ranks", "name", "layout", "schedule", "rotate", "backend", TIMES, "tflops"),
    ),
    "nodes": (
        "1. Double ring over two pretended nodes (goal: 1.10 of the limit)",
        ("seq_len", "ranks", "gradient_dtype", "schedule", TIMES, "total_of_limit"),
    ),
    "masks": (
        "2. Packed documents and a window (MagiAttention: 459 / 360 TFLOP/s a GPU)",
        (
            *("seq_len", "ranks", "name", "mask", "layout", "schedule", "overlap_stages", TIMES),
            *("forward_tflops", "backward_tflops", "total_times_faster_than_torch"),
            "sent_of_needed",
        ),
    ),
    "step": (
        "3 and 4. Training steps (TRL, Qwen3-8B, 1M, 8 GPUs: 380 s)",
        (
            *("run", "ranks", "step", "step_seconds", "tokens_per_second_per_device", "mfu"),
            *("memory_gib", "density", "recall"),
        ),
    ),
    "soak": (
        "5. Soak",
        (
            *("steps", "kills", "lines_equal_to_the_bit", "lines", "largest_difference_of_losses"),
            *("skipped_updates", "memory_growth_gib", "seconds", "restart_seconds", "problems"),
        ),
    ),
}
"""{how names of results begin: (title, keys of the rows that are shown)}."""


def tables(out: Path) -> str:
    """All tables of the results in the folder `out`, and a line for each incomplete one."""
    lines = ["# Several GPUs"]
    unfinished = []
    for kind, (title, keys) in TABLES.items():
        lines += ["", f"## {title}", "", line(keys), "|" + "---|" * len(keys)]
        for path in sorted(out.glob(f"{kind}_*.json")):
            result = read(out, path.stem)
            why = result.get("not_run") or result.get("error")
            if why:
                unfinished.append(f"* {path.stem}: {' '.join(why.split())[:500]}")
            for row in rows_of(result):
                if "error" in row:
                    unfinished.append(f"* {path.stem}: {row['error'][:300]}")
                else:
                    lines.append(line([cell(row.get(key)) for key in keys]))
    return "\n".join([*lines, "", "## Not complete", "", *(unfinished or ["nothing"])]) + "\n"


def rows_of(result: dict) -> Iterator[dict]:
    """Rows as the tables show them. A soak is one row. A training run has a row per step."""
    for row in result.get("rows", []):
        found = {"ranks": result.get("ranks")} | row
        if "forward_ms" in row:
            found[TIMES] = f"{row['forward_ms']:.1f} + {row['backward_ms']:.1f}"
        if "of_alone" in row:
            found["goal"] = GOALS_OF_ALONE.get(found["ranks"])
        yield found
    for name, run in result.get("runs", {}).items():
        for step in run["steps"]:
            yield {"run": name, "ranks": run["gpus"]} | step
    if "kills" in result:
        yield result | {"problems": len(result["problems"])}


def cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)


def line(cells: object) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
