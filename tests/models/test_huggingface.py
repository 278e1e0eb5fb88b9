"""Hugging Face checkpoints in and out: transformers is the reference for logits, for config.json and for the files."""

import json
import logging
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from scripts.export_hf import main as export_hf
from tests.distributed import run_processes
from tests.models.helpers import causal, dense_attend, pretended_rank
from tests.runs import tiny_config, train, write_texts
from titan_sparse.config import ActivationCheckpoint, Compile, Config, ConfigError, check
from titan_sparse.models import flavours
from titan_sparse.models.decoder import Decoder
from titan_sparse.models.flavours import DecoderConfig, RopeConfig, resolve
from titan_sparse.models.huggingface import check_weights, export_weights, load_weights
from titan_sparse.models.huggingface_config import config_json, read_config
from titan_sparse.trainer import Trainer
from titan_sparse.training.checkpoint import read_into
from titan_sparse.training.parallelize import parallelize

transformers = pytest.importorskip("transformers")

torch.set_num_threads(1)

FAMILIES = {
    "Qwen2ForCausalLM": "Qwen2Config",
    "LlamaForCausalLM": "LlamaConfig",
    "Qwen3ForCausalLM": "Qwen3Config",
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
QWEN2 = "Qwen2ForCausalLM"
LENGTH = 150  # beyond the original contexts above


def save_reference(
    folder: Path, name: str = QWEN2, dtype: torch.dtype = torch.float32, **settings
) -> torch.nn.Module:
    """A small random model of transformers, saved; norms and biases, which start as ones and zeros, are random too."""
    # transformers' Llama, unlike the others, wants hidden_size to be a multiple of the number of heads
    settings = {
        "vocab_size": 331,
        "hidden_size": 96 if name == "LlamaForCausalLM" else 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": dict(PLAIN),
        "bos_token_id": 3,
        "eos_token_id": 4,
    } | settings
    torch.manual_seed(0)
    config = getattr(transformers, FAMILIES[name])(**settings, attn_implementation="eager")
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.12 + (parameter.ndim == 1))
    model.to(dtype).save_pretrained(folder)
    return model


def decoder(folder: Path, dtype: torch.dtype = torch.float32, **overrides) -> Decoder:
    config = resolve(flavour="debug", initial_hf=str(folder), **overrides)
    with torch.device("meta"):
        model = Decoder(config, dense_attend).to(dtype)
    model = model.to_empty(device="cpu")
    load_weights(model, str(folder), config)
    return model


def tokens_and_positions() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 331, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    return tokens, torch.arange(LENGTH).expand(2, -1)


@torch.no_grad()
def assert_same_logits(ours: Decoder, theirs: torch.nn.Module) -> None:
    tokens, positions = tokens_and_positions()
    expected = theirs(tokens).logits
    assert 0.1 < expected.std() < 10
    torch.testing.assert_close(ours(tokens, positions, causal(LENGTH)), expected, atol=1e-4, rtol=0)


def save_checkpoint(model: Decoder, folder: Path) -> str:
    dcp.save(dict(model.named_parameters()), checkpoint_id=str(folder), no_dist=True)
    return str(folder)


def export(checkpoint: str, *args) -> None:
    export_weights(checkpoint, partial(read_into, checkpoint=checkpoint), *args)


# Logits


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("rope", [PLAIN, YARN, LLAMA3], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("kv_heads, tied", [(1, True), (2, False), (3, True)])
def test_logits_are_those_of_transformers_in_and_out(tmp_path, name, rope, kv_heads, tied):
    theirs = save_reference(
        tmp_path / "in",
        name,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        rope_parameters=dict(rope),
    )
    ours = decoder(tmp_path / "in")
    assert_same_logits(ours, theirs)
    config = read_config(str(tmp_path / "in"))
    export(
        save_checkpoint(ours, tmp_path / "checkpoint/step-1"),
        str(tmp_path / "out"),
        config,
        torch.float32,
    )
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert type(again).__name__ == name and not any(report.values()), report
    assert (
        again.config.tie_word_embeddings == tied
        and again.config.rope_parameters["rope_theta"] == rope["rope_theta"]
    )
    assert_same_logits(ours, again)
    assert replace(read_config(str(tmp_path / "out")), max_positions=256) == config


def test_yarn_on_top_of_an_unscaled_checkpoint(tmp_path):
    save_reference(tmp_path / "in", max_position_embeddings=64)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "in",
        rope_parameters=PLAIN | yarn,
        max_position_embeddings=256,
        attn_implementation="eager",
    )
    ours = decoder(tmp_path / "in", rope_scaling="yarn", rope_factor=4.0)
    assert_same_logits(ours, theirs)
    config = resolve("debug", rope_scaling="yarn", rope_factor=4.0, initial_hf=str(tmp_path / "in"))
    values = config_json(config, "bfloat16", str(tmp_path / "in"))
    assert values["max_position_embeddings"] == 256 and values["torch_dtype"] == "bfloat16"
    assert values["rope_scaling"].items() >= yarn.items()
    assert (values["bos_token_id"], values["eos_token_id"]) == (3, 4)


