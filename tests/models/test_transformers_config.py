"""config.json of transformers' models: read without torch as transformers reads it, or refused."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.transformers_models import MODELS, SHAPE, VOCAB, save_model
from titan_sparse.config import Config, ConfigError, check
from titan_sparse.estimate.flops import linear_flops_per_token, windows_of
from titan_sparse.models.build import build_decoder
from titan_sparse.models.flavours import (
    FLAVOURS,
    choose_implementation,
    number_of_parameters,
    resolve,
)
from titan_sparse.models.transformers_config import TransformersConfig, read_transformers_config
from titan_sparse.models.transformers_families import FAMILIES

transformers = pytest.importorskip("transformers")

SIZES = {key: SHAPE[key] for key in SHAPE if key not in ("bos_token_id", "eos_token_id")}


def write_config(folder: Path, model_type: str, **settings: Any) -> str:
    """A config.json of few keys, as transformers 4 wrote them."""
    values = SIZES | {"num_hidden_layers": 12, "model_type": model_type} | settings
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


def built(config: TransformersConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return build_decoder(config)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_file_does_not_say_is_what_transformers_takes(tmp_path, model_type):
    """build_decoder() compares windows and the number of parameters with transformers' own."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    settings = experts if FAMILIES[model_type].experts else {}
    folder = write_config(tmp_path, model_type, **settings)
    config = read_transformers_config(folder)
    model = built(config)
    theirs = transformers.AutoConfig.from_pretrained(folder)
    assert config.tied_embeddings == theirs.tie_word_embeddings
    assert config.kv_heads == theirs.num_key_value_heads
    assert model.layers["0"].self_attn.head_dim == config.head_dim
    architecture = transformers.AutoModelForCausalLM._model_mapping[type(theirs)].__name__
    assert architecture == FAMILIES[model_type].architecture


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_six_a_weight_that_a_token_meets(tmp_path, name):
    save_model(tmp_path, name)
    config = read_transformers_config(str(tmp_path))
    model = built(config)
    share = config.experts_per_token / config.experts if config.experts else 1
    weights = 0.0
    for parameter_name, parameter in model.layers.named_parameters():
        if parameter.ndim == 3:
            weights += share * parameter.numel()
        elif parameter.ndim == 2 and not parameter_name.endswith("bias"):
            weights += parameter.numel()
    assert linear_flops_per_token(config) == 6 * weights
    assert number_of_parameters(config) == sum(x.numel() for x in model.parameters())


def test_windows_meet_the_window_of_the_mask(tmp_path):
    folder = write_config(tmp_path, "olmo3", num_hidden_layers=4, sliding_window=64)
    config = read_transformers_config(folder)
    assert windows_of(config) == [64, 64, 64, 0]
    assert windows_of(config, 32) == [32, 32, 32, 32]
    assert windows_of(config, 128) == [64, 64, 64, 128]


@pytest.mark.parametrize("ours, theirs", [((24, 24), None), ((0, 24), ["full_attention"] * 2)])
def test_windows_that_are_read_in_two_ways_are_refused(tmp_path, ours, theirs):
    save_model(tmp_path, "olmo3", **({} if theirs is None else {"layer_types": theirs}))
    config = read_transformers_config(str(tmp_path))
    object.__setattr__(config, "windows", ours)
    with pytest.raises(ValueError, match="reads the windows"):
        built(config)


REFUSED = {
    "deepseek_v3": ({"kv_lora_rank": 512}, "MLA"),
    "deepseek_v2": ({}, "MLA"),
    "kimi_k2": ({}, "MLA"),
    "some_new_mla": ({"kv_lora_rank": 64}, "MLA"),
    "qwen3_next": ({}, "linear attention"),
    "qwen3_5_text": ({}, "linear attention"),
    "some_hybrid": ({"layer_types": ["linear_attention", "full_attention"]}, "linear attention"),
    "mamba2": ({}, "state-space"),
    "jamba": ({}, "state-space"),
    "granitemoehybrid": ({}, "state-space"),
    "lfm2": ({}, "state-space"),
    "gemma3": ({"vision_config": {"hidden_size": 8}}, "vision"),
    "qwen2_vl": ({"vision_config": {"depth": 2}}, "vision"),
    "gemma2": ({"attn_logit_softcapping": 50.0}, "tanh"),
    "gemma3_text": ({"final_logit_softcapping": 30.0}, "tanh"),
    "llama4_text": ({}, "chunked"),
    "some_chunked": ({"attention_chunk_size": 8192}, "chunked"),
    "t5": ({"is_encoder_decoder": True}, "encoder-decoder"),
    "bart": ({}, "encoder-decoder"),
    "never_heard_of": ({}, "not been tested"),
}


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(tmp_path, model_type, implementation):
    settings, reason = REFUSED[model_type]
    folder = write_config(tmp_path, model_type, **settings)
    with pytest.raises(ValueError, match=f'"{model_type}".*{reason}') as caught:
        resolve("debug", initial_hf=folder, implementation=implementation)
    assert "\n" not in str(caught.value) and "; write " in str(caught.value)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1, but attention has no dropout"),
        ({"resid_pdrop": 0.1}, "resid_pdrop = 0.1"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, '"longrope"'),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, '"dynamic"'),
        ({"hidden_size": 0}, "hidden_size = 0, which is not a positive integer"),
        ({"sliding_window": "no"}, "sliding_window = 'no'"),
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"architectures": ["Phi3ForTokens"]}, "only Phi3ForCausalLM"),
    ],
)
def test_settings_that_cannot_be_trained_are_refused(tmp_path, settings, message):
    folder = write_config(tmp_path, "phi3", **settings)
    with pytest.raises(ValueError) as caught:
        resolve("debug", initial_hf=folder)
    assert message in str(caught.value) and "\n" not in str(caught.value)


