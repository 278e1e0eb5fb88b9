"""The dtype of sums."""

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in: fp64 for fp64, fp32 for everything else."""
    return torch.promote_types(dtype, torch.float32)
