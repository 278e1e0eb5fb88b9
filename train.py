"""Train: torchrun --nproc-per-node 8 train.py --config train_configs/X.toml [--section.key value ...]

python train.py --help lists every option; --print-config shows what a run would use and stops.
"""

import logging
import os
import sys

from titan_sparse.config import ConfigError, load_and_check, to_toml, world_from_environment


def main() -> int:
    try:
        config, flags = load_and_check(sys.argv[1:], *world_from_environment())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if flags.print_config:
        print(to_toml(config))
        return 0

    # Imported here: a mistake in the config is told before torch has even been loaded.
    import torch.distributed as dist

    from titan_sparse.trainer import Trainer

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
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
