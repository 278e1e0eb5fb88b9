"""What check() refuses, in one line that names the option, and the sizes derived
from a configuration."""

import re

import pytest

from tests.config.test_reading import message_of
from titan_sparse.config import Config, Data, check, load, to_toml
from titan_sparse.config.sources import source_weights

CP = " --parallelism.cp 2"
ULYSSES = "--attention.schedule ulysses --model.flavour qwen2.5-0.5b "
SLASH = "--attention.vertical_slash."
LORA = "--lora.rank 8 "
SINKS = "--attention.window_sinks 4 --attention.sliding_window 64 "
COMPILED = "--compile.enable --activation_checkpoint.offload"
WARMUP = "--lr_scheduler.warmup_steps 10 "
HALF = "--activation_checkpoint.attention_recompute 0.5"


def check_words(words: str) -> Config:
    """load() and check() on as many ranks as share a sequence."""
    config, _ = load(words.split())
    before = to_toml(config)
    ranks = max(config.parallelism.cp, 1)
    check(config, ranks, ranks)
    assert to_toml(config) == before
    return config


@pytest.mark.parametrize(
    "key, inside, outside",
    [
        ("training.steps", (1, 2**31 - 1), (0, 2**31)),
        ("training.seed", (0, 2**63 - 1), (-1, 2**63)),
        ("parallelism.dp_shard", (-1, 1), (0, -2)),
        ("attention.vertical_slash.recall", (0.01, 1), (0, 1.01)),
        ("optimizer.lr", (1e-9,), (0,)),
        ("optimizer.beta2", (0, 0.999), (1, -0.1)),
        ("lr_scheduler.warmup_steps", (-1, 0, 1), (-2, 101)),
        ("lr_scheduler.decay_ratio", (-1, 0, 1), (1.5, -0.5)),
        ("activation_checkpoint.attention_recompute", (-1, 0, 1), (1.5, -0.5)),
        ("guard.spike_factor", (0, 1.1), (1, 0.5)),
        ("checkpoint.keep_latest_k", (0, 2), (1, -1)),
    ],
)
def test_ranges(key, inside, outside):
    for value in inside:
        check_words(f"--{key}={value}")
    for value in outside:
        assert f"{key} = {value}" in message_of(check_words, f"--{key}={value}").replace(".0 ", " ")


IGNORED = {
    "--model.rope_factor 4": "model.rope_scaling",
    "--model.rope_original_length 8192 --model.rope_scaling none": "model.rope_scaling",
    "--data.join_packages --data.source x.txt": "data.source",
    "--data.text_field body": "data.source",
    "--data.messages_field b --data.source x.jsonl": "data.format",
    "--data.chat_template t --data.source x.jsonl": "data.format",
    "--attention.balance_costs c.json" + CP: "attention.layout",
    "--attention.backward_circulates kv --attention.schedule all_gather" + CP: "attention.schedule",
    "--attention.backward_circulates q --attention.schedule group_cast" + CP: "attention.schedule",
    "--attention.overlap_stages 3 --attention.schedule group_cast": "parallelism.cp",
    "--attention.overlap_stages_backward 3 --attention.schedule ring" + CP: "attention.schedule",
    "--attention.overlap_stages 3 --attention.schedule ulysses" + CP: "attention.schedule",
    "--attention.gradient_dtype bfloat16": "parallelism.cp",
    "--attention.window_sinks 4 --attention.pattern dense": "attention.sliding_window",
    "--attention.dense_layers 0 --attention.pattern dense": "attention.pattern",
    HALF + " --activation_checkpoint.mode none": "activation_checkpoint.mode",
    "--optimizer.beta1 0.8 --optimizer.name SGD": "optimizer.name",
    "--float8.recipe tensorwise": "float8.enable",
    "--lora.alpha 8": "lora.rank",
    "--compile.backend aot_eager": "compile.enable",
    "--guard.max_rollbacks 3 --guard.enable false": "guard.enable",
    "--guard.average_steps 3 --guard.spike_factor 0": "guard.spike_factor",
    "--lr_scheduler.decay_type linear --lr_scheduler.decay_ratio 0": "lr_scheduler.decay_ratio",
    "--lr_scheduler.min_lr_factor 1 --lr_scheduler.decay_ratio 0": "lr_scheduler.decay_ratio",
    "--checkpoint.initial_load_path a": "checkpoint.enable",
    "--metrics.recall_rows 8 --metrics.recall_every 0": "metrics.recall_every",
    "--metrics.pictures_every 10 --metrics.tensorboard false": "metrics.tensorboard",
    "--validation.windows 3": "validation.enable",
    "--validation.needle_depths 3 --validation.enable": "validation.needle_lengths",
    "--validation.split x --validation.enable": "validation.source",
    "--validation.split x --validation.enable --validation.source a.txt": "validation.source",
}
"""Words whose first option does nothing -> the key that is the reason."""


