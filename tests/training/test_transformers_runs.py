"""Whole runs of models that run through transformers' own code: compiled, recomputed, resumed and
spread over processes they are alike, and transformers reads what they export."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_processes
from tests.models.transformers_models import MODELS, WINDOW, save_model
from tests.training.wired_run import assert_alike, lines_of, run, write_shard
from titan_sparse.commands.evaluate import main as evaluate
from titan_sparse.commands.export_hf import main as export_hf
from titan_sparse.estimate.flops import flops_per_token
from titan_sparse.models.transformers_config import read_transformers_config

transformers = pytest.importorskip("transformers")

torch.set_num_threads(1)

ALL = [name for name in MODELS if "," not in name]
STEPS = 3
SETTINGS: dict[str, object] = {
    "model.implementation": "transformers",
    "training.steps": STEPS,
    "optimizer.name": "SGD",
    "optimizer.lr": 0.1,
    "optimizer.weight_decay": 0.0,
    "lr_scheduler.warmup_steps": 0,
    "checkpoint.enable": False,
    "checkpoint.last_save_in_hf": False,
}
SAVES = {"checkpoint.enable": True, "checkpoint.last_save_in_hf": True}
CP = {"parallelism.cp": 2, "parallelism.dp_shard": 1}
SPREAD: dict[str, dict[str, object]] = {
    "llama": {**CP, "attention.layout": "contiguous"},
    "mistral": {**CP, "attention.layout": "balanced", "attention.schedule": "group_cast"},
    "smollm3": CP,
    "olmo3": {**CP, "attention.layout": "balanced", "attention.schedule": "ring"},
    "gemma3": {**CP, "attention.layout": "zigzag"},
    "phi3": CP,
    "mixtral": CP,
    "qwen3_moe": CP,
    "gpt_oss": {**CP, "attention.layout": "balanced"},
}
"""What two processes do."""

OVER_THREE = ("llama", "olmo3", "gemma3", "phi3", "mixtral", "qwen3_moe", "gpt_oss")


ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def train(folder: Path, name: str, run_name: str, settings: dict[str, object]) -> None:
    model = {"model.initial_hf": folder / name}
    run(folder, f"{name}-{run_name}", SETTINGS | model | settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A shard, the models, and plain runs of one process over one and over two sequences a step."""
    folder = tmp_path_factory.mktemp("transformers")
    write_shard(folder)
    for name in ALL:
        save_model(folder / name, name, **(ROUTED if name in ("mixtral", "gpt_oss") else {}))
    for name in SPREAD:
        train(folder, name, "one", {})
    for name in ("gemma3", "mixtral"):
        train(folder, name, "one-batch-of-2", {"training.local_batch_size": 2})
    return folder