# Whose code


@pytest.mark.parametrize("model_type", FAMILIES)
def test_auto_takes_ours_where_it_has_the_family(tmp_path, model_type):
    folder = write_config(tmp_path, model_type, architectures=[FAMILIES[model_type].architecture])
    native = model_type in ("llama", "qwen2", "qwen3")
    assert choose_implementation(folder, "auto")[0] == ("native" if native else "transformers")
    assert choose_implementation(folder, "transformers") == ("transformers", "as asked")


def test_ours_is_refused_where_it_lacks_the_family(tmp_path):
    with pytest.raises(ValueError, match="only Qwen2ForCausalLM"):
        resolve("debug", initial_hf=write_config(tmp_path, "mistral"), implementation="native")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"implementation": "transformers", "initial_hf": ""}, "needs model.initial_hf"),
        ({"rope_scaling": "yarn", "rope_factor": 4.0}, "model.rope_scaling = 'yarn' is not read"),
        ({"vocab_size": 640}, "model.vocab_size = 640 is not read"),
        ({"layers": 1}, "model.layers = 1 does not agree"),
        ({"router_loss": 0.1}, "has no router"),
        ({"initial_hf": "", "router_loss": 0.1}, "has no router"),
        ({"initial_hf": "", "random_weights": True}, "model.random_weights"),
    ],
)
def test_options_that_would_be_ignored_are_refused(tmp_path, settings, message):
    settings = {"initial_hf": write_config(tmp_path, "mistral")} | settings
    with pytest.raises(ValueError, match=message):
        resolve("debug", **settings)


@pytest.mark.parametrize(
    "model_type, settings, message",
    [
        ("mistral", {"training.mlp_chunk_tokens": 8}, "training.mlp_chunk_tokens = 8, but"),
        (
            "mistral",
            {"attention.window_sinks": 4, "attention.sliding_window": 64},
            "have windows of their own",
        ),
        ("mixtral", {"float8.enable": True}, "its experts are no linear layers"),
    ],
)
def test_levers_that_it_does_not_have_are_refused(tmp_path, model_type, settings, message):
    config = Config()
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64}
    config.model.initial_hf = write_config(tmp_path, model_type, **experts)
    config.training.device = "cuda"
    for key, value in settings.items():
        section, _, name = key.partition(".")
        setattr(getattr(config, section), name, value)
    with pytest.raises(ConfigError, match=message):
        check(config, 1, 1)


def test_fewer_layers_with_random_weights(tmp_path):
    folder = write_config(tmp_path, "olmo3", num_hidden_layers=8)
    config = resolve("debug", initial_hf=folder, random_weights=True, layers=5)
    assert config.windows == (4096, 4096, 4096, 0, 4096)
    assert len(built(config).layers) == 5


def test_a_file_is_read_and_refused_without_torch(tmp_path):
    folder = write_config(tmp_path, "mistral", vocab_size=VOCAB)
    bad = write_config(tmp_path / "bad", "gemma2", attn_logit_softcapping=50.0)
    code = f"""
import sys
from titan_sparse.config import Config, ConfigError, check
config = Config()
config.model.initial_hf = {folder!r}
check(config, 1, 1)
config.model.initial_hf = {bad!r}
try:
    check(config, 1, 1)
except ConfigError as error:
    print(error)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "tanh" in result.stdout


SHAPES = Path(__file__).parents[2] / "train_configs/shapes"


def test_shapes_of_published_models():
    moe = read_transformers_config(str(SHAPES / "qwen3_30b_a3b"))
    # As its card says: 30.5 B parameters, of which 3.3 B are active, the embedding among them.
    assert round(number_of_parameters(moe) / 1e9, 1) == 30.5
    tables = 2 * moe.vocab_size * moe.hidden_size
    assert round((moe.linear_weights + tables) / 1e9, 1) == 3.4
    native = resolve("debug", initial_hf=str(SHAPES / "qwen3_0_6b"))
    theirs = resolve("debug", initial_hf=str(SHAPES / "qwen3_0_6b"), implementation="transformers")
    assert native == replace(FLAVOURS["qwen3-0.6b"], rope=native.rope)
    assert number_of_parameters(native) == number_of_parameters(theirs)
    assert linear_flops_per_token(native) == linear_flops_per_token(theirs)
