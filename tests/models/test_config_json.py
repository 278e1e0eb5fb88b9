"""config.json of Hugging Face and the weights beside it: read as transformers
reads them, or refused."""

import json
import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from tests.models.helpers import LLAMA3, ORIGINAL, PLAIN, YARN, change_tensors
from tests.models.transformers_models import MODELS, SHAPE, VOCAB, decoder_of, save_model
from tests.refusals import refused
from tests.runs import TINY, tiny_config
from titan_sparse.config import Config, ConfigError, check
from titan_sparse.estimate.flops import linear_flops_per_token, windows_of
from titan_sparse.models import flavours
from titan_sparse.models.build import build_decoder
from titan_sparse.models.flavours import FLAVOURS, choose_implementation, resolve
from titan_sparse.models.huggingface import check_weights
from titan_sparse.models.huggingface_config import FAMILIES, config_json, read_config
from titan_sparse.models.transformers_config import TransformersConfig, read_transformers_config
from titan_sparse.training.trainer import Trainer

SIZES = {key: SHAPE[key] for key in SHAPE if key not in ("bos_token_id", "eos_token_id")}
POSITIVE = [key for key in SIZES if key != "pad_token_id"]


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
    with refused("reads the text part of a model"):
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
    with refused("unexpected tensor other.fc.weight"):
        decoder_of(tmp_path)


YARN_BY_8 = {"model.rope_scaling": "yarn", "model.rope_factor": 8.0}
MUST_BE_OFF = """
attention_dropout resid_pdrop embd_pdrop router_jitter_noise quantization_config
use_bidirectional_attention per_layer_config final_logit_softcapping attn_logit_softcapping
""".split()


def rope(table: dict) -> dict:
    return {"rope_parameters": table}


