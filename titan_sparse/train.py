"""Train: torchrun --nproc-per-node 8 -m titan_sparse.train --config X.toml
[--section.key value ...]

The same as titan-sparse train (titan_sparse/commands/train.py). --help lists every option.
"""

import sys

from titan_sparse.options.extras import program


@program
def main() -> int:
    """Run the program with the words of the command line. Returns its exit status."""
    # Imported here: it needs the packages of the extra.
    from titan_sparse.commands.train import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
