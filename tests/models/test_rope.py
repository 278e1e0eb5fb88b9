"""Rotary position embeddings: the table of config.json, frequencies, and turned queries and keys."""

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from tests.fake_step import fake_world
from tests.models.helpers import LLAMA3, ORIGINAL, PLAIN, YARN
from tests.runs import TINY
from titan_sparse.config import ActivationCheckpoint, Compile
from titan_sparse.models.config import RopeConfig
from titan_sparse.models.decoder import Decoder, apply_rope, inverse_frequencies, rope_tables
from titan_sparse.models.huggingface_config import read_rope
from titan_sparse.training.model import parallelize

SCALE = 0.1 * math.log(4) + 1
"""What YaRN by 4 multiplies cos and sin with."""


def values(table: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"max_position_embeddings": 256, "rope_parameters": table, **others}


YARN_4 = {"type": "yarn", "factor": 4.0, ORIGINAL: 64}
LLAMA3_4 = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}


@pytest.mark.parametrize(
    "given",
    [
        values({}),
        values({}, rope_theta=1e3, **{ORIGINAL: 32}),
        values(PLAIN | {"rope_theta": 700.0}),
        values(PLAIN | {"rope_theta": 2**31 - 1}),
        values(LLAMA3),
        values(LLAMA3 | {"factor": 6.0, ORIGINAL: 256, "high_freq_factor": 9.0}),
        values({}, rope_scaling=LLAMA3_4, rope_theta=700.0, **{ORIGINAL: 16}),
        values(YARN),
        values(YARN | {"rope_theta": 1.5}),
        values(YARN | {"factor": 1.5}),
        values(YARN | {"beta_fast": 9, "beta_slow": 2.5}),
        values(YARN | {"beta_fast": None, "beta_slow": 0}),
        values(YARN | {"attention_factor": SCALE * (1 + 1e-7)}),
        values(YARN | {"attention_factor": None}, rope_theta=700.0),
        values({key: value for key, value in YARN.items() if key != ORIGINAL}),
        values({}, rope_scaling=YARN_4),
        values({}, rope_scaling=YARN_4, rope_theta=700.0),
        values(LLAMA3, rope_scaling=YARN_4),
        # The ramp would end beyond the head.
        values(YARN | {"rope_theta": 10.0, ORIGINAL: 4096, "beta_fast": 500.0}),
        # Not even the fastest pair turns once: an empty ramp.
        values(YARN | {"rope_theta": 1e4, ORIGINAL: 4}),
    ],
    ids=str,
)
def test_frequencies_are_those_of_transformers(given: dict[str, Any]) -> None:
    rope = read_rope(copy.deepcopy(given))
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, head_dim=32, **given)
    theirs = modeling_llama.LlamaRotaryEmbedding(config)
    inv_freq, attention_factor = inverse_frequencies(rope, 32)
    torch.testing.assert_close(inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    assert attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-6)
    table = given.get("rope_scaling") or given["rope_parameters"]
    assert rope.original_length == given.get(ORIGINAL, table.get(ORIGINAL, 256))


def test_rope_tables_in_half_precision_are_refused() -> None:
    cos, sin = rope_tables(*inverse_frequencies(TINY.rope, 8), torch.arange(3)[None])
    with pytest.raises(ValueError, match="cast_forward_inputs=False"):
        apply_rope(torch.randn(1, 1, 3, 8), cos.bfloat16(), sin.bfloat16())


FAR = dataclasses.replace(
    TINY,
    heads=4,
    kv_heads=2,
    head_dim=64,
    qk_norm=False,
    rope=RopeConfig(1e6, "none", 1.0, 131_072),
)


def _turned_by_transformers(q: Tensor, k: Tensor, positions: Tensor) -> list[Tensor]:
    """q and k [B, H, S, D], turned in fp32 and rounded once. In bf16 transformers rounds the tables too."""
    table = {"rope_type": "default", "rope_theta": FAR.rope.theta}
    config = LlamaConfig(head_dim=FAR.head_dim, rope_parameters=table)
    rotary = modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = rotary(q.float(), positions)
    turned = modeling_llama.apply_rotary_pos_emb(q.float(), k.float(), cos, sin)
    return [x.to(q.dtype) for x in turned]


@pytest.mark.parametrize(
    "dtype, sharded", [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_a_decoder_turns_far_tokens_as_transformers_does(dtype: torch.dtype, sharded: bool) -> None:
    """In bf16 too: tables of bf16, or positions, would change a third of the elements or all."""
    projected: list[Tensor] = []
    attended: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
        attended.extend([q, k])
        return q

    def keep(module: torch.nn.Module, inputs: object, out: Tensor) -> None:
        projected.append(out.unflatten(-1, (-1, FAR.head_dim)).transpose(1, 2))

    torch.manual_seed(0)
    model = Decoder(FAR, attend).to(torch.float32 if sharded else dtype)
    for block in model.layers.values():
        block.self_attn.q_proj.register_forward_hook(keep)
        block.self_attn.k_proj.register_forward_hook(keep)
    positions = torch.arange(131_072 - 32, 131_072)[None]
    tokens = positions % FAR.vocab_size
    with fake_world(1), torch.no_grad():
        if sharded:
            mesh = init_device_mesh("cpu", (1,))
            parallelize(model, mesh, dtype, True, ActivationCheckpoint("none"), Compile())
        model(tokens, positions, None)
    assert len(attended) == 2 * FAR.layers
    for layer in range(FAR.layers):
        here = slice(2 * layer, 2 * layer + 2)
        wanted = _turned_by_transformers(*projected[here], positions)
        for got, want in zip(attended[here], wanted, strict=True):
            assert got.dtype == want.dtype == dtype
            # The last bit of an fp32 sum may tip the rounding.
            assert (got != want).float().mean() < 0.01
            torch.testing.assert_close(got, want)
