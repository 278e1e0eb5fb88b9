"""Adapters on a decoder: which layers have them, what they begin with, and the formula."""

import math
import sys
from pathlib import Path

import peft
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.fake_step import fake_world
from tests.models.helpers import causal, dense_attend, sample
from tests.models.transformers_models import save_model
from tests.runs import TINY
from titan_sparse.models.build import build_decoder
from titan_sparse.models.config import (
    ALL_LINEAR,
    Adapters,
    adapter_elements,
    is_adapter,
    resolve_adapters,
)
from titan_sparse.models.decoder import Decoder
from titan_sparse.models.huggingface_files import weights_digest
from titan_sparse.models.initialization import canonical_name, initialize
from titan_sparse.models.lora import add_adapters
from titan_sparse.models.transformers_config import read_transformers_config


def _adapters(targets: str = ALL_LINEAR, init: str = "default", rank: int = 3) -> Adapters:
    return resolve_adapters(TINY, rank, 6, 0.0, targets, init)


def _decoder(adapters: Adapters, dtype: torch.dtype = torch.float64) -> Decoder:
    with torch.device("meta"):
        model = Decoder(TINY, dense_attend).to(dtype)
        add_adapters(model, adapters)
    model = model.to_empty(device="cpu")
    initialize(model, 0, TINY)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return model


@pytest.mark.parametrize("name", ["qwen2", "phi3", "gemma3", "mixtral", "qwen3_moe", "gpt_oss"])
def test_every_linear_layer_of_a_family(tmp_path: Path, name: str):
    """Names and sizes are those of the modules that transformers builds."""
    save_model(tmp_path, name)
    config = read_transformers_config(str(tmp_path))
    adapters = resolve_adapters(config, 2, 4, 0.0, ALL_LINEAR, "default")
    with torch.device("meta"):
        model = build_decoder(config)
        linears = {
            path: module
            for path, module in model.layers.named_modules()
            if isinstance(module, nn.Linear)
        }
        if config.experts:
            linears = {path: module for path, module in linears.items() if "self_attn" in path}
        add_adapters(model, adapters)
    for path, module in linears.items():
        linear = config.linear_sizes()[path.rpartition(".")[2]]
        assert linear[:2] == (module.in_features, module.out_features), path
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * len(linears) and all(is_adapter(n) for n in trained)
    assert sum(p.numel() for p in trained.values()) == adapter_elements(config, adapters)


def test_a_block_with_adapters_is_the_formula():
    """W x + alpha / rank * B (A x): the same logits from a decoder with these weights."""
    adapters = _adapters("q_proj,o_proj,down_proj")
    model = _decoder(adapters)
    parameters = {canonical_name(n): p.detach() for n, p in model.named_parameters()}
    with torch.device("meta"):
        plain = Decoder(TINY, dense_attend).double()
    plain = plain.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(parameters[name])
            layer = name.removesuffix(".weight")
            if f"{layer}.lora_A.default.weight" in parameters:
                a = parameters[f"{layer}.lora_A.default.weight"]
                b = parameters[f"{layer}.lora_B.default.weight"]
                parameter += 2.0 * b @ a
    tokens, positions = sample(TINY)
    mask = causal(tokens.shape[1])
    wanted = plain(tokens, positions, mask)
    torch.testing.assert_close(model(tokens, positions, mask), wanted, rtol=1e-9, atol=1e-9)


def test_first_adapters():
    a_of = {}
    for init in ("default", "gaussian"):
        adapters = _adapters(init=init, rank=16)
        model = _decoder(adapters, dtype=torch.float32)
        initialize(model, 5, TINY, adapters=adapters)
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                assert not parameter.any(), name
            elif ".lora_A." in name:
                a_of[init, name] = parameter.detach()
    for (init, name), a in a_of.items():
        if init == "gaussian":
            assert a.std().item() == pytest.approx(1 / 16, rel=0.15)
        else:
            bound = 1 / math.sqrt(a.shape[1])
            assert 0.95 * bound < a.abs().max().item() <= bound, name
    first, second = [
        a for (_, name), a in a_of.items() if name.endswith("up_proj.lora_A.default.weight")
    ][:2]
    assert not torch.equal(first, second)


def test_first_adapters_are_those_of_any_rank():
    """They are slices of the whole tensor, without communication. Another seed draws others."""
    adapters = _adapters()
    whole = _decoder(adapters, dtype=torch.float32)
    initialize(whole, 5, TINY, adapters=adapters)
    other = _decoder(adapters, dtype=torch.float32)
    initialize(other, 6, TINY, adapters=adapters)
    name = "layers.1.mlp.down_proj.lora_A.default.weight"
    wanted = whole.get_parameter(name).detach()
    assert not torch.equal(other.get_parameter(name), wanted)
    with fake_world(2, rank=1):
        mesh = init_device_mesh("cpu", (2,))
        shard = distribute_tensor(torch.empty(3, 64), mesh, [Shard(0)], src_data_rank=None)
        sharded = _decoder(adapters, dtype=torch.float32)
        layer = sharded.get_submodule(name.removesuffix(".weight"))
        layer.weight = nn.Parameter(shard)
        initialize(sharded, 5, TINY, adapters=adapters)
        assert torch.equal(layer.weight.to_local(), wanted[2:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_adapters_have_the_dtype_that_peft_gives_them(dtype):
    """float32 beside weights of 16 bits, or small updates would be rounded away."""
    layer = nn.Sequential(nn.Linear(4, 4, dtype=dtype))
    config = peft.LoraConfig(target_modules=["0"])
    theirs = peft.get_peft_model(layer, config).base_model.model[0].lora_A["default"].weight
    model = _decoder(_adapters(), dtype=dtype)
    found = {weight.dtype for name, weight in model.named_parameters() if is_adapter(name)}
    assert found == {theirs.dtype}


def test_digest_sees_other_numbers(tmp_path: Path):
    save_model(tmp_path / "model", "qwen3", vocab_size=20000)
    digest = weights_digest(str(tmp_path / "model"))
    assert digest == weights_digest(str(tmp_path / "model"))
    path = tmp_path / "model/model.safetensors"
    data = bytearray(path.read_bytes())
    # The numbers of one matrix, far behind the header.
    assert len(data) > 2**22
    for place in range(2**21, 2**22):
        data[place] ^= 1
    path.write_bytes(data)
    assert weights_digest(str(tmp_path / "model")) != digest


def test_without_peft_one_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r'lora.rank = 3\) need PEFT.*\[huggingface\]"$'):
        add_adapters(nn.Linear(2, 2), _adapters())
