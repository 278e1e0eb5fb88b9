"""The tests' own processes: what a program in several of them finds, and that a failing rank fails the
test."""

import os

import pytest
import torch.distributed as dist

from tests.distributed import run_program


def _program(words: list[str]) -> int:
    dist.init_process_group("gloo")
    # A rank that ends before the others are connected would fail them.
    dist.barrier()
    print(os.environ["LOCAL_RANK"], dist.get_world_size(), *words)
    return int("fail" in words and dist.get_rank() == 1)


def test_a_program_finds_torchruns_variables_and_a_failing_rank_fails_the_test():
    assert run_program(2, _program, ["one", "two"]) == "0 2 one two\n1 2 one two\n"
    with pytest.raises(Exception, match="status 1"):
        run_program(2, _program, ["fail"])
