"""Times what the guard costs a step: blocks of steps with and without it, by turns, in one process.

    torchrun --nproc-per-node 1 -m scripts.benchmarks.guard --out guard.json \\
        --model.flavour qwen2.5-0.5b --training.seq_len 32768

Other options are taken as train.py takes them. Turns leave out what drifts: clocks and temperature.
The time of the check before a save is measured too.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from scripts.benchmarks.provenance import provenance
from titan_sparse.config import Config, ConfigError, load_and_check, world_from_environment
from titan_sparse.trainer import Trainer
from titan_sparse.training.distributed import leave_distributed
from titan_sparse.training.guard import all_finite, optimizer_states


def time_steps(trainer: Trainer, steps: int) -> float:
    """Seconds a step, over so many steps that the host does not wait for one by one."""
    _settle(trainer.device)
    began = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    _settle(trainer.device)
    return (time.perf_counter() - began) / steps


def measure(config: Config, rounds: int, steps: int) -> dict:
    """Medians over the rounds, in seconds: a step without and with the guard, and the check."""
    trainer = Trainer(config)
    time_steps(trainer, 5)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * rounds):
        enabled = number % 2 == 1
        trainer.guard.section.enable = enabled
        if not enabled:
            for optimizer in trainer.optimizers.optimizers:
                optimizer.found_inf = None
        seconds[enabled].append(time_steps(trainer, steps))
        trainer.guard.reports(all_of_them=True)
    checks = []
    for _ in range(5):
        _settle(trainer.device)
        began = time.perf_counter()
        tensors = [*trainer.model.parameters(), *optimizer_states(trainer.optimizers)]
        assert all_finite(tensors, trainer.device)
        checks.append(time.perf_counter() - began)
    without = statistics.median(seconds[False])
    with_guard = statistics.median(seconds[True])
    differences = [a - b for a, b in zip(seconds[True], seconds[False], strict=True)]
    return {
        "step_seconds_without": without,
        "step_seconds_with": with_guard,
        "cost_share": statistics.median(differences) / without,
        "check_before_a_save_seconds": statistics.median(checks),
        "rounds": seconds[False] + seconds[True],
    }


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks.guard",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=int, default=8, help="turns with and without")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    args, rest = parser.parse_known_args(words)
    needed = str(5 + 2 * args.rounds * args.steps + 1)
    rest += ["--training.steps", needed, "--metrics.log_every", needed]
    rest += ["--metrics.tensorboard=false", "--metrics.recall_every", "0"]
    try:
        config, _ = load_and_check(rest, *world_from_environment())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    numbers = measure(config, args.rounds, args.steps)
    print(json.dumps(numbers, indent=2))
    if args.out:
        args.out = str(args.out)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        result = provenance(args, device) | {"config": rest, "numbers": numbers}
        Path(args.out).write_text(json.dumps(result, indent=2) + "\n")
    leave_distributed()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
