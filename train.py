"""Train: torchrun --nproc-per-node 8 train.py --config train_configs/X.toml [--section.key value ...]

python train.py --help lists every option; --print-config shows what a run would use, --dry-run what memory and FLOPs a step
needs, --find-max-length the longest sequence that fits; all of them stop then.
"""

import logging
import os
import sys

from titan_sparse.config import (
    Config,
    ConfigError,
    Flags,
    load_and_check,
    to_toml,
    world_from_environment,
    world_of,
)


def main() -> int:
    try:
        config, flags = load_and_check(sys.argv[1:], *world_from_environment())
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
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("titan_sparse").setLevel(logging.INFO)
    try:
        Trainer(config).train()
    except ValueError as error:
        if dist.is_initialized():
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    leave_distributed()
    return 0


def set_allocator() -> None:
    """Let torch's allocator grow its segments, so that blocks of many sizes leave no gaps, unless the environment says
    otherwise. To be called before torch is loaded. Up to torch 2.11 at least, CUDA does not read expandable_segments from
    the newer PYTORCH_ALLOC_CONF (pytorch issue 183387); the older name is read by all, by some with a warning."""
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def reckon(config: Config, flags: Flags) -> int:
    """--dry-run and --find-max-length: print the report; 0 if the step fits, else 1."""
    from titan_sparse.estimate.dry_run import dry_run, find_max_length, world

    where = world(*world_of(flags, *world_from_environment()), flags.device_memory)
    try:
        report, fits = (dry_run if flags.dry_run else find_max_length)(config, where)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if os.environ.get("RANK", "0") == "0":
        print(report)
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
