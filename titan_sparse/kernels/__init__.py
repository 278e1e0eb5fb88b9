"""Triton kernels, each beside its plain-torch twin; nothing here imports the rest of titan_sparse.

A kernel with a twin of a few lines is one file, and the twin of NAME() there is NAME_naive(). A
larger one is a folder with kernel.py, or several files of kernels, and naive.py. The attention
kernels are also tested against the eager backend (titan_sparse/attention/backends/eager.py).
"""
