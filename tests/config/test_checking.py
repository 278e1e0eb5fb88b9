"""What check() refuses, in one line that says what to write, and the sizes derived from a configuration."""

import pytest

from tests.config.test_reading import message_of, write
from titan_sparse.config import (
    Config,
    check,
    load,
    load_and_check,
    padding_multiple,
    resolve_cp_intra,
    to_toml,
    world_from_environment,
)

BAD_COMBINATIONS = [
    ("--model.flavour qwen2.5-3", 1, 'model.flavour = "qwen2.5-3" is not one of "debug"'),
    ("--model.flavour qwen2.5-3", 1, 'did you mean "qwen2.5-3b"?'),
    ("--model.vocab_size 257", 1, "model.vocab_size = 257 is too small for data.tokenizer"),
    ("--model.vocab_size=-1", 1, "model.vocab_size = -1 is too small; write 0 or more"),
    ("--model.layers=-1", 1, "model.layers = -1 is too small; write 0 or more"),
    ("--model.rope_scaling yarn", 1, 'model.rope_scaling = "yarn" needs model.rope_factor'),
    ("--model.rope_scaling llama3", 1, 'model.rope_scaling = "llama3" needs model.rope_factor'),
    (
        "--model.rope_factor 4",
        1,
        "model.rope_factor = 4.0 would be ignored with model.rope_scaling",
    ),
    (
        "--model.rope_factor 4 --model.rope_scaling none",
        1,
        "model.rope_factor = 4.0 would be ignored",
    ),
    ("--model.rope_original_length 8192", 1, "model.rope_original_length = 8192 would be ignored"),
    ("--data.join_packages --data.source x.txt", 1, "data.join_packages would be ignored"),
    ("--data.bad_rows skip", 1, 'data.bad_rows = "skip" would be ignored'),
    ("--data.text_field body", 1, 'data.text_field = "body" would be ignored'),
    ("--data.subset en", 1, 'data.subset = "en" would be ignored'),
    ("--data.split test", 1, 'data.split = "test" would be ignored'),
    ("--data.tokenizer=", 1, 'data.tokenizer is empty; write "bytes"'),
    ("--training.steps 0", 1, "training.steps = 0 is too small; write 1 or more"),
    ("--training.steps 9", 1, "lr_scheduler.warmup_steps = 10 is above training.steps = 9"),
    ("--training.seed=-1", 1, "training.seed = -1 is too small; write 0 or more"),
    ("--training.seq_len 0", 1, "training.seq_len = 0"),
    ("--training.max_norm -1", 1, "training.max_norm = -1.0"),
    ("--training.dtype float64", 1, 'training.dtype = "float64" needs training.device'),
    ("--parallelism.cp 0", 1, "parallelism.cp = 0"),
    ("--parallelism.dp_shard 0", 1, "parallelism.dp_shard = 0"),
    ("--parallelism.dp_shard -2", 1, "parallelism.dp_shard = -2"),
    (
        "--parallelism.cp 4 --parallelism.cp_intra 3",
        4,
        "parallelism.cp_intra = 3 does not divide parallelism.cp = 4",
    ),
    ("--parallelism.cp 4 --parallelism.cp_intra 3", 4, "one of 1, 2, 4"),
    ("--optimizer.lr 0", 1, "optimizer.lr = 0.0 is not positive"),
    ("--optimizer.eps 0", 1, "optimizer.eps = 0.0 is not positive"),
    ("--optimizer.beta2 1", 1, "optimizer.beta2 = 1.0"),
    ("--optimizer.name SGD --optimizer.beta1 0.8", 1, "optimizer.beta1 = 0.8 would be ignored"),
    (
        "--lr_scheduler.warmup_steps 101",
        1,
        "lr_scheduler.warmup_steps = 101 is above training.steps = 100",
    ),
    (
        "--lr_scheduler.total_steps 9",
        1,
        "lr_scheduler.warmup_steps = 10 is above lr_scheduler.total_steps = 9",
    ),
    ("--lr_scheduler.decay_ratio 1.5", 1, "lr_scheduler.decay_ratio = 1.5"),
    ("--lr_scheduler.decay_ratio -0.5", 1, "lr_scheduler.decay_ratio = -0.5"),
    ("--lr_scheduler.min_lr_factor 2", 1, "lr_scheduler.min_lr_factor = 2.0"),
    (
        "--compile.backend inducter",
        1,
        'compile.backend = "inducter" is not one of "inductor", "aot_eager", "eager"',
    ),
    ("--checkpoint.keep_latest_k 1", 1, "checkpoint.keep_latest_k = 1"),
    ("--checkpoint.load_step -2", 1, "checkpoint.load_step = -2"),
    ("--checkpoint.initial_load_path a", 1, 'checkpoint.initial_load_path = "a" would be ignored'),
    ("--metrics.log_every 0", 1, "metrics.log_every = 0"),
    (
        "--profiling.enable --profiling.first_step 100",
        1,
        "profiling.first_step and profiling.steps trace up to",
    ),
]


@pytest.mark.parametrize("words, world_size, expected", BAD_COMBINATIONS)
def test_impossible_combination(words, world_size, expected):
    config, _ = load(words.split())
    assert expected in message_of(check, config, world_size, world_size)


