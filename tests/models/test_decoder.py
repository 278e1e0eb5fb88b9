"""titan_sparse.models.decoder and flavours: counts, overrides, dense layers, first weights,
and rotary embeddings."""

import copy
import json
import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from tests.fake_step import fake_world
from tests.models.helpers import LLAMA3, ORIGINAL, PLAIN, YARN, build, dense_attend
from tests.models.transformers_models import VOCAB, save_model
from tests.runs import TINY, metrics_of, tiny_config, train
from titan_sparse.attention import attend
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.config import ActivationCheckpoint, Attention, Compile
from titan_sparse.models import huggingface
from titan_sparse.models.build import build_decoder
from titan_sparse.models.config import RopeConfig
from titan_sparse.models.decoder import (
    Decoder,
    LayerMasks,
    apply_rope,
    inverse_frequencies,
    rope_tables,
)
from titan_sparse.models.flavours import FLAVOURS, resolve
from titan_sparse.models.huggingface import check_weights, huggingface_name, load_weights
from titan_sparse.models.huggingface_config import read_rope
from titan_sparse.models.initialization import initialize
from titan_sparse.options.patterns import MoBAOptions
from titan_sparse.training.attention import build_attends, build_pattern
from titan_sparse.training.model import parallelize

TOTALS = {  # published, but for debug
    "debug": 829_568,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "llama3.1-8b": 8_030_261_248,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
}


@pytest.mark.parametrize("flavour", TOTALS)
def test_parameter_counts(flavour: str) -> None:
    config = resolve(flavour)
    with torch.device("meta"):
        model = Decoder(config, dense_attend)
    assert sum(p.numel() for p in model.parameters()) == config.number_of_parameters()
    assert config.number_of_parameters() == TOTALS[flavour]


def test_resolve_applies_overrides() -> None:
    config = resolve("qwen2.5-3b", 1000, "yarn", 16.0, 0, 5e6)
    assert config.vocab_size == 1000 and config.layers == FLAVOURS["qwen2.5-3b"].layers
    assert resolve("qwen2.5-3b", layers=6) == replace(FLAVOURS["qwen2.5-3b"], layers=6)
    assert config.rope == RopeConfig(theta=5e6, scaling="yarn", factor=16.0, original_length=32768)
    assert resolve(
        "llama3.1-8b", rope_scaling="llama3", rope_factor=32.0, rope_original_length=4096
    ).rope == replace(FLAVOURS["llama3.1-8b"].rope, factor=32.0, original_length=4096)
    unscaled = resolve("llama3.1-8b", rope_scaling="none").rope
    assert (unscaled.scaling, unscaled.factor, unscaled.theta) == ("none", 1.0, 5e5)


# attention.dense_layers

