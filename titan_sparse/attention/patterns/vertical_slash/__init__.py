"""Verticals (single keys) and slashes (block diagonals), chosen online."""

from titan_sparse.attention.patterns.vertical_slash.pattern import VerticalSlash, VerticalSlashIndex

__all__ = ["VerticalSlash", "VerticalSlashIndex"]
