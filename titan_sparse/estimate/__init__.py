"""Estimates of what a run will cost, without a GPU: FLOPs, memory, time."""

from titan_sparse.options.extras import need_here

need_here("train")