SECTION = Attention(pattern="moba", moba=MoBAOptions(chunk_size=128, top_k=2), dense_layers="1")


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_their_attention_is_dense_and_that_of_others_the_pattern(tmp_path, implementation):
    save_model(tmp_path, "llama")
    config = resolve("debug", initial_hf=str(tmp_path), implementation=implementation)
    with torch.device("meta"):
        model = build_decoder(config, build_attends(SECTION, None))
    model = model.to_empty(device="cpu")
    load_weights(model, str(tmp_path), config)
    calls = []

    def noted(function):
        def call(q, k, v, mask, **options):
            calls.append((q, k, v, mask, function(q, k, v, mask, **options)))
            return calls[-1][-1]

        return call

    for layer in model.layers.values():
        layer.self_attn.attend = noted(layer.self_attn.attend)
    tokens = torch.randint(3, VOCAB, (1, 400), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(400)[None]
    mask = Causal().rows(400)
    with torch.no_grad():
        model(tokens, positions, mask if implementation == "native" else LayerMasks(mask))
    is_dense = []
    for q, k, v, mask, out in calls:
        dense = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        is_dense.append(torch.allclose(out, dense, atol=1e-5))
        if not is_dense[-1]:
            torch.testing.assert_close(out, attend(q, k, v, mask, build_pattern(SECTION)))
    assert is_dense == [False, True]


def test_a_run_counts_them(texts):
    """Density and caps in metrics.jsonl, in TensorBoard, and what the cap kept below the recall."""
    lines = {}
    for layers in ("", "0", "0,1"):
        config = tiny_config(
            texts,
            f"dense {layers}",
            training__steps=1,
            metrics__tensorboard=layers == "0",
            attention__dense_layers=layers,
            attention__vertical_slash__max_verticals=2,
            attention__vertical_slash__max_slashes=1,
        )
        train(config)
        lines[layers] = metrics_of(config)[0]
    dist.destroy_process_group()
    sparse, mixed, dense = lines.values()
    assert sparse["density"] < mixed["density"] < dense["density"] == 1
    assert mixed["density"] > 0.5
    assert sparse["heads_capped"] > 0 and mixed["heads_capped"] > 0
    assert "heads_capped" not in dense
    assert mixed["recall"] > sparse["recall"] and dense["recall"] == pytest.approx(1)


def test_same_seed_same_weights_other_seed_other_weights() -> None:
    first, again, other = (build(TINY, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name, x in first.items() if x.ndim == 2]
    assert len(drawn) == 1 + 7 * TINY.layers
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    one, another = (first[f"layers.{layer}.mlp.up_proj.weight"] for layer in range(2))
    assert not torch.equal(one, another)


def test_distributions() -> None:
    config = FLAVOURS["debug"]
    for name, x in build(config).state_dict().items():
        if name.endswith("norm.weight"):
            assert torch.all(x == 1)
        elif name.endswith("bias"):
            assert torch.all(x == 0)
        else:
            std = 0.02 / math.sqrt(8) if "o_proj" in name or "down_proj" in name else 0.02
            assert x.std().item() == pytest.approx(std, rel=0.05) and x.abs().max() <= 3 * std


class Counted:
    """A tensor of an open file that counts the elements that are read."""

    elements = 0

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __getitem__(self, part: Any) -> Tensor:
        tensor = self.inner[part]
        Counted.elements += tensor.numel()
        return tensor


@contextmanager
def sharded_decoder(rank: int, shape: tuple[int, ...]):
    """A decoder without weights, in shards of this rank of a mesh."""
    with fake_world(math.prod(shape), rank):
        with torch.device("meta"):
            model = Decoder(TINY, dense_attend).double()
        with pytest.raises(ValueError, match="to_empty"):
            initialize(model, 0, TINY)
        # torch remembers what it knows of a mesh by its ranks and its name, not by this rank.
        names = [f"axis_{axis}_of_{rank}_{shape}" for axis in range(len(shape))]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        parallelize(model, mesh, torch.float64, True, ActivationCheckpoint("none"), Compile())
        yield model.to_empty(device="cpu")


@pytest.mark.parametrize("rank, shape", [(2, (3,)), (30, (31,)), (4, (2, 3))])
def test_each_rank_has_its_own_rows(tmp_path, monkeypatch, rank, shape) -> None:
    """Shards are ragged over 3 ranks, and some of 31 have no rows. (2, 3) is HSDP."""
    full = build(TINY, seed=5).state_dict()
    by_name = {huggingface_name(name): weight for name, weight in full.items()}
    save_file(by_name, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": TINY.vocab_size}))
    plain = huggingface.open_tensors

    def open_tensors(*words) -> dict[str, Callable[[], Counted]]:
        return {name: lambda open=open: Counted(open()) for name, open in plain(*words).items()}

    monkeypatch.setattr(huggingface, "open_tensors", open_tensors)
    Counted.elements = 0
    check_weights(str(tmp_path), TINY)
    # It reads headers only.
    assert Counted.elements == 0
    with sharded_decoder(rank, shape) as model:
        ranks = shape[-1]
        for is_read in (False, True):
            wanted = 0
            if is_read:
                load_weights(model, str(tmp_path), TINY)
            else:
                initialize(model, 5, TINY)
            for name, parameter in model.named_parameters():
                # torch.chunk() deals out the rows; by hand, not by what the model holds.
                rows = -(-len(full[name]) // ranks)
                begin = rank % ranks * rows
                own = full[name][begin : begin + rows]
                assert torch.equal(parameter.to_local(), own), name
                wanted += own.numel()
                torch.nn.init.zeros_(parameter)
    assert Counted.elements == wanted


# Rotary embeddings

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


FAR = replace(
    TINY,
    heads=4,
    kv_heads=2,
    head_dim=64,
    qk_norm=False,
    rope=RopeConfig(1e6, "none", 1.0, 131_072),
)


def _turned_by_transformers(q: Tensor, k: Tensor, positions: Tensor) -> list[Tensor]:
    """q and k [B, H, S, D], turned in fp32 and rounded once. In bf16 transformers
    rounds the tables too."""
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
