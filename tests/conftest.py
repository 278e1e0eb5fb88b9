"""Without a GPU, kernels run in Triton's interpreter: it must be switched on before the first kernel is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
