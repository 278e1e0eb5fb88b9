"""Mask and pattern together, as tables of blocks for a backend."""