@pytest.mark.parametrize(
    "rope, expected",
    [
        ({"rope_theta": 1e6}, RopeConfig(1e6, "none", 1.0, 256)),
        ({"rope_theta": 1e6, "rope_scaling": None}, RopeConfig(1e6, "none", 1.0, 256)),
        (
            {
                "rope_theta": 1e6,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
            RopeConfig(1e6, "yarn", 4.0, 64),
        ),
        (
            {
                "rope_theta": 1e6,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4,
                    "beta_fast": 16,
                    "beta_slow": 2,
                    "attention_factor": 1.138629436,
                },
            },
            RopeConfig(1e6, "yarn", 4.0, 256, beta_fast=16.0, beta_slow=2.0),
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"},
            },
            RopeConfig(5e5, "llama3", 8.0, 32),
        ),
    ],
)
def test_config_as_transformers_4_writes_it(tmp_path, rope, expected):
    write_config(tmp_path, rope_parameters=None, **rope)
    assert read_config(str(tmp_path)).rope == expected


# Files


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_trip_is_bit_equal(tmp_path, dtype):
    """In from several files, out to several; weights are float32 in between, as in training."""
    theirs = save_reference(tmp_path / "in", dtype=dtype)
    shutil.rmtree(tmp_path / "in")
    theirs.save_pretrained(tmp_path / "in", max_shard_size="50KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    (tmp_path / "in/tokenizer.json").write_text("{}")
    config = read_config(str(tmp_path / "in"))
    checkpoint = save_checkpoint(decoder(tmp_path / "in"), tmp_path / "checkpoint/step-1")
    for name, limit in (("one", 10**9), ("many", 60_000)):
        export(checkpoint, str(tmp_path / name), config, dtype, str(tmp_path / "in"), limit)
        files = sorted((tmp_path / name).glob("*.safetensors"))
        out = {key: x for file in files for key, x in load_file(file).items()}
        wanted = theirs.state_dict()
        assert out.keys() == wanted.keys()
        assert all(x.dtype == dtype and torch.equal(x, wanted[key]) for key, x in out.items())
        assert (len(files) == 1) == (name == "one") and (
            tmp_path / name / "tokenizer.json"
        ).is_file()
        assert all(file.stat().st_size < max(limit, 331 * 64 * 4 + 5000) for file in files)
        check_weights(str(tmp_path / name), config)
        assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).dtype == dtype
    again = decoder(tmp_path / "many").state_dict()
    assert all(
        torch.equal(x, again[key]) for key, x in decoder(tmp_path / "in").state_dict().items()
    )


def test_the_spare_head_of_a_tied_checkpoint_is_passed_over(tmp_path):
    theirs = save_reference(tmp_path, tie_word_embeddings=True)
    copy = theirs.model.embed_tokens.weight.detach().clone()
    change_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": copy}))
    assert read_config(str(tmp_path)).tied_embeddings
    assert_same_logits(decoder(tmp_path), theirs)


def test_export_overwrites_nothing(tmp_path):
    save_reference(tmp_path / "in")
    config = read_config(str(tmp_path / "in"))
    checkpoint = save_checkpoint(decoder(tmp_path / "in"), tmp_path / "checkpoint/step-3")
    with pytest.raises(ValueError, match="already there"):
        export(checkpoint, str(tmp_path / "in"), config, torch.float32)
    with pytest.raises(ValueError, match="among the run's checkpoints"):
        export(checkpoint, str(tmp_path / "checkpoint/step-3-hf"), config, torch.float32)


# Sharded


