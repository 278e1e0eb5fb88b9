"""The command line of scripts.gpu_branches."""

import sys
from pathlib import Path

from scripts.gpu_branches.finding import find

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Print the list."""
    branches = find(ROOT)
    for branch in branches:
        print(f"{branch.place}: {branch.key}")
    print(f"{len(branches)} branches that only a GPU takes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
