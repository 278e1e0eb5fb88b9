"""One sequence over several ranks: layouts, communication and who sends what to whom."""

from titan_sparse.attention.context_parallel.group import ContextParallel

__all__ = ["ContextParallel"]
