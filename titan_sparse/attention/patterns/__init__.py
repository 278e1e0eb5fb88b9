"""Patterns, which select the pairs worth computing: one file, or one folder, per pattern."""

from titan_sparse.attention.patterns.base import BlockIndex, Dense, Pattern, gather_blocks
from titan_sparse.attention.patterns.blocks import BlockPattern, visible_blocks
from titan_sparse.attention.patterns.moba import MoBA
from titan_sparse.attention.patterns.vertical_slash.pattern import VerticalSlash
from titan_sparse.attention.patterns.xattention import XAttention

__all__ = [
    "PATTERNS",
    "BlockIndex",
    "BlockPattern",
    "Dense",
    "MoBA",
    "Pattern",
    "VerticalSlash",
    "XAttention",
    "gather_blocks",
    "visible_blocks",
]

PATTERNS = {pattern.name: pattern for pattern in (Dense, VerticalSlash, XAttention, MoBA)}
