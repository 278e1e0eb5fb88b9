"""Several benchmarks of attention in one process group: a start and its kernels are paid for once.

    torchrun --standalone --nproc-per-node 4 -m scripts.benchmarks.many_gpus.attention FOLDER PLAN

PLAN is JSON, {name: [program, its words, ...]}: scripts.benchmarks.context_parallel or masks.
FOLDER/name.json is what that program would write, and says at the end that it is complete. Nodes
are pretended for all benchmarks of a plan, or for none.
"""

import json
import sys
from pathlib import Path
from types import ModuleType

from scripts.benchmarks import context_parallel, masks
from scripts.benchmarks.context_parallel import place, pretend, run, start
from scripts.benchmarks.context_parallel_timing import Bench
from scripts.benchmarks.many_gpus import results
from scripts.benchmarks.provenance import provenance
from titan_sparse.training.distributed import leave_distributed
from titan_sparse.training.launcher import end_with_launcher

PROGRAMS = {"context_parallel": context_parallel, "masks": masks}
CASES = {"context_parallel": context_parallel.CASES, "masks": masks.CASES}


def main(words: list[str]) -> int:
    """0; 2 with a line on stderr for a benchmark that cannot run here."""
    end_with_launcher()
    folder = Path(words[0])
    plan = json.loads(words[1])
    rank, world = place()
    parsed = {}
    for name, (program, *options) in plan.items():
        module = PROGRAMS[program]
        args = module.parse([*options, "--out", str(folder / f"{name}.json")])
        refused = module.refusal(args, world)
        if refused:
            print(f"{name}: {refused}", file=sys.stderr)
            return 2
        parsed[name] = args

    first = next(iter(parsed.values()))
    nodes = getattr(first, "pretend_nodes", 1)
    if nodes > 1:
        pretend(nodes, rank, world)
    device = start(first)
    for name, args in parsed.items():
        result = provenance(args, device) | {"ranks": world, "rows": []}
        result["command"] = command(PROGRAMS[plan[name][0]], world, plan[name][1:])
        run(Bench(args, device, rank, world, nodes), result, CASES[plan[name][0]])
        if rank == 0:
            results.write(folder / f"{name}.json", result | {"complete": True})
    leave_distributed()
    return 0


def command(module: ModuleType, world: int, words: list[str]) -> str:
    """What would measure the same alone."""
    return " ".join(["torchrun --nproc-per-node", str(world), "-m", module.PROGRAM, *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
