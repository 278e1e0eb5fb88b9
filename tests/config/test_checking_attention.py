"""What check() refuses of [attention], in one line that says what to write."""

import pytest

from tests.config.test_reading import message_of
from titan_sparse.config import check, load, to_toml

VERTICAL_SLASH = "--attention.vertical_slash."
RECOMPUTE = "--activation_checkpoint.attention_recompute "
BAD_COMBINATIONS = [
    ("--attention.block_size 8", 1, "attention.block_size = 8"),
    ("--attention.block_size 96", 1, "attention.block_size = 96 is not a power of two"),
    ("--attention.schedule local --parallelism.cp 2", 2, 'attention.schedule = "local"'),
    (
        "--attention.schedule double_ring",
        1,
        'attention.schedule = "double_ring" needs parallelism.cp',
    ),
    (
        "--attention.backward_circulates q",
        1,
        'backward_circulates = "q" would be ignored with parallelism.cp = 1',
    ),
    (
        "--attention.backward_circulates kv --attention.schedule all_gather --parallelism.cp 2",
        2,
        'would be ignored with attention.schedule = "all_gather"; write attention.backward_circulates = "auto"',
    ),
    (
        "--attention.backward_circulates q --attention.schedule group_cast --parallelism.cp 2",
        2,
        'would be ignored with attention.schedule = "group_cast"; write attention.backward_circulates = "auto"',
    ),
    (
        "--attention.route_by mask",
        1,
        'attention.route_by = "mask" would be ignored with parallelism.cp = 1',
    ),
    (
        "--attention.route_by mask --attention.schedule all_gather --parallelism.cp 2",
        2,
        'attention.route_by = "mask" would be ignored with attention.schedule = "all_gather"',
    ),
    (
        "--attention.route_by index --parallelism.cp 2",
        2,
        'write attention.route_by = "auto" or attention.schedule = "ring"',
    ),
    (
        "--attention.route_by index --attention.schedule ring --attention.pattern moba --parallelism.cp 2",
        2,
        'says no more than the mask with attention.pattern = "moba"',
    ),
    (
        "--attention.route_by index --attention.schedule ring --attention.layout balanced --parallelism.cp 2",
        2,
        'skips nothing with attention.layout = "balanced"',
    ),
    (
        "--attention.overlap_stages 3",
        1,
        'attention.overlap_stages = 3 would be ignored with attention.schedule = "auto"',
    ),
    (
        "--attention.overlap_stages_backward 3 --attention.schedule ring --parallelism.cp 2",
        2,
        'write attention.overlap_stages_backward = 0 or attention.schedule = "group_cast"',
    ),
    (
        "--attention.overlap_stages 3 --attention.schedule group_cast",
        1,
        "would be ignored with parallelism.cp = 1",
    ),
    (
        "--attention.overlap_stages -1 --attention.schedule group_cast",
        1,
        "attention.overlap_stages = -1 is too small",
    ),
    (
        "--attention.gradient_dtype bfloat16",
        1,
        'gradient_dtype = "bfloat16" would be ignored with parallelism.cp',
    ),
    (
        "--attention.gradient_dtype bfloat16 --parallelism.cp 2 --training.dtype float64 --training.device cpu",
        2,
        'training.dtype = "float64" computes exactly; write attention.gradient_dtype = "float32"',
    ),
    ("--attention.sliding_window -5", 1, "attention.sliding_window = -5"),
    (
        "--attention.window_sinks 4 --attention.pattern dense",
        1,
        "write attention.sliding_window = 4096",
    ),
    ("--attention.window_sinks 4 --attention.sliding_window 64", 1, 'attention.pattern = "dense"'),
    (
        "--attention.window_sinks 4 --attention.sliding_window 64 --attention.pattern dense --attention.backend flex",
        1,
        'attention.backend = "auto"',
    ),
    (
        "--attention.window_sinks 4 --attention.sliding_window 64 --attention.pattern dense --attention.backend cudnn",
        1,
        'does not go with attention.backend = "cudnn" or "flex"; write attention.backend = "auto"',
    ),
    (
        "--attention.backend cudnn --attention.pattern moba",
        1,
        'attention.backend = "cudnn" is for attention.pattern = "dense"; write attention.backend = "auto"',
    ),
    (
        "--attention.backend cudnn --attention.pattern dense --training.deterministic true",
        1,
        'training.deterministic = true; write attention.backend = "triton"',
    ),
    (VERTICAL_SLASH + "recall 0", 1, "attention.vertical_slash.recall = 0.0 is not in (0, 1]"),
    (VERTICAL_SLASH + "recall 1.01", 1, "attention.vertical_slash.recall = 1.01"),
    (
        VERTICAL_SLASH + "probe 5000 --training.seq_len 8192",
        1,
        "vertical_slash.probe = 5000 is above attention",
    ),
    (
        VERTICAL_SLASH + "probe 2000 --training.seq_len 1000",
        1,
        "probe = 2000 is above training.seq_len = 1000",
    ),
    (
        VERTICAL_SLASH + "dense_below 64",
        1,
        "attention.block_size = 128 is above attention.vertical_slash.dense_below",
    ),
    (
        VERTICAL_SLASH + "min_columns 5000",
        1,
        "min_columns = 5000 is above attention.vertical_slash.max_columns = 4096",
    ),
    (
        VERTICAL_SLASH + "min_slashes 5 --attention.vertical_slash.max_slashes 4",
        1,
        "vertical_slash.min_slashes",
    ),
    (
        VERTICAL_SLASH + "count_sinks false --attention.vertical_slash.budget independent",
        1,
        'attention.vertical_slash.count_sinks = false needs another budget than "independent"',
    ),
    (VERTICAL_SLASH + "local_diagonals 0", 1, "attention.vertical_slash.local_diagonals = 0"),
    (RECOMPUTE + "1.5", 1, RECOMPUTE[2:-1] + " = 1.5 is neither -1 nor in [0, 1]"),
    (RECOMPUTE + "-0.5", 1, RECOMPUTE[2:-1] + " = -0.5 is neither -1"),
    (
        RECOMPUTE + "-1 --activation_checkpoint.mode none",
        1,
        "would be ignored with activation_checkpoint.mode",
    ),
    (
        RECOMPUTE + "0.5 --attention.layout zigzag --parallelism.cp 2",
        2,
        'needs attention.layout = "striped"',
    ),
    (
        RECOMPUTE + "-1 --attention.layout contiguous --parallelism.cp 2",
        2,
        'needs attention.layout = "striped"',
    ),
    (
        RECOMPUTE + "0.5 --attention.layout balanced --parallelism.cp 2",
        2,
        'needs attention.layout = "striped"',
    ),
    (
        VERTICAL_SLASH + "index xattention --attention.vertical_slash.sinks 9",
        1,
        "attention.vertical_slash.sinks = 9 would be ignored with attention.vertical_slash.index",
    ),
    (
        VERTICAL_SLASH + "index xattention --attention.xattention.stride 48",
        1,
        "write attention.xattention.stride = 16",
    ),
    (
        "--attention.pattern xattention --attention.xattention.dense_below 64",
        1,
        "dense_below = 128 or more",
    ),
    (
        "--attention.xattention.threshold 0",
        1,
        "attention.xattention.threshold = 0.0 is not in (0, 1]",
    ),
    ("--attention.xattention.stride 0", 1, "attention.xattention.stride = 0 is too small"),
    (
        "--attention.pattern moba --attention.moba.chunk_size 64",
        1,
        "attention.moba.chunk_size = 128 or more",
    ),
    ("--attention.moba.top_k 0", 1, "attention.moba.top_k = 0 is too small"),
]


