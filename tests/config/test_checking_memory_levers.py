"""What the configuration refuses of the levers that trade speed for memory, and of float8."""

import pytest

from titan_sparse.config import ConfigError, load_and_check

COMPILED = "--compile.enable --activation_checkpoint.offload"
REFUSED = {
    "--activation_checkpoint.offload": "needs blocks that are compiled.*write compile.enable = true",
    COMPILED + " --compile.backend eager": "needs blocks that are compiled",
    COMPILED + " --activation_checkpoint.mode none": 'write activation_checkpoint.mode = "full"',
    "--training.mlp_chunk_tokens -1": "training.mlp_chunk_tokens = -1 is too small; write 0",
    "--training.mlp_chunk_tokens 5000": "more than the 4096 tokens of a rank",
    "--optimizer.name SGD --optimizer.implementation fused": 'write optimizer.implementation = "auto"',
    "--float8.recipe tensorwise": "float8.recipe = .* would be ignored with float8.enable = false",
    "--float8.filter mlp": "float8.filter = .* would be ignored",
    "--float8.enable --training.device cpu": "needs a GPU",
    "--float8.enable --training.dtype float32": 'needs training.dtype = "bfloat16"',
    "--float8.enable --float8.filter mlp,": "float8.filter.*empty name",
    "--float8.enable --training.mlp_chunk_tokens 512": 'write float8.filter = "mlp" or training.mlp_chunk_tokens = 0',
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words):
    with pytest.raises(ConfigError, match=REFUSED[words]):
        load_and_check(words.split(), 1, 1)


@pytest.mark.parametrize(
    "words",
    [
        COMPILED,
        COMPILED + " --activation_checkpoint.mode selective",
        "--optimizer.offload",
        "--training.mlp_chunk_tokens 4096",
        "--float8.enable --float8.recipe tensorwise",
        "--float8.enable --training.mlp_chunk_tokens 512 --float8.filter o_proj,mlp",
    ],
)
def test_accepted(words):
    load_and_check(words.split(), 1, 1)