@pytest.mark.parametrize("words", IGNORED)
def test_options_that_would_be_ignored(words):
    message = message_of(check_words, words)
    key = words.split()[0].removeprefix("--")
    assert re.search(f"^{key} = .* would be ignored with {IGNORED[words]} = .*; write", message)


REFUSED = {
    "--model.flavour qwen2.5-3": 'model.flavour = .* write "qwen2.5-3b"',
    "--model.vocab_size 257": 'model.vocab_size = 257 is too small for data.tokenizer = "bytes"',
    "--model.rope_scaling yarn": "model.rope_factor must be above 1",
    "--data.add_bos false --data.format messages --data.source x": (
        'data.add_bos = false would be ignored with data.format = "messages"'
    ),
    WARMUP + "--training.steps 9": "lr_scheduler.warmup_steps = 10 is above training.steps = 9",
    WARMUP + "--lr_scheduler.total_steps 9": "warmup_steps = 10 is above .*total_steps = 9",
    "--training.dtype float64": 'write training.device = "cpu"',
    "--parallelism.cp 4 --parallelism.cp_intra 3": "does not divide .* one of 1, 2, 4",
    "--compile.backend inducter": 'is not one of "inductor", "aot_eager", "eager"',
    "--profiling.enable --profiling.first_step 100": "profiling.first_step",
    "--metrics.pictures_every 15": "write metrics.pictures_every = 20",
    "--attention.block_size 96": "attention.block_size = 96 is not a power of two",
    "--attention.dense_layers 0,first": "attention.dense_layers .* write some of 0 to ",
    "--attention.dense_layers 0,4": "attention.dense_layers .* write some of 0 to ",
    "--attention.schedule local" + CP: 'write attention.schedule = "auto"',
    ULYSSES
    + "--parallelism.cp 3": r"14 heads .* 3 ranks .* write parallelism.cp_intra as one of 1 ",
    ULYSSES
    + "--parallelism.cp 28": "28 ranks .* write parallelism.cp_intra as one of 1, 2, 7, 14 ",
    ULYSSES
    + "--parallelism.cp 2 --attention.gradient_dtype bfloat16": "gradient_dtype = .*float32",
    ULYSSES + "--parallelism.cp 2 --attention.backward_circulates q": "circulates = .*auto",
    ULYSSES + "--parallelism.cp 2 --attention.route_by mask": "route_by = .*auto",
    ULYSSES + HALF + " --parallelism.cp 4 --parallelism.cp_intra 2": "double_ring",
    "--attention.schedule double_ring": 'does not go with parallelism.cp = 1; write .* "auto"',
    "--attention.mask causal": 'attention.mask = "causal_across_documents"',
    "--attention.gradient_dtype bfloat16 --training.dtype float64 --training.device cpu"
    + CP: 'write attention.gradient_dtype = "float32"',
    SINKS: 'attention.pattern = "dense"',
    SINKS + "--attention.pattern dense --attention.backend flex": 'attention.backend = "auto"',
    "--attention.backend cudnn --attention.pattern moba": 'attention.backend = "auto"',
    "--attention.backend cudnn --attention.pattern dense --training.deterministic": "deterministic",
    SLASH + "probe 5000 --training.seq_len 8192": "attention.vertical_slash.dense_below",
    SLASH + "probe 2000 --training.seq_len 1000": "above training.seq_len = 1000",
    SLASH + "dense_below 64": "vertical_slash.dense_below = 64 must be at least block_size",
    SLASH + "min_verticals 5000": "min_verticals = 5000 is above .*max_verticals = 4096",
    SLASH + "min_slashes 5 " + SLASH + "max_slashes 4": "vertical_slash.min_slashes = 5",
    SLASH + "budget independent": "attention.vertical_slash.count_sinks",
    "--attention.pattern xattention --attention.xattention.stride 48": "write stride = 16",
    "--attention.pattern xattention --attention.xattention.dense_below 64": "dense_below = 128",
    "--attention.pattern moba --attention.moba.chunk_size 64": "chunk_size = 128 or more",
    HALF + " --attention.layout zigzag" + CP: 'write attention.layout = "striped"',
    "--activation_checkpoint.offload": "needs blocks that are compiled.*compile.enable = true",
    COMPILED + " --compile.backend eager": "needs blocks that are compiled",
    COMPILED + " --activation_checkpoint.mode none": 'activation_checkpoint.mode = "full"',
    "--training.mlp_chunk_tokens 5000": "more than the 4096 tokens of a rank.*example 1024",
    "--profiling.enable --training.steps 5": "profiling.first_step = 4 or less",
    "--profiling.enable --training.steps 5 --profiling.steps 9": "= 1 and profiling.steps = 5 or",
    "--float8.enable --training.device cpu": "needs a GPU",
    "--float8.enable --training.dtype float32": 'write training.dtype = "bfloat16"',
    "--float8.enable --float8.filter mlp,": "float8.filter.*empty name",
    "--float8.enable --training.mlp_chunk_tokens 512": 'write float8.filter = "mlp"',
    LORA + "--lora.targets lm_head": '"lm_head" is not a linear layer of the blocks; write "all-',
    LORA + "--lora.targets q_proj,": '"" is not a linear layer of the blocks; .* some of q_proj',
    LORA + "--float8.enable": "write float8.enable = false",
    LORA
    + "--optimizer.offload": "optimizer.offload = true .* with lora.rank = 8; write optimizer.offload = false",
    LORA + "--activation_checkpoint.mode selective": 'activation_checkpoint.mode = "full"',
    LORA + "--training.mlp_chunk_tokens 512 --lora.dropout 0.1": "write lora.dropout = 0.0",
    LORA + "--checkpoint.enable --checkpoint.initial_load_path x": "initial_load_path.*export",
    LORA + "--checkpoint.enable --checkpoint.last_save_in_hf": "last_save_in_hf.*random weights",
    "--model.initial_hf train_configs/shapes/qwen3_30b_a3b --data.tokenizer bytes "
    "--checkpoint.enable --checkpoint.initial_load_path x": 'model.initial_hf = .* "", or model.random_w',
    SINKS + "--attention.pattern dense --model.random_weights "
    "--model.initial_hf train_configs/shapes/gemma3_1b": "window_sinks = 4 .* model.initial_hf",
    "--data.source a:0.7,b": "to some parts only",
    "--data.format chat": 'data.format = "chat" is not one of "text", "messages"',
    "--data.format text,messages": "2 formats for the 1 parts",
    "--data.format messages": 'data.format = "messages" does not go with data.source',
    "--data.source x.jsonl --data.format messages --data.split_special_tokens": "would split",
    "--data.source a:1,b:0": "a weight of 0",
}


