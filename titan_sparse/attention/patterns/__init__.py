"""What is worth seeing: one file a pattern."""

from titan_sparse.attention.patterns.base import BlockIndex, Pattern, pattern_by_key
from titan_sparse.attention.patterns.dense import Dense
from titan_sparse.attention.patterns.vertical_slash import VerticalSlash

__all__ = ["BlockIndex", "Dense", "Pattern", "VerticalSlash", "pattern_by_key"]
