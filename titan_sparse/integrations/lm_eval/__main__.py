"""lm_eval's command line, unchanged, with the model "titan_sparse". On one
rank, or under torchrun."""

import sys

import torch.distributed as dist
from lm_eval.__main__ import cli_evaluate

# Registers the model.
import titan_sparse.integrations.lm_eval  # noqa: F401
from titan_sparse.config import Refusal
from titan_sparse.training.faults.launcher import hide_warnings_of_imports


def main() -> int:
    """The exit status."""
    hide_warnings_of_imports()
    try:
        cli_evaluate()
    except Refusal as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
