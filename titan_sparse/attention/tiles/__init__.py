"""Mask and pattern together, as tables of blocks for a backend.

blocks.py: made in plain torch. slices.py: for masks of slices.
slash.py: by kernels.
"""
