"""Train: torchrun --nproc-per-node 8 train.py --config train_configs/X.toml
[--section.key value ...]

The entry of a checkout. The program is titan_sparse/commands/train.py; --help lists every option.
"""

import sys

from titan_sparse.train import main

if __name__ == "__main__":
    sys.exit(main())