def _load_sharded(folder: Path) -> None:
    config, (tokens, positions) = read_config(str(folder)), tokens_and_positions()
    with torch.device("meta"):
        model = Decoder(config, dense_attend).to(torch.float32)
    parallelize(
        model,
        init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard_cp",)),
        torch.float32,
        True,
        ActivationCheckpoint(mode="full"),
        Compile(),
    )
    model.to_empty(device="cpu")
    load_weights(model, str(folder), config)
    with torch.no_grad():
        logits = model(tokens, positions, causal(LENGTH))
    torch.testing.assert_close(logits, torch.load(folder / "logits.pt"), atol=1e-4, rtol=0)


def test_logits_over_two_processes(tmp_path):
    theirs = save_reference(tmp_path, "Qwen3ForCausalLM", num_key_value_heads=1)
    with torch.no_grad():
        torch.save(theirs(tokens_and_positions()[0]).logits, tmp_path / "logits.pt")
    run_processes(2, _load_sharded, tmp_path)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 70)], ids=str)
def test_every_rank_reads_its_shard(tmp_path, shape):
    """331, 96, 64, 32 and 16 rows over 3 ranks are ragged, over 70 some have none; (2, 3) is HSDP. Nothing is sent."""
    save_reference(tmp_path)
    full = decoder(tmp_path).state_dict()
    world_size, names = torch.Size(shape).numel(), ("replicate", "shard")[-len(shape) :]
    for rank in range(world_size) if world_size < 10 else (0, 1, 31, 32, 69):
        with pretended_rank(rank, world_size):
            mesh = init_device_mesh(
                "cpu", shape, mesh_dim_names=[f"{name}_of_{rank}_{world_size}" for name in names]
            )
            model = decoder_of_shards(mesh, read_config(str(tmp_path)))
            load_weights(model, str(tmp_path), read_config(str(tmp_path)))
            for name, parameter in model.named_parameters():
                shards = list(full[name].chunk(shape[-1])) + [full[name][:0]] * shape[-1]
                assert torch.equal(parameter.to_local(), shards[rank % shape[-1]]), (name, rank)


def decoder_of_shards(mesh: DeviceMesh, config: DecoderConfig) -> Decoder:
    """NaN everywhere, so that whatever is not read shows."""
    model, placements = Decoder(config, dense_attend), (Replicate(), Shard(0))[-mesh.ndim :]
    for module in list(model.modules()):
        for name, p in list(module.named_parameters(recurse=False)):
            shards = distribute_tensor(
                torch.full_like(p, float("nan")), mesh, placements, src_data_rank=None
            )
            setattr(module, name, torch.nn.Parameter(shards))
    return model


# Runs


def _run(folder: Path) -> None:
    logging.getLogger("titan_sparse").setLevel(logging.INFO)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("titan_sparse").addHandler(handler)
    settings = {
        "model__flavour": "debug",
        "model__initial_hf": str(folder / "in"),
        "training__dtype": "float32",
        "checkpoint__enable": True,
        "checkpoint__interval": 2,
        "checkpoint__last_save_in_hf": True,
        "optimizer__lr": 1e-3,
        "lr_scheduler__total_steps": 4,
    }
    first = Trainer(tiny_config(folder, "run", **settings | {"training__steps": 2}))
    first._load()
    wanted = load_file(folder / "in/model.safetensors")
    weights = {name: x.full_tensor() for name, x in first.model.state_dict().items()}
    assert all(torch.equal(x, wanted["model." + name]) for name, x in weights.items())
    train(first.config)
    assert any(line.startswith("read the weights of") for line in lines)
    if dist.get_rank() == 0:
        (folder / "in/model.safetensors").write_bytes(b"")  # must not be needed any more
    dist.barrier()
    lines.clear()
    second = train(tiny_config(folder, "run", **settings | {"training__steps": 4}))
    assert second.progress.step == 4 and second.loader.state_dict()["sequence"] == 8
    assert any(
        "step 2, from the run's own checkpoint and not from model.initial_hf" in line
        for line in lines
    )
    trained = {name: x.full_tensor() for name, x in second.model.state_dict().items()}
    dist.barrier()
    out = load_file(folder / "run/huggingface/step-4/model.safetensors")
    assert all(torch.equal(x, out["model." + name]) for name, x in trained.items())
    assert not all(torch.equal(x, weights[name]) for name, x in trained.items())


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_from_hugging_face_and_back(tmp_path, capsys):
    """First weights, resuming before them, last_save_in_hf; the script writes the same, changes nothing of the run."""
    save_reference(tmp_path / "in", tie_word_embeddings=True)
    write_texts(tmp_path / "texts")
    run_processes(2, _run, tmp_path)
    before = _files(tmp_path / "run")
    assert export_hf([str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    assert export_hf([str(tmp_path / "run/checkpoint/step-2"), str(tmp_path / "half")]) == 0
    assert _files(tmp_path / "run") == before
    written = tmp_path / "run/huggingface/step-4"
    assert {p.name: x for p, x in _files(written).items()} == {
        p.name: x for p, x in _files(tmp_path / "out").items()
    }
    half = load_file(tmp_path / "half/model.safetensors")
    assert half["model.norm.weight"].dtype == torch.bfloat16
    assert transformers.AutoModelForCausalLM.from_pretrained(written).config.vocab_size == 331
    assert export_hf([str(tmp_path), str(tmp_path / "new")]) == 2
    assert "neither the output_dir" in capsys.readouterr().err
    assert (
        export_hf([str(tmp_path / "run"), str(tmp_path / "out")]) == 2
        and "already there" in capsys.readouterr().err
    )


# Refusals


def write_config(folder: Path, **changes) -> None:
    """A config.json with the changed keys; None removes one."""
    if not (folder / "config.json").exists():
        save_reference(folder)
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in values.items() if value is not None})
    )


