"""A checked configuration becomes what memory depends on."""

import pytest

from tests.estimate.steps import step_of_words
from titan_sparse.attention.context_parallel.schedule import ALL_GATHER, RING


def test_options_become_a_step():
    step = step_of_words("qwen3_8b_1m", "flex", 8)
    assert step.tokens == 131072
    assert step.shards == 8
    assert step.cp == 8
    assert step.schedule is ALL_GATHER
    assert step.compiled
    # One list of 5242 + 4 verticals in whole blocks; one flag a block diagonal; two flags a budget
    assert step.verticals == 5248
    assert step.index_bytes == 32 * (5248 * 4 + 8192 + 2)


def test_further_options_change_the_step():
    words = """
        --parallelism.dp_replicate 2 --training.gradient_accumulation_steps 2
        --attention.schedule ring --attention.gradient_dtype bfloat16 --optimizer.name SGD
        --activation_checkpoint.mode none --training.seq_len 1000000
        --optimizer.implementation foreach
        --parallelism.reshard_after_forward false --training.loss_chunk_tokens 512
    """
    step = step_of_words("qwen3_8b_1m", "flex", 16, *words.split())
    assert step.shards == 8
    assert step.schedule is RING
    assert step.gradient_width == 2
    assert step.accumulates
    assert step.optimizer_scratch
    assert step.optimizer_states == 0
    assert step.mode == "none"
    assert step.seq_len == 1000448
    assert not step.reshard_after_forward
    assert step.loss_chunk_tokens == 512


def test_a_cap_on_slashes_bounds_the_lists_of_blocks():
    """The cap, the slashes that are always selected, and one more."""
    capped = "--attention.vertical_slash.max_slashes 100 --attention.vertical_slash.local_slashes 2"
    words = ["--attention.mask", "causal", *capped.split()]
    assert step_of_words("qwen3_8b_1m", "flex", 8, *words).most_blocks == 103
    words = ["--attention.pattern", "dense"]
    assert step_of_words("qwen3_8b_1m", "flex", 8, *words).most_blocks == 1048576 // 128


@pytest.mark.parametrize(
    "words, backend",
    [
        ("", "triton"),  # documents
        ("--attention.mask causal_across_documents --attention.layout zigzag", "cudnn"),
        ("--attention.mask causal_across_documents --attention.layout striped", "triton"),
        ("--attention.mask causal_across_documents --parallelism.cp 1", "cudnn"),
        (
            "--attention.mask causal_across_documents --attention.layout zigzag "
            "--attention.sliding_window 4096",
            "triton",
        ),
        (
            "--attention.mask causal_across_documents --attention.layout zigzag "
            "--attention.schedule group_cast",
            "triton",
        ),
    ],
)
def test_cudnns_memory_counts_where_it_computes(words, backend):
    """Squares and rectangles; triton does the rest."""
    words = ["--attention.pattern", "dense", *words.split()]
    assert step_of_words("qwen3_8b_1m", "cudnn", 8, *words).backend == backend
    assert step_of_words("qwen3_8b_1m", "flex", 8, *words).backend == "flex"
