"""Triton kernels, each beside its plain-torch twin; nothing here imports the rest of titan_sparse.

The folder stands at the top of the tree and is imported as `titan_sparse.kernels`. What the attention kernels are tested
against besides is the eager backend (titan_sparse/attention/backends/eager.py).
"""