@pytest.mark.parametrize("name", ["gemma3", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_compiled_and_recomputed_runs_are_alike(folder: Path, name: str) -> None:
    compiled = {"compile.enable": True, "compile.backend": "aot_eager"}
    train(folder, name, "kept", {"activation_checkpoint.mode": "none"})
    train(folder, name, "selective", {"activation_checkpoint.mode": "selective", **compiled})
    train(folder, name, "recomputed", {"activation_checkpoint.attention_recompute": 0.5})
    for run_name in ("kept", "selective", "recomputed"):
        assert_alike(folder, f"{name}-{run_name}", f"{name}-one")


@pytest.mark.parametrize("name", ["olmo3", "qwen3_moe"])
def test_a_resumed_run_is_the_whole_run(folder: Path, name: str) -> None:
    saves = {"checkpoint.enable": True, "checkpoint.interval": 1, "optimizer.name": "AdamW"}
    total = {"lr_scheduler.total_steps": STEPS}
    train(folder, name, "whole", {**saves, **total})
    train(folder, name, "resumed", {**saves, **total, "training.steps": 1})
    train(folder, name, "resumed", {**saves, **total})
    whole = lines_of(folder / f"{name}-whole")
    resumed = lines_of(folder / f"{name}-resumed")
    assert [line["step"] for line in resumed] == [1, 2, 3]
    for line, wanted in zip(resumed, whole, strict=True):
        assert (line["loss"], line["grad_norm"]) == (wanted["loss"], wanted["grad_norm"])


def _tensors_on_disk(folder: Path) -> dict[str, list[int]]:
    from safetensors import safe_open

    shapes = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            shapes |= {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}
    return shapes


def _export(folder: Path) -> None:
    for name in ALL:
        train(folder, name, "exported", {**SAVES, "optimizer.lr": 1e-30, "training.steps": 1})


def test_transformers_reads_what_is_exported(folder: Path) -> None:
    """Two ranks read and train with a learning rate of nothing: what comes out is what came in."""
    for name in ALL:
        generation = {"bos_token_id": 1, "max_new_tokens": 7}
        (folder / name / "generation_config.json").write_text(json.dumps(generation))
    # As transformers 4 names it; whoever reads that first would read another dtype.
    config = folder / ALL[0] / "config.json"
    as_given = config.read_text()
    config.write_text(json.dumps(json.loads(as_given) | {"torch_dtype": "float16"}))
    run_processes(2, _export, folder)
    config.write_text(as_given)
    for name in ALL:
        out = folder / f"{name}-exported/huggingface/step-1"
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            out, output_loading_info=True, dtype=torch.float32
        )
        assert not any(report.values()), (name, report)
        before = transformers.AutoModelForCausalLM.from_pretrained(folder / name)
        assert type(model) is type(before)
        expected = before.state_dict()
        found = model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], x) for key, x in expected.items()), name
        assert model.generation_config.max_new_tokens == 7
        written = json.loads((out / "config.json").read_text())
        given = json.loads((folder / name / "config.json").read_text())
        assert written == given | {"dtype": "float32"}
        assert _tensors_on_disk(out) == _tensors_on_disk(folder / name), name
    for name in ("qwen3_moe", "gemma3"):
        out = folder / f"{name}-by-script"
        assert export_hf([str(folder / f"{name}-exported"), str(out), "--dtype", "float32"]) == 0
        for file in (folder / f"{name}-exported/huggingface/step-1").iterdir():
            assert (out / file.name).read_bytes() == file.read_bytes(), file.name


def test_fewer_layers_are_exported_as_such(folder: Path) -> None:
    fewer = {"model.random_weights": True, "model.layers": 1, "training.steps": 1}
    train(folder, "olmo3", "fewer", {**SAVES, **fewer})
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "olmo3-fewer/huggingface/step-1", output_loading_info=True
    )
    assert len(model.model.layers) == 1 and not any(report.values()), report


def _evaluate(folder: Path, out: str, *words: str) -> list[dict]:
    common = ["--config", str(folder / "gemma3-evaluated/config.toml"), "--lengths", "96"]
    rest = ["--buckets", "2", "--samples", "2", "--out", str(folder / out)]
    assert evaluate([*common, *words, *rest]) == 0
    return json.loads((folder / out / "results.json").read_text())["position"]


def test_a_run_and_its_export_are_evaluated_alike(folder: Path) -> None:
    train(folder, "gemma3", "evaluated", {**SAVES, "optimizer.lr": 0.5})
    run_folder = folder / "gemma3-evaluated"
    words = ["--tasks", "position"]
    found = _evaluate(folder, "of-run", *words, "--checkpoint", str(run_folder))
    exported = str(run_folder / "huggingface" / f"step-{STEPS}")
    assert _evaluate(folder, "of-export", *words, "--hf", exported) == found
    assert _evaluate(folder, "of-first", *words, "--hf", str(folder / "gemma3")) != found


def test_sparse_patterns_leave_windows_dense(folder: Path, caplog) -> None:
    """Of Gemma's two layers, the second has full attention and selects."""
    sparse = {
        "attention.pattern": "vertical_slash",
        "attention.vertical_slash.max_verticals": 1,
        "attention.vertical_slash.sinks": 0,
        "attention.vertical_slash.max_slashes": 1,
        "attention.vertical_slash.dense_below": 16,
        "metrics.recall_every": 1,
        "metrics.tensorboard": True,
        "metrics.pictures_every": 1,
    }
    train(folder, "gemma3", "sparse", sparse)
    dense = lines_of(folder / "gemma3-one")[0]
    line = lines_of(folder / "gemma3-sparse")[0]
    assert line["density"] < 0.95 and line["recall"] < 0.99
    # Half of the layers are dense, so at least half of the pairs are visited.
    assert line["density"] > 0.5
    assert line["loss"] != dense["loss"]
    assert dense["density"] == 1.0 and line["heads_capped"] > 0
    # Only one layer has budgets; its number is that of all layers.
    assert re.search(r"caps keep .* in layer 1 below", caplog.text)