@pytest.mark.parametrize(
    "words, world_size",
    [
        ("--parallelism.cp 2 --parallelism.dp_replicate 2", 8),
        ("--parallelism.cp 2 --parallelism.dp_replicate 2 --parallelism.dp_shard 3", 12),
        ("--training.dtype float64 --training.device cpu", 1),
        ("--training.dtype float64 --attention.backend eager", 1),
        ("--model.rope_scaling yarn --model.rope_factor 4 --model.rope_original_length 8192", 1),
        ("--model.vocab_size 258", 1),
        ("--data.source x.jsonl --data.text_field body", 1),
        ("--training.seq_len 50", 1),
        ("--optimizer.name SGD --optimizer.implementation foreach", 1),
        ("--lr_scheduler.decay_ratio 0.2 --lr_scheduler.warmup_steps 0", 1),
        ("--checkpoint.enable --checkpoint.keep_latest_k 0 --checkpoint.initial_load_path a", 1),
    ],
)
def test_possible_combination(words, world_size):
    config, _ = load(words.split())
    before = to_toml(config)
    check(config, world_size, world_size)
    assert to_toml(config) == before


@pytest.mark.parametrize(
    "words, world_size, local_world_size, expected",
    [
        ("--parallelism.cp 4", 6, 6, "--nproc-per-node=4 "),
        ("--parallelism.cp 4", 3, 3, "--nproc-per-node=4 "),
        ("--parallelism.cp 4", 11, 11, "--nproc-per-node=8 "),
        ("--parallelism.cp 4 --parallelism.dp_shard 2", 16, 16, "--nproc-per-node=8 "),
        ("--parallelism.dp_shard 1", 2, 2, "--nproc-per-node=1 "),
        ("--parallelism.cp 8", 12, 6, "--nproc-per-node=4 "),
        ("--parallelism.cp 3 --parallelism.dp_shard 1", 4, 2, "3 ranks in all"),
    ],
)
def test_world_that_does_not_fit(words, world_size, local_world_size, expected):
    message = message_of(check, load(words.split())[0], world_size, local_world_size)
    for part in (
        "parallelism.dp_replicate",
        "parallelism.dp_shard",
        "parallelism.cp",
        f"{world_size} ranks",
        expected,
    ):
        assert part in message


def test_load_and_check_returns_what_load_returns(tmp_path):
    words = ["--config", write(tmp_path, "[training]\nsteps = 20"), "--print-config"]
    assert load_and_check(words, 1, 1) == load(words)


@pytest.mark.parametrize(
    "text, words",
    [
        ("[training]\nseed = -1", []),
        ("", ["--training.seed=-1"]),
        (None, ["--training.seed=-1"]),
    ],
)
def test_load_and_check_names_the_file(tmp_path, text, words):
    path = None if text is None else write(tmp_path, text)
    words = words if path is None else [*words, "--config", path]
    message = message_of(load_and_check, words, 1, 1)
    assert message == f"{path or 'command line'}: training.seed = -1 is too small; write 0 or more"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("[parallelism]\ncp = 4", "does not fit 6 ranks; start torchrun with --nproc-per-node=4 "),
        ("[training]\nsteps = 5", "lr_scheduler.warmup_steps = 10 is above training.steps = 5"),
        ("[training]\nsteps = 'x'", 'training.steps = "x" is not an integer'),
    ],
)
def test_load_and_check_names_the_file_once(tmp_path, text, expected):
    path = write(tmp_path, text)
    message = message_of(load_and_check, [f"--config={path}"], 6, 6)
    assert message.startswith(f"{path}: ") and message.count(path) == 1 and expected in message


def test_check_refuses_wrong_types_set_in_python():
    config = Config()
    config.training.steps = "20"
    assert message_of(check, config, 1, 1) == 'training.steps = "20" is not an integer'


@pytest.mark.parametrize(
    "layout, expected",
    [("striped", 64 * 4), ("contiguous", 64 * 4), ("zigzag", 64 * 8), ("balanced", 64 * 4)],
)
def test_padding_multiple(layout, expected):
    config, _ = load(
        ["--attention.block_size=64", "--parallelism.cp=4", f"--attention.layout={layout}"]
    )
    assert padding_multiple(config) == expected


@pytest.mark.parametrize(
    "cp, cp_intra, local_size, expected", [(8, 0, 4, 4), (2, 0, 8, 2), (8, 2, 8, 2), (1, 0, 1, 1)]
)
def test_resolve_cp_intra(cp, cp_intra, local_size, expected):
    config, _ = load([f"--parallelism.cp={cp}", f"--parallelism.cp_intra={cp_intra}"])
    assert resolve_cp_intra(config.parallelism, local_size) == expected


def test_derived_cp_intra_must_divide_too():
    config, _ = load(["--parallelism.cp", "8"])
    assert "parallelism.cp_intra = 6 does not divide parallelism.cp = 8" in message_of(
        check, config, 24, 6
    )


def test_world_from_environment(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert world_from_environment() == (1, 1)
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert world_from_environment() == (16, 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")
    assert "LOCAL_WORLD_SIZE" in message_of(world_from_environment)
