"""What the configuration refuses of adapters, and what they may be combined with."""

import pytest

from titan_sparse.config import ConfigError, load_and_check
from titan_sparse.models.flavours import resolve
from titan_sparse.models.lora_config import resolve_adapters

ON = "--lora.rank 8 "
CHUNKS = "--training.mlp_chunk_tokens 512 "
REFUSED = {
    "--lora.rank -1": "lora.rank = -1 is too small; write 0",
    "--lora.alpha 8": "lora.alpha = 8 would be ignored with lora.rank = 0; write a rank, such as",
    "--lora.targets q_proj": "lora.targets = .* would be ignored with lora.rank = 0",
    ON + "--lora.alpha 0": "lora.alpha = 0 is too small; write 1",
    ON + "--lora.dropout 1.0": r"lora.dropout = 1.0 is not in \[0, 1\); write for example",
    ON + "--lora.dropout -0.1": "lora.dropout = -0.1 is too small",
    ON + "--lora.targets lm_head": '"lm_head" is no linear layer of the blocks; write "all-linear"',
    ON + "--lora.targets q_proj,": '"" is no linear layer of the blocks; .* some of q_proj,k_proj',
    ON + "--lora.targets qkv_proj": "qkv_proj.* is no linear layer",
    ON + "--lora.init pissa": "lora.init",
    ON + "--float8.enable": "float8.enable = true with lora.rank = 8.*write float8.enable = false",
    ON + "--optimizer.offload": "optimizer.offload = true with lora.rank = 8",
    ON
    + "--activation_checkpoint.mode selective": '"selective" with lora.rank = 8.*"full" or "none"',
    ON + CHUNKS + "--lora.dropout 0.1": "mlp_chunk_tokens = 512 .* write lora.dropout = 0.0 or",
    ON + "--checkpoint.enable --checkpoint.initial_load_path x": "initial_load_path = .*export",
    ON + "--checkpoint.enable --checkpoint.last_save_in_hf": "last_save_in_hf = true .* are random",
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words):
    with pytest.raises(ConfigError, match=REFUSED[words]) as refusal:
        load_and_check(words.split(), 1, 1)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "words",
    [
        ON,
        ON + CHUNKS,
        ON + "--lora.dropout 0.1 --lora.init gaussian --lora.alpha 1",
        ON + "--activation_checkpoint.offload --compile.enable",
        ON + "--activation_checkpoint.mode none --parallelism.reshard_after_forward false",
    ],
)
def test_accepted(words):
    load_and_check(words.split(), 1, 1)


def test_targets():
    """In the model's order, each once."""
    for words, wanted in (
        (
            "all-linear",
            ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        ),
        (" up_proj ,q_proj,up_proj", ("q_proj", "up_proj")),
    ):
        config, _ = load_and_check([*ON.split(), "--lora.targets", words], 1, 1)
        adapters = resolve_adapters(resolve(**vars(config.model)), **vars(config.lora))
        assert adapters.targets == wanted
        assert adapters.scale == 2.0


def test_experts_are_no_linear_layers():
    shape = "--model.initial_hf train_configs/shapes/qwen3_30b_a3b --model.random_weights"
    words = [*shape.split(), *ON.split()]
    config, _ = load_and_check(words, 1, 1)
    adapters = resolve_adapters(resolve(**vars(config.model)), **vars(config.lora))
    assert adapters.targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    with pytest.raises(ConfigError, match="up_proj.* is no linear layer"):
        load_and_check([*words, "--lora.targets", "up_proj"], 1, 1)
