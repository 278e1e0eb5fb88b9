"""Attention = mask (what may be seen) ∩ pattern (what is worth seeing), on a layout (who owns which
blocks), driven by a schedule (in which order keys meet queries), computed by a backend (which
kernel)."""

from titan_sparse.attention.attend import Auxiliary, attend
from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.ops import SAVED_OPS

__all__ = ["SAVED_OPS", "Auxiliary", "ContextParallel", "attend"]