def change_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "changes, expected",
    [
        (
            {"architectures": ["MistralForCausalLM"]},
            "architectures = ['MistralForCausalLM']; only Qwen2ForCausalLM",
        ),
        ({"architectures": None}, "architectures = None"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu; only silu"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types with ['sliding_attention']",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 4}, "heads = 6 must be a multiple of kv_heads = 4"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            'rope_type = "dynamic" is unknown',
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            'rope scaling "yarn" needs factor',
        ),
        ({"rope_parameters": YARN | {"mscale": 0.7}}, 'rope scaling "yarn" with mscale'),
        ({"rope_parameters": YARN | {"attention_factor": 1.0}}, "attention_factor = 1.0"),
        ({"rope_parameters": YARN | {"truncate": False}}, "truncate = false"),
    ],
)
def test_config_json_that_cannot_be_trained(tmp_path, changes, expected):
    write_config(tmp_path, **changes)
    with pytest.raises(ValueError) as caught:
        read_config(str(tmp_path))
    assert (
        expected in str(caught.value)
        and "\n" not in str(caught.value)
        and str(tmp_path) in str(caught.value)
    )


@pytest.mark.parametrize(
    "rope, model, expected",
    [
        (PLAIN, {"vocab_size": 330}, "model.vocab_size = 330 does not agree with"),
        (PLAIN, {"layers": 7}, "model.layers = 7 does not agree with"),
        (PLAIN, {"rope_theta": 5e5}, "model.rope_theta = 500000.0 does not agree with"),
        (
            PLAIN,
            {"flavour": "qwen2.5-0.5b"},
            'model.flavour = "qwen2.5-0.5b": vocab_size = 151936 does not agree with',
        ),
        (
            PLAIN,
            {"initial_hf": "nowhere"},
            'model.initial_hf = "nowhere" needs a readable config.json',
        ),
        (
            YARN,
            {"rope_scaling": "yarn", "rope_factor": 8.0},
            "has yarn with factor 4 over 64 tokens; leave them out",
        ),
        (
            YARN,
            {"rope_scaling": "none"},
            "already has yarn with factor 4 over 64 tokens; leave them out",
        ),
    ],
)
def test_model_section_that_does_not_agree(tmp_path, rope, model, expected):
    save_reference(tmp_path, rope_parameters=dict(rope))
    config = Config()
    for key, value in ({"initial_hf": str(tmp_path)} | model).items():
        setattr(config.model, key, value)
    with pytest.raises(ConfigError) as caught:
        check(config, 1, 1)
    assert expected in str(caught.value)


def test_model_section_that_agrees(tmp_path):
    save_reference(tmp_path, rope_parameters=dict(YARN))
    plain = resolve("debug", initial_hf=str(tmp_path))
    assert (
        plain
        == resolve("debug", 331, "yarn", 4.0, 64, 1000.0, str(tmp_path))
        == read_config(str(tmp_path))
    )


def test_checkpoint_section_is_checked():
    config = Config()
    config.checkpoint.last_save_in_hf = True
    with pytest.raises(ConfigError, match="checkpoint.last_save_in_hf = true would be ignored"):
        check(config, 1, 1)


