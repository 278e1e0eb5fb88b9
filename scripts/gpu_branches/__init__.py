"""Lists what only a GPU runs in titan_sparse: branches, launches of kernels, calls of torch.cuda.

    python -m scripts.gpu_branches

Each line is a place, the function, and the code that only a GPU reaches. tests/gpu/branches.toml
names a test for each.

The source is read, not run. An expression is worked out as far as it is known on a CPU: `x.is_cuda`
is False there, `device.type == "cuda"` too, and so is a name, an attribute, an argument or a function
that holds nothing else. Where a test is known, the other side belongs to a GPU.
"""