# Of a qwen2.
REFUSED_BY_OURS = [
    ({"architectures": ["MistralForCausalLM"]}, "only ['Qwen2ForCausalLM'] can be trained by"),
    ({"hidden_size": None}, "there is no hidden_size"),
    ({"rms_norm_eps": None}, "there is no rms_norm_eps"),
    ({"hidden_act": "gelu"}, 'hidden_act = "gelu"; only silu'),
    ({"attention_bias": True}, "attention_bias = true"),
    ({"partial_rotary_factor": 0}, "partial_rotary_factor = 0"),
    ({"use_sliding_window": True}, "use_sliding_window = true"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
    ({"transformers_weights": "b.safetensors"}, "transformers_weights"),
    ({"num_key_value_heads": 3}, "heads = 4 must be a multiple of kv_heads = 3"),
    *[({key: "5"}, f'{key} = "5"') for key in POSITIVE],
    *[({"head_dim": value}, "head_dim") for value in (0, [], 1.5, True, 2**64)],
    *[({"rms_norm_eps": value}, "rms_norm_eps") for value in ("x", 0, math.nan, math.inf)],
    *[({"tie_word_embeddings": value}, "tie_word_embeddings") for value in ("x", 1, [])],
    *[({"layer_types": value}, "layer_types") for value in (5, "x", {"a": 1})],
    *[({"rope_scaling": value}, "rope_scaling") for value in (5, "x", [1])],
    ({"rope_scaling": {"rope_type": "yarn", "factor": []}}, "factor = []"),
    ({ORIGINAL: "64", "rope_parameters": YARN}, f'{ORIGINAL} = "64"'),
    ({ORIGINAL: None, "rope_parameters": YARN}, f"{ORIGINAL} = null"),
    (rope(PLAIN | {"rope_theta": 0}), "rope_theta = 0"),
    (rope(PLAIN | {"rope_theta": 2**31}), "rope_theta = 2147483648"),
    (rope(PLAIN | {"rope_type": "linear"}), "rope_type with linear; only default"),
    (rope(PLAIN | {"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
    (rope(PLAIN | {"factor": 2.0}), 'rope scaling "default" with factor'),
    (rope({"full_attention": YARN}), 'scaling "default" with full_attention'),
    (rope(LLAMA3 | {"low_freq_factor": 6.0}), "only low_freq_factor < high_freq_factor"),
    (rope({"rope_type": "yarn", "rope_theta": 1e4}), 'rope scaling "yarn" without factor'),
    (rope(YARN | {"mscale": 0.7}), 'rope scaling "yarn" with mscale'),
    (rope(YARN | {"rope_type": ["yarn"]}), "rope_type with ['yarn']"),
    (rope(YARN | {ORIGINAL: 64.5}), f"{ORIGINAL} = 64.5"),
    (rope(YARN | {"factor": 0.99}), "only factor >= 1 and rope_theta > 1"),
    (rope(YARN | {"factor": 10**400}), "is not a positive float"),
    (rope(YARN | {"beta_fast": -1}), "beta_fast = -1"),
    (rope(YARN | {"rope_theta": 1.0}), "only factor >= 1 and rope_theta > 1"),
    (rope(YARN | {"rope_theta": None}), "rope_theta = null"),
    (rope(YARN | {"truncate": False}), "with truncate"),
    # Not the same number any more, even in fp32.
    (
        rope(YARN | {"attention_factor": (0.1 * math.log(4) + 1) * (1 + 1.5e-6)}),
        "only attention_factor = 1.13863",
    ),
]

READ_BY_OTHERS = [
    PLAIN | {"partial_rotary_factor": 0.5},
    YARN | {"truncate": False},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    YARN | {"attention_factor": 1.3},
]

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
    *[("phi3", {key: 0}, f"{key} = 0 is not a positive int") for key in POSITIVE],
    *[("qwen2", {"rms_norm_eps": 1e-5} | changes, words) for changes, words in REFUSED_BY_OURS],
]


@pytest.mark.parametrize("table", READ_BY_OTHERS, ids=str)
def test_a_rotary_embedding_that_ours_lacks_is_left_to_transformers(tmp_path, table):
    folder = write_config(tmp_path, "qwen2", rms_norm_eps=1e-5, **rope(table))
    with refused('by our decoder; write model.implementation = "transformers"$'):
        resolve("debug", initial_hf=folder)
    resolve("debug", initial_hf=folder, implementation="transformers")


@pytest.mark.parametrize("model_type, settings, message", REFUSED, ids=str)
def test_what_cannot_be_trained_is_refused(tmp_path, model_type, settings, message):
    folder = write_config(tmp_path, model_type, **settings)
    for implementation in ("auto", "native" if model_type == "qwen2" else "transformers"):
        with refused(f"^model.initial_hf: .*{folder}/config.json: ") as caught:
            resolve("debug", initial_hf=folder, implementation=implementation)
        assert message in str(caught.value)


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
    "model_type, settings, message",
    [
        # With YaRN by 4 in its config.json.
        ("qwen2", {"model.vocab_size": 319}, "319 would cut the 320 rows of"),
        ("qwen2", {"model.flavour": "qwen2.5-0.5b"}, "vocab_size = 151936 does not agree"),
        ("qwen2", {"model.initial_hf": "nowhere"}, '"nowhere" needs a readable config.json'),
        ("qwen2", YARN_BY_8, "model.rope_scaling and what goes with it"),
        (
            "mistral",
            {"model.implementation": "transformers", "model.initial_hf": ""},
            "needs model.i",
        ),
        ("mistral", YARN_BY_8, "model.rope_scaling and what goes with it"),
        ("mistral", {"model.vocab_size": 300}, "model.vocab_size = 300 would cut the 320 rows"),
        ("mistral", {"model.layers": 1}, "model.layers = 1 does not agree"),
        ("mistral", {"model.router_loss": 0.1}, "has no router"),
        ("mistral", {"training.mlp_chunk_tokens": 8}, "training.mlp_chunk_tokens = 8 does not go"),
        (
            "mistral",
            {"attention.window_sinks": 4, "attention.sliding_window": 64},
            "attention.window_sinks = 4 does not go",
        ),
        ("mixtral", {"float8.enable": True}, "float8.enable = true does not go"),
        # A flavour of ours.
        (None, {"model.router_loss": 0.1}, "has no router"),
        (None, {"model.random_weights": True}, "model.random_weights"),
        (None, {"model.vocab_size": -1}, "model.vocab_size"),
        (None, {"model.layers": -2}, "model.layers"),
        (None, {"model.rope_scaling": "ntk"}, "model.rope_scaling"),
        (None, {"model.rope_scaling": "none", "model.rope_factor": 4.0}, "model.rope_factor"),
        (None, YARN_BY_8 | {"model.rope_factor": 0.0}, "model.rope_factor"),
        (None, {"model.rope_original_length": 4096}, "model.rope_original_length"),
        (None, YARN_BY_8 | {"model.rope_original_length": -1}, "model.rope_original_length"),
        (None, {"model.rope_theta": -1.0}, "model.rope_theta"),
    ],
)
def test_options_that_do_not_agree_or_would_be_ignored(tmp_path, model_type, settings, message):
    config = Config()
    config.model.flavour = "qwen2.5-3b"
    if model_type:
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64}
        more = {"rms_norm_eps": 1e-5, "rope_parameters": YARN} if model_type == "qwen2" else experts
        config.model.flavour = "debug"
        config.model.initial_hf = write_config(tmp_path, model_type, **more)
    for key, value in settings.items():
        section, _, name = key.partition(".")
        setattr(getattr(config, section), name, value)
    with refused(message, ConfigError):
        check(config, 1, 1)


def test_fewer_layers_with_random_weights(tmp_path):
    folder = write_config(tmp_path, "olmo3", num_hidden_layers=8)
    config = resolve("debug", initial_hf=folder, random_weights=True, layers=5)
    assert config.windows == (4096, 4096, 4096, 0, 4096)
    assert len(built(config).layers) == 5
    types = ["linear_attention"] * 3 + ["full_attention"]
    folder = write_config(tmp_path, "qwen3_next", num_hidden_layers=4, layer_types=types)
    assert resolve("debug", initial_hf=folder, random_weights=True, layers=4).layers == 4
    with refused("the first 3 layers of .* have linear attention alone; write more model.layers"):
        resolve("debug", initial_hf=folder, random_weights=True, layers=3)
    # As transformers 5 writes it.
    types = ["full_attention"] * 12
    folder = write_config(tmp_path, "qwen2", rms_norm_eps=1e-5, layer_types=types)
    for layers in (5, 15):
        config = resolve("debug", initial_hf=folder, random_weights=True, layers=layers)
        exported = config_json(config, "float32", folder)
        read = transformers.AutoConfig.for_model(**exported)
        assert read.num_hidden_layers == len(read.layer_types) == layers


SHAPES = Path(__file__).parents[2] / "train_configs/shapes"


def test_the_shape_of_a_published_model():
    native = resolve("debug", initial_hf=str(SHAPES / "qwen3_0_6b"))
    theirs = resolve("debug", initial_hf=str(SHAPES / "qwen3_0_6b"), implementation="transformers")
    assert native == replace(FLAVOURS["qwen3-0.6b"], rope=native.rope)
    assert native.number_of_parameters() == theirs.number_of_parameters()
    assert linear_flops_per_token(native) == linear_flops_per_token(theirs)


def test_model_section_that_agrees(tmp_path):
    save_model(tmp_path, "qwen2", rope_parameters=dict(YARN))
    plain = resolve("debug", initial_hf=str(tmp_path))
    as_said = resolve("debug", VOCAB, "yarn", 4.0, 64, 1000.0, str(tmp_path))
    assert plain == as_said == read_config(str(tmp_path))


def test_shapes_that_do_not_exist():
    for change, named in (({"kv_heads": 3}, "multiple of kv_heads"), ({"head_dim": 7}, "even")):
        with refused(named):
            replace(TINY, **change)
    odd = replace(TINY, qkv_bias=False, qk_norm=False, hidden_size=64, heads=6)
    for config, named in (
        (odd, "hidden_size = 64, which is not a multiple of heads = 6"),
        (TINY, "no family of Hugging Face has qkv_bias = True and qk_norm = True"),
    ):
        with refused(named):
            config_json(config, "float32")


# Weights

Q = "model.layers.1.self_attn.q_proj.weight"
EXTRA = "model.layers.2.x"


@pytest.mark.parametrize(
    "name, tensor, expected",
    [
        (Q, None, f"has no tensor {Q}"),
        (EXTRA, torch.zeros(1), f"has an unexpected tensor {EXTRA}"),
        (Q, torch.zeros(64, 31), f"{Q} in .* is \\[64, 31\\], but its config.json says \\[64, 32"),
        (Q, torch.zeros(64, 32, dtype=torch.int8), f"{Q} in .* is I8; only F64, F32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(texts, monkeypatch, name, tensor, expected):
    monkeypatch.setattr(flavours, "FLAVOURS", dict(flavours.FLAVOURS))  # tiny_config() adds to it
    folder = texts / "in"
    save_model(folder, "qwen2")

    def change(tensors: dict) -> None:
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor

    change_tensors(folder, change)
    settings = {"model__flavour": "debug", "model__initial_hf": str(folder)}
    with refused(expected):
        Trainer(tiny_config(texts, "run", **settings))
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "has neither model.safetensors nor model.safetensors.index.json"),
        ('{"weight_map": {"a": "model-00001.safetensors"}}', "00001.safetensors cannot be read"),
        ("[]", "has no readable weight_map"),
        ("[" * 100_000, "has no readable weight_map"),
        *[
            (json.dumps({"weight_map": {"a": name}}), "index.json names the file")
            for name in ("../aside", "/model.safetensors", "a/b.safetensors", "a.pt", 5)
        ],
    ],
    ids=lambda value: str(value)[:40],
)
def test_indices_that_are_missing_or_broken(tmp_path, text, message):
    save_model(tmp_path, "qwen2")
    (tmp_path / "model.safetensors").rename(tmp_path / "aside")
    if text is not None:
        (tmp_path / "model.safetensors.index.json").write_text(text)
    with refused("model.initial_hf: .*" + message):
        check_weights(str(tmp_path), read_config(str(tmp_path)))


@pytest.mark.parametrize("beside", [True, False])
def test_adapters_are_not_left_out(tmp_path, beside):
    """transformers would read the base that they name, and add them."""
    if beside:
        save_model(tmp_path, "qwen2")
    (tmp_path / "adapter_config.json").write_text("{}")
    with refused("model.initial_hf = .*holds adapters, .*export_hf --merge"):
        resolve(flavour="debug", initial_hf=str(tmp_path))
