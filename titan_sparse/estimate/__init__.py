"""Estimates of what a run will cost, without a GPU: FLOPs, memory, time."""