def test_dense_flops_know_the_window_of_each_layer(folder: Path) -> None:
    settings = {"attention.mask": "causal_across_documents", "training.steps": 1}
    train(folder, "gemma3", "joined", settings)
    (line,) = lines_of(folder / "gemma3-joined")
    config = read_transformers_config(str(folder / "gemma3"))
    # Of 64 tokens: a triangle, and one that ends in full windows.
    pairs = 64 * 65 / 2 + WINDOW * (WINDOW + 1) / 2 + (64 - WINDOW) * WINDOW
    flops = flops_per_token(config, config.heads * pairs / 64)
    tokens_per_second = line["tokens_per_second_per_device"]
    assert line["dense_equivalent_tflops"] * 1e12 == pytest.approx(flops * tokens_per_second)


def test_first_weights_are_random_where_asked(folder: Path) -> None:
    """A folder with nothing but config.json is a shape."""
    shape = folder / "shape"
    shape.mkdir()
    shutil.copy(folder / "mistral/config.json", shape)
    with pytest.raises(ValueError, match="neither model.safetensors"):
        train(folder, "shape", "refused", {})
    drawn = {"model.random_weights": True}
    train(folder, "shape", "drawn", {**drawn, "model.layers": 1})
    train(folder, "mistral", "drawn", drawn)
    losses = [
        lines_of(folder / run_name)[0]["loss"] for run_name in ("shape-drawn", "mistral-drawn")
    ]
    # That of equal probabilities of 320 tokens.
    assert losses == pytest.approx([math.log(320)] * 2, abs=0.1)
    assert losses[0] != losses[1]


def test_another_config_json_is_refused_on_resuming(folder: Path) -> None:
    saves = {"checkpoint.enable": True}
    train(folder, "olmo2", "changed", saves)
    path = folder / "olmo2/config.json"
    text = path.read_text()
    values = json.loads(text)
    train(folder, "olmo2", "changed", saves)
    path.write_text(json.dumps(values | {"hidden_act": "gelu"}))
    try:
        with pytest.raises(
            ValueError, match="config.json hidden_act of the model was .* and is .gelu."
        ):
            train(folder, "olmo2", "changed", saves)
    finally:
        path.write_text(text)


def _train_spread(folder: Path) -> None:
    ranks = dist.get_world_size()
    for name in _names(ranks):
        settings = SPREAD[name] if ranks == 2 else {**CP, "parallelism.cp": ranks}
        train(folder, name, f"cp-{ranks}", settings)


def _names(ranks: int) -> tuple[str, ...]:
    return tuple(SPREAD) if ranks == 2 else OVER_THREE


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_context_parallel_runs_are_those_of_one_process(folder: Path, ranks: int) -> None:
    """Parameters are sharded over the same ranks."""
    run_processes(ranks, _train_spread, folder)
    for name in _names(ranks):
        assert_alike(folder, f"{name}-cp-{ranks}", f"{name}-one")


def _train_data_parallel(folder: Path) -> None:
    cp = dist.get_world_size() // 2
    for name in ("gemma3", "mixtral"):
        train(folder, name, f"dp-2-cp-{cp}", {"parallelism.cp": cp})


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_data_parallel_runs_are_those_of_one_process(folder: Path, ranks: int) -> None:
    """Mixtral's router loss is counted over both sequences, as in one process that has both."""
    run_processes(ranks, _train_data_parallel, folder)
    for name in ("gemma3", "mixtral"):
        assert_alike(folder, f"{name}-dp-2-cp-{ranks // 2}", f"{name}-one-batch-of-2")
