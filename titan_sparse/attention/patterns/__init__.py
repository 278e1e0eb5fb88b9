"""Patterns, which select the pairs worth computing: one file per pattern."""

from titan_sparse.attention.patterns.base import BlockIndex, Dense, Pattern
from titan_sparse.attention.patterns.moba import MoBA
from titan_sparse.attention.patterns.vertical_slash.pattern import VerticalSlash
from titan_sparse.attention.patterns.xattention import XAttention

__all__ = ["PATTERNS", "BlockIndex", "Dense", "MoBA", "Pattern", "VerticalSlash", "XAttention"]

PATTERNS = {pattern.name: pattern for pattern in (Dense, VerticalSlash, XAttention, MoBA)}