@pytest.mark.parametrize("words", REFUSED)
def test_impossible_combination(words):
    assert re.search(REFUSED[words], message_of(check_words, words))


def test_ulysses_inside_a_node_recomputes_in_any_layout():
    """A rank has whole sequences of its heads."""
    config = check_words(ULYSSES + HALF + CP + " --attention.layout zigzag")
    config.parallelism.cp_intra = 1
    assert "activation_checkpoint.attention_recompute" in message_of(check, config, 2, 2)


@pytest.mark.parametrize(
    "words, world_size, local_world_size, expected",
    [
        ("--parallelism.cp 4", 6, 6, "--nproc-per-node=4 "),
        ("--parallelism.cp 4", 11, 11, "--nproc-per-node=8 "),
        ("--parallelism.cp 4 --parallelism.dp_shard 2", 16, 16, "--nproc-per-node=8 "),
        ("--parallelism.cp 3 --parallelism.dp_shard 1", 4, 2, "3 ranks in all"),
        ("--parallelism.cp 8", 24, 6, "parallelism.cp_intra = 6 does not divide"),
    ],
)
def test_world_that_does_not_fit(words, world_size, local_world_size, expected):
    message = message_of(check, load(words.split())[0], world_size, local_world_size)
    assert "parallelism.cp" in message and expected in message


@pytest.mark.parametrize(
    "source, weights",
    [
        ("python", {"python": 1.0}),
        ("a:7, b/c.d : 3", {"a": 0.7, "b/c.d": 0.3}),
        ("odd, name", {"odd, name": 1.0}),
        ("c:/x:.25,d:.75", {"c:/x": 0.25, "d": 0.75}),
    ],
)
def test_weights_of_a_mixture(source, weights):
    assert source_weights(source) == pytest.approx(weights)
    check(Config(data=Data(source=source)), 1, 1)