@pytest.mark.parametrize("words, world_size, expected", BAD_COMBINATIONS)
def test_impossible_combination(words, world_size, expected):
    config, _ = load(words.split())
    assert expected in message_of(check, config, world_size, world_size)


@pytest.mark.parametrize(
    "words, world_size",
    [
        ("--parallelism.cp 4 --attention.schedule double_ring", 4),
        ("--parallelism.cp 4 --attention.schedule double_ring --parallelism.cp_intra 4", 4),
        ("--attention.schedule ring", 1),
        ("--attention.schedule ring --attention.route_by index --parallelism.cp 2", 2),
        ("--attention.schedule double_ring --attention.route_by mask --parallelism.cp 4", 4),
        ("--attention.schedule group_cast --attention.backend flex --parallelism.cp 2", 2),
        (
            "--attention.schedule group_cast --attention.overlap_stages 4 "
            "--attention.overlap_stages_backward 1 --parallelism.cp 2",
            2,
        ),
        ("--attention.schedule all_gather", 1),
        ("--attention.schedule local", 1),
        (
            "--attention.backward_circulates q --attention.gradient_dtype bfloat16 --parallelism.cp 2",
            2,
        ),
        (
            "--attention.gradient_dtype bfloat16 --attention.schedule all_gather --parallelism.cp 2",
            2,
        ),
        (RECOMPUTE + "0.5 --attention.layout zigzag", 1),
        (RECOMPUTE + "1 --attention.layout zigzag --parallelism.cp 2", 2),
        (RECOMPUTE + "-1 --activation_checkpoint.mode selective --parallelism.cp 2", 2),
        ("--attention.pattern dense --attention.block_size 8192", 1),
        ("--attention.vertical_slash.min_slashes 9", 1),
    ],
)
def test_possible_combination(words, world_size):
    config, _ = load(words.split())
    before = to_toml(config)
    check(config, world_size, world_size)
    assert to_toml(config) == before
