"""Without a GPU, kernels run in Triton's interpreter: it must be switched on before the first kernel is imported."""

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="module")
def _no_process_group_for_the_next_file() -> Iterator[None]:
    """A training run in the tests' own process leaves one behind, which the next file's would meet."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing that another test compiled counts, and nothing of this one for the next."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
