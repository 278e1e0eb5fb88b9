"""config.json of transformers' models: read as transformers reads it, or refused."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.transformers_models import MODELS, SHAPE, VOCAB, decoder_of, save_model
from titan_sparse.config import Config, ConfigError, check
from titan_sparse.estimate.flops import linear_flops_per_token, windows_of
from titan_sparse.models.build import build_decoder
from titan_sparse.models.flavours import FLAVOURS, choose_implementation, resolve
from titan_sparse.models.huggingface import check_weights
from titan_sparse.models.huggingface_config import FAMILIES
from titan_sparse.models.transformers_config import TransformersConfig, read_transformers_config

SIZES_NEEDED = """
vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size
max_position_embeddings
""".split()
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
    family = FAMILIES[model_type]
    sizes = {family.needed[0]: SHAPE["intermediate_size"]}
    folder = write_config(tmp_path, model_type, architectures=[family.architecture], **sizes)
    config = read_transformers_config(folder)
    model = built(config)
    theirs = transformers.AutoConfig.from_pretrained(folder)
    assert config.tied_embeddings == theirs.tie_word_embeddings
    assert (config.layers, config.heads, config.kv_heads) == (12, 4, 2)
    full = next(layer for layer in model.layers.values() if hasattr(layer, "self_attn"))
    assert full.self_attn.o_proj.in_features == 4 * config.head_dim
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
        if ".experts." in parameter_name and parameter.ndim == 3:
            weights += share * parameter.numel()
        elif parameter.ndim >= 2 and not parameter_name.endswith("bias"):
            weights += parameter.numel()
    assert linear_flops_per_token(config) == 6 * weights
    assert config.number_of_parameters() == sum(x.numel() for x in model.parameters())


def test_entries_that_a_family_does_not_read_change_nothing(tmp_path):
    others = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    folder = write_config(tmp_path, "granite", layer_types=["sliding_attention"] * 12, **others)
    config = read_transformers_config(folder)
    plain = read_transformers_config(write_config(tmp_path / "plain", "granite"))
    assert replace(config, folder=plain.folder, settings=plain.settings) == plain
    assert (plain.windows, plain.experts) == ((0,) * 12, 0)


def test_windows_meet_the_window_of_the_mask(tmp_path):
    folder = write_config(tmp_path, "olmo3", num_hidden_layers=4, sliding_window=64)
    config = read_transformers_config(folder)
    assert windows_of(config) == [64, 64, 64, 0]
    assert windows_of(config, 32) == [32, 32, 32, 32]
    assert windows_of(config, 128) == [64, 64, 64, 128]


def test_only_the_text_part_of_a_model_with_a_vision_tower_is_read(tmp_path, caplog):
    config_class, differences = MODELS["qwen3_5_moe"]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 32}
    config = transformers.Qwen3_5MoeConfig(
        text_config=SHAPE | differences, vision_config=sizes | {"depth": 1, "num_heads": 2}
    )
    whole = transformers.Qwen3_5MoeForConditionalGeneration(config)
    whole.save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match="reads the text part of a model"):
        read_transformers_config(str(tmp_path / "whole"))
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    text.save_pretrained(tmp_path / "text")
    # A published folder with the config.json of its text part holds the vision tower too.
    shutil.copy(tmp_path / "text/config.json", tmp_path / "whole/config.json")
    caplog.set_level(logging.INFO, "titan_sparse")
    for folder in ("text", "whole"):
        model, _ = decoder_of(tmp_path / folder)
        for name, tensor in whole.model.language_model.named_parameters():
            assert torch.equal(model.get_parameter(name), tensor), name
    assert caplog.text.count("a vision tower; they are left out") == 1


def test_mtp_heads_are_left_out_with_one_line(tmp_path, caplog):
    caplog.set_level(logging.INFO, "titan_sparse")
    save_model(tmp_path, "qwen3_5")
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"mtp.fc.weight": torch.zeros(2, 2)}, file, {"format": "pt"})
    model, config = decoder_of(tmp_path)
    check_weights(str(tmp_path), config)
    assert len([line for line in caplog.messages if "MTP head or a vision tower" in line]) == 1
    save_file(weights | {"other.fc.weight": torch.zeros(2, 2)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match="unexpected tensor other.fc.weight"):
        decoder_of(tmp_path)


MUST_BE_OFF = """
attention_dropout resid_pdrop embd_pdrop router_jitter_noise quantization_config
use_bidirectional_attention per_layer_config final_logit_softcapping attn_logit_softcapping
""".split()

REFUSED = [
    *[("phi3", {key: 1}, f"{key} = 1; only False") for key in MUST_BE_OFF],
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "type with longrope"),
    ("phi3", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "with dynamic"),
    ("phi3", {"num_hidden_layers": None}, "there is no num_hidden_layers"),
    ("phi3", {"intermediate_size": None}, "there is no intermediate_size"),
    ("phi3", {"sliding_window": "no"}, "sliding_window"),
    ("phi3", {"pad_token_id": VOCAB}, "cannot build"),
    ("phi3", {"architectures": ["Phi3ForTokens"]}, "only ['Phi3ForCausalLM']"),
    ("olmo3", {"layer_types": ["full_attention"]}, "layer_types"),
    ("olmo3", {"layer_types": ["linear_attention"] * 12}, "with linear_attention; only full"),
    ("qwen3_next", {"layer_types": ["sliding_attention"] * 12}, "only full_attention and linear"),
    ("qwen3_5_text", {"hidden_act": "gelu"}, 'hidden_act = "gelu"; only silu'),
    ("deepseek_v3", {"kv_lora_rank": 512}, "has not been tested"),
    ("mamba2", {}, "has not been tested"),
    *[("phi3", {key: 0}, f"{key} = 0 is not a positive int") for key in SIZES_NEEDED],
]


@pytest.mark.parametrize("model_type, settings, message", REFUSED)
def test_what_cannot_be_trained_is_refused(tmp_path, model_type, settings, message):
    folder = write_config(tmp_path, model_type, **settings)
    for implementation in ("auto", "transformers"):
        with pytest.raises(ValueError) as caught:
            resolve("debug", initial_hf=folder, implementation=implementation)
        assert message in str(caught.value) and "\n" not in str(caught.value)


# Whose code


@pytest.mark.parametrize("model_type", FAMILIES)
def test_auto_takes_ours_where_it_has_the_family(tmp_path, model_type):
    folder = write_config(tmp_path, model_type, architectures=[FAMILIES[model_type].architecture])
    native = model_type in ("llama", "qwen2", "qwen3")
    assert choose_implementation(folder, "auto")[0] == ("native" if native else "transformers")
    assert choose_implementation(folder, "transformers") == ("transformers", "as asked")


def test_ours_is_refused_where_it_lacks_the_family(tmp_path):
    with pytest.raises(ValueError, match="model_type = mistral has not been tested"):
        resolve("debug", initial_hf=write_config(tmp_path, "mistral"), implementation="native")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"implementation": "transformers", "initial_hf": ""}, "needs model.initial_hf"),
        ({"rope_scaling": "yarn", "rope_factor": 4.0}, "model.rope_scaling and what goes with it"),
        ({"vocab_size": 300}, "model.vocab_size = 300 would cut the 320 rows"),
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
        ("mistral", {"training.mlp_chunk_tokens": 8}, "training.mlp_chunk_tokens = 8 does not go"),
        (
            "mistral",
            {"attention.window_sinks": 4, "attention.sliding_window": 64},
            "attention.window_sinks = 4 does not go",
        ),
        ("mixtral", {"float8.enable": True}, "float8.enable = true does not go"),
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
    folder = write_config(tmp_path, "llama", rms_norm_eps=1e-5)
    assert resolve("debug", initial_hf=folder, random_weights=True, layers=5).layers == 5


SHAPES = Path(__file__).parents[2] / "train_configs/shapes"


def test_shapes_of_published_models():
    moe = read_transformers_config(str(SHAPES / "qwen3_30b_a3b"))
    # As its card says: 30.5 B parameters, of which 3.3 B are active, the embedding among them.
    assert round(moe.number_of_parameters() / 1e9, 1) == 30.5
    tables = 2 * moe.vocab_size * moe.hidden_size
    assert round((moe.linear_weights + tables) / 1e9, 1) == 3.4
    native = resolve("debug", initial_hf=str(SHAPES / "qwen3_0_6b"))
    theirs = resolve("debug", initial_hf=str(SHAPES / "qwen3_0_6b"), implementation="transformers")
    assert native == replace(FLAVOURS["qwen3-0.6b"], rope=native.rope)
    assert native.number_of_parameters() == theirs.number_of_parameters()
    assert linear_flops_per_token(native) == linear_flops_per_token(theirs)
