"""Adapters on a decoder: which layers have them, and what they begin with. Runs:
training/test_lora.py."""

import math
import sys
from pathlib import Path

import peft
import pytest
import torch
from torch import nn

from tests.models.helpers import build
from tests.models.transformers_models import save_model
from tests.refusals import refused
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
from titan_sparse.models.lora import add_adapters
from titan_sparse.models.transformers_config import read_transformers_config


def _adapters(targets: str = ALL_LINEAR, init: str = "default", rank: int = 3) -> Adapters:
    return resolve_adapters(TINY, rank, 6, 0.0, targets, init)


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


def _first(init: str = "default", seed: int = 5) -> Decoder:
    return build(TINY, seed, torch.float32, adapters=_adapters(init=init, rank=16))


def test_first_adapters():
    a_of = {}
    for init in ("default", "gaussian"):
        for name, parameter in _first(init=init).named_parameters():
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
    # Each layer and each seed has its own.
    name = "layers.{}.mlp.up_proj.lora_A.default.weight"
    other = _first(seed=6).get_parameter(name.format(0))
    for another in (a_of["default", name.format(1)], other):
        assert not torch.equal(a_of["default", name.format(0)], another)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_adapters_have_the_dtype_that_peft_gives_them(dtype):
    """float32 beside weights of 16 bits, or small updates would be rounded away."""
    layer = nn.Sequential(nn.Linear(4, 4, dtype=dtype))
    config = peft.LoraConfig(target_modules=["0"])
    theirs = peft.get_peft_model(layer, config).base_model.model[0].lora_A["default"].weight
    model = build(TINY, dtype=dtype, adapters=_adapters())
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
    with refused(r'lora.rank = 3\) need PEFT.*\[huggingface\]"$'):
        add_adapters(nn.Linear(2, 2), _adapters())
