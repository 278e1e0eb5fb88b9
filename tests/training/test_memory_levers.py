"""The levers together in a training run over two processes, and what the configuration refuses of them."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_processes
from tests.runs import metrics_of, tiny_config, train, write_texts
from titan_sparse.config import ConfigError, load_and_check
from titan_sparse.models.chunked_mlp import ChunkedMLP
from titan_sparse.training import offload

SETTINGS = {
    "training__steps": 2,
    "training__gradient_accumulation_steps": 2,
    "compile__enable": True,
    "compile__backend": "aot_eager",
    "parallelism__cp": 2,
    "optimizer__name": "AdamW",
    "optimizer__lr": 1e-2,
}


def _lines(config) -> torch.Tensor:
    dist.barrier()
    return torch.tensor(
        [[line[key] for key in ("step", "loss", "grad_norm")] for line in metrics_of(config)]
    )


def _all_levers(folder: Path) -> None:
    plain = tiny_config(folder, "plain", **SETTINGS)
    wanted = train(plain).model.state_dict()
    torch._dynamo.reset()
    offload.MIN_BYTES = 4096  # smaller than a rank's input of a block, and than most of its weights
    levers = tiny_config(
        folder,
        "levers",
        **SETTINGS
        | {
            "training__mlp_chunk_tokens": 48,
            "activation_checkpoint__offload": True,
            "optimizer__offload": True,
        },
    )
    trainer = train(levers)
    blocks = trainer.model.run_blocks
    tokens = 320 // 2  # 300 padded to blocks of 16 for two ranks
    assert isinstance(trainer.model.layers["0"].mlp, ChunkedMLP)
    # Of the one block that is not the last: input, out, LSE, columns. No gathered weights.
    assert (
        blocks.pool.count == 4
        and blocks.pool.free[tokens * 32 * 8]
        and blocks.pool.free[tokens * 4 * 8]
    )
    torch.testing.assert_close(_lines(levers), _lines(plain), rtol=1e-9, atol=0)
    for name, weight in trainer.model.state_dict().items():
        torch.testing.assert_close(
            weight.full_tensor(), wanted[name].full_tensor(), rtol=1e-9, atol=1e-9
        )


def test_a_run_with_all_levers_equals_one_without(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(2, _all_levers, tmp_path)


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