def test_a_shape_without_a_family():
    both = replace(resolve("debug"), qk_norm=True)
    with pytest.raises(ValueError, match="hidden_size = 64 to be a multiple of heads = 6"):
        config_json(replace(resolve("debug"), qkv_bias=False, hidden_size=64, heads=6), "float32")
    with pytest.raises(
        ValueError, match="no family of Hugging Face has qkv_bias = True and qk_norm = True"
    ):
        config_json(both, "float32")


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda tensors: tensors.pop(Q), f"has no tensor {Q}"),
        (
            lambda tensors: tensors.update({"model.layers.2.x": torch.zeros(1)}),
            "has an unexpected tensor model.layers.2.x",
        ),
        (
            lambda tensors: tensors.update({Q: torch.zeros(96, 63)}),
            f"{Q} in .* is \\[96, 63\\], but its config.json says \\[96, 64\\]",
        ),
        (
            lambda tensors: tensors.update({Q: torch.zeros(96, 64, dtype=torch.int8)}),
            f"{Q} in .* is I8; only F64, F32",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named_before_anything_starts(
    tmp_path, monkeypatch, change, expected
):
    monkeypatch.setattr(flavours, "FLAVOURS", dict(flavours.FLAVOURS))  # tiny_config() adds to it
    save_reference(tmp_path / "in")
    change_tensors(tmp_path / "in", change)
    write_texts(tmp_path / "texts")
    with pytest.raises(ValueError, match=expected) as caught:
        Trainer(
            tiny_config(
                tmp_path, "run", model__flavour="debug", model__initial_hf=str(tmp_path / "in")
            )
        )
    assert not dist.is_initialized() and "\n" not in str(caught.value)


def test_files_that_are_missing_or_broken(tmp_path):
    save_reference(tmp_path)
    config, path = read_config(str(tmp_path)), tmp_path / "model.safetensors"
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    path.rename(tmp_path / "aside")
    with pytest.raises(ValueError, match="model-00001-of-00002.safetensors cannot be read"):
        check_weights(str(tmp_path), config)
    (tmp_path / "model.safetensors.index.json").unlink()
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="model.safetensors cannot be read"):
        check_weights(str(tmp_path), config)
    path.unlink()
    with pytest.raises(
        ValueError, match="has neither model.safetensors nor model.safetensors.index.json"
    ):
        check_weights(str(tmp_path), config)


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/model.safetensors", "a/model.safetensors", "..", "", "a.pt", 5],
)
def test_an_index_that_leaves_its_folder_is_refused(tmp_path, name):
    """The file exists and holds every tensor: only its place is wrong."""
    save_reference(tmp_path)
    config = read_config(str(tmp_path))
    folder = tmp_path / "download"
    (folder / "a").mkdir(parents=True)
    shutil.copy(tmp_path / "model.safetensors", folder / "a")
    names = load_file(tmp_path / "model.safetensors").keys()
    if name == "/model.safetensors":
        name = str(tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="model.initial_hf: .*index.json names the file") as caught:
        check_weights(str(folder), config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "5", '{"weight_map": []}', "[" * 100_000])
def test_an_index_of_another_shape_is_refused(tmp_path, text):
    save_reference(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="has no readable weight_map"):
        check_weights(str(tmp_path), read_config(str(tmp_path)))


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "max_position_embeddings",
        "head_dim",
    ],
)
def test_sizes_of_config_json_are_positive_integers(tmp_path, key):
    for value in ("x", "5", -1, 0, [], {}, 1.5, True, 2**64):
        write_config(tmp_path, **{key: value})
        with pytest.raises(ValueError, match=f"model.initial_hf: .* {key} = .* positive integer"):
            read_config(str(tmp_path))


@pytest.mark.parametrize(
    "key, values",
    [
        ("rms_norm_eps", ("x", -1, 0, [], float("nan"), float("inf"))),
        ("tie_word_embeddings", ("x", 1, [])),
        ("rope_scaling", (5, "x", [1], {"rope_type": "yarn", "factor": []})),
        ("layer_types", (5, "x", {"a": 1})),
    ],
)
def test_other_values_of_config_json_have_their_type(tmp_path, key, values):
    for value in values:
        write_config(tmp_path, rope_theta=1e4, **{key: value})
        with pytest.raises(ValueError, match="model.initial_hf: "):
            read_config(str(tmp_path))
