"""Training on several meshes is training on one rank: the same losses and gradient norms.

    python -m scripts.benchmarks.many_gpus.parity --ranks 8 --out parity.json

Each mesh trains five steps of two sequences from the same weights. A row is a mesh: its largest
relative differences from one rank, and whether they are within bf16's rounding (on the CPU: within
float32's). Status 1 if one is not. Options that are not its own go to train.py.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from scripts.benchmarks.many_gpus import results
from scripts.benchmarks.options import positive
from scripts.compare_runs import differences

ROOT = Path(__file__).parents[3]
STEPS = 5

BOUNDS = {
    "cuda": {"tokens_seen": 0.0, "loss": 5e-3, "grad_norm": 5e-2},
    "cpu": {"tokens_seen": 0.0, "loss": 1e-4, "grad_norm": 1e-3},
}
"""Of relative differences, by device and field of metrics.jsonl."""

WORDS = {
    "cuda": [
        *("--config", "train_configs/demo_gpu.toml"),
        *("--training.seq_len", "8192"),
        *("--compile.enable", "false"),
    ],
    "cpu": [
        *("--config", "train_configs/demo_cpu.toml"),
        *("--training.seq_len", "1024"),
        *("--attention.vertical_slash.dense_below", "256"),
    ],
}
COMMON = [
    *("--training.steps", str(STEPS)),
    *("--lr_scheduler.warmup_steps", "5"),
    # With larger steps rounding grows from step to step.
    *("--optimizer.lr", "1e-5"),
    *("--checkpoint.enable", "false"),
    *("--metrics.log_every", "1"),
    *("--metrics.recall_every", "0"),
    *("--metrics.tensorboard", "false"),
]


class Mesh(NamedTuple):
    """dp_replicate x cp_inter x cp_intra."""

    replicas: int
    inter: int
    intra: int

    @property
    def name(self) -> str:
        return " x ".join(str(size) for size in self)

    def words(self) -> list[str]:
        """Options of train.py. Two sequences a step, however many replicas share them."""
        schedule = "double_ring" if self.inter > 1 else "auto"
        return [
            *("--parallelism.dp_replicate", str(self.replicas)),
            *("--parallelism.cp", str(self.inter * self.intra)),
            *("--parallelism.cp_intra", str(self.intra)),
            *("--attention.schedule", schedule),
            *("--training.gradient_accumulation_steps", str(2 // self.replicas)),
        ]


def meshes(ranks: int) -> list[Mesh]:
    """Replicas of double rings, a double ring, one group; as far as `ranks` can be divided."""
    found = [Mesh(1, 1, ranks)]
    if ranks >= 4:
        found.insert(0, Mesh(1, 2, ranks // 2))
    inter = 2 if ranks >= 8 else 1
    found.insert(0, Mesh(2, inter, ranks // (2 * inter)))
    return found


def main(words: list[str]) -> int:
    args, options = parse(words)
    path = Path(args.out)
    result = results.header(args, args.device) | {"ranks": args.ranks, "train": options, "rows": []}
    one = Mesh(1, 1, 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Beside the first mesh: it waits for no other rank, and holds up none.
        alone = launch(one, args.device, options, folder)
        for mesh in meshes(args.ranks):
            try:
                finish(launch(mesh, args.device, options, folder))
                finish(alone)
                row = compared(mesh, folder / one.name, folder / mesh.name, BOUNDS[args.device])
            except (subprocess.CalledProcessError, ValueError) as error:
                row = {"mesh": mesh.name, "equal": False, "error": str(error)}
            result["rows"].append(row)
            results.write(path, result)
    return 0 if all(row["equal"] for row in result["rows"]) else 1


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks.many_gpus.parity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=positive, required=True, help="2, 4 or 8")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", required=True)
    args, options = parser.parse_known_args(words)
    if args.ranks not in (2, 4, 8):
        parser.error(f"--ranks {args.ranks}: write 2, 4 or 8")
    return args, options


def launch(mesh: Mesh, device: str, options: list[str], folder: Path) -> subprocess.Popen:
    """Start to train on this mesh, in the folder of its name."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program += ["--nproc-per-node", str(mesh.replicas * mesh.inter * mesh.intra), "train.py"]
    program += [*WORDS[device], *COMMON, *mesh.words(), *options]
    program += ["--training.output_dir", str(folder / mesh.name)]
    return subprocess.Popen(program, cwd=ROOT)


def finish(job: subprocess.Popen) -> None:
    """Wait for it. CalledProcessError if it fails."""
    status = job.wait()
    if status:
        raise subprocess.CalledProcessError(status, "train.py")


def compared(mesh: Mesh, alone: Path, run: Path, bounds: dict[str, float]) -> dict:
    """The largest relative differences of a mesh's run from one rank's."""
    largest = {}
    equal = True
    for field, bound in bounds.items():
        found = differences(alone, run, field)
        largest[field] = max(difference.relative for difference in found)
        equal = equal and len(found) == STEPS and largest[field] <= bound
    return {"mesh": mesh.name, **mesh._asdict(), "differences": largest, "equal": equal}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
