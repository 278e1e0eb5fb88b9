"""MoBA (Lu et al. 2025, arXiv 2502.13189)."""

from titan_sparse.attention.patterns.moba.pattern import MoBA, MoBAIndex

__all__ = ["MoBA", "MoBAIndex"]
