"""Train: torchrun --nproc-per-node 8 -m titan_sparse.train --config X.toml [--section.key value ...]

--help lists every option. --print-config shows what a run would use, --dry-run what memory and
FLOPs a step needs, --find-max-length the longest sequence that fits; all of them stop then.
In a checkout, train.py is the same program.
"""

import logging
import os
import sys

from titan_sparse.config import (
    Config,
    ConfigError,
    Flags,
    check_launch,
    check_start,
    load_and_check,
    to_toml,
    world_from_environment,
    world_of,
)


def main() -> int:
    """The program; returns its exit status: 0, 1 for a step that does not fit, 2 for a refusal."""
    try:
        config, flags = load_and_check(sys.argv[1:], *world_from_environment())
        if not flags.starts_nothing:
            check_launch()
            check_start(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if flags.print_config:
        print(to_toml(config))
        return 0

    set_allocator()
    if flags.dry_run or flags.find_max_length:
        return reckon(config, flags)

    # Imported here: a mistake in the config is told before torch has even been loaded.
    import torch.distributed as dist

    from titan_sparse.trainer import Trainer
    from titan_sparse.training.parallelize import leave_distributed

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    if _is_first_rank():
        logging.getLogger("titan_sparse").setLevel(logging.INFO)
    try:
        Trainer(config).train()
    except ValueError as error:
        # Before there is a process group a ValueError is a refusal, told in one line.
        if dist.is_initialized():
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    leave_distributed()
    return 0


def set_allocator() -> None:
    """Let torch's allocator grow its segments, so that blocks of many sizes leave no gaps.

    Does nothing where the environment says otherwise. Call it before torch is loaded. Up to torch
    2.11 at least, CUDA does not read expandable_segments from the newer PYTORCH_ALLOC_CONF (pytorch
    issue 183387). All versions read the older name, some with a warning.
    """
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def reckon(config: Config, flags: Flags) -> int:
    """--dry-run and --find-max-length: print the report. Returns 0 if the step fits, else 1."""
    from titan_sparse.estimate.dry_run import dry_run, find_max_length, world

    ranks, ranks_per_node = world_of(flags, *world_from_environment())
    where = world(ranks, ranks_per_node, flags.device_memory)
    try:
        if flags.dry_run:
            report, fits = dry_run(config, where)
        else:
            report, fits = find_max_length(config, where)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if _is_first_rank():
        print(report)
    return 0 if fits else 1


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(main())
