"""Whole runs of transformers' own code: compiled, recomputed, resumed, spread, and exported."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.distributed import run_processes
from tests.models.transformers_models import WINDOW, read_model, save_model
from tests.training import reference_loop as by_hand
from tests.training.wired_run import ALIKE, SEQ_LEN, assert_alike, lines_of, run, write_shard
from titan_sparse.commands.export_hf import main as export_hf
from titan_sparse.estimate.flops import flops_per_token
from titan_sparse.models.transformers_config import read_transformers_config

ALL = ("gemma3", "mixtral", "gpt_oss", "qwen3_5")
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
CP = {"parallelism.cp": 2, "parallelism.dp_shard": 1}
SPREAD: dict[str, dict[str, object]] = {
    "gemma3": {**CP, "attention.layout": "zigzag"},
    "mixtral": CP,
    "gpt_oss": {**CP, "attention.layout": "balanced", "attention.schedule": "group_cast"},
    "qwen3_next": CP,
    "qwen3_5": {**CP, "attention.layout": "balanced"},
}
"""What two processes do."""


HYBRID = ("qwen3_next", "qwen3_5")
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def train_wide(folder: Path, name: str, run_name: str, settings: dict[str, object]) -> None:
    """In float64, where transformers' casts to float32 change nothing."""
    to = torch.Tensor.to
    to_float = torch.Tensor.float

    def cast(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        is_wide = x.dtype == torch.float64 and args[:1] == (torch.float32,)
        return to(x, *(args[1:] if is_wide else args), **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", cast)
        patch.setattr(
            torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x)
        )
        train(folder, name, run_name, {"training.dtype": "float64", **settings})


def train(folder: Path, name: str, run_name: str, settings: dict[str, object]) -> None:
    model = {"model.initial_hf": folder / name}
    run(folder, f"{name}-{run_name}", SETTINGS | model | settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A shard, the models, and plain runs of one process."""
    folder = tmp_path_factory.mktemp("transformers")
    write_shard(folder)
    for name in {*ALL, *SPREAD}:
        routed = ROUTED if name in ("mixtral", "gpt_oss", "qwen3_next") else {}
        save_model(folder / name, name, **routed)
    for name in SPREAD:
        if name != "qwen3_next":
            train(folder, name, "one", {})
    return folder


@pytest.mark.parametrize("name, backend", [("gemma3", "aot_eager"), ("qwen3_5", "eager")])
def test_compiled_recomputed_and_resumed_runs_are_alike(folder, name, backend) -> None:
    compiled = {"compile.enable": True, "compile.backend": backend}
    train(folder, name, "selective", {"activation_checkpoint.mode": "selective", **compiled})
    recompute = {"activation_checkpoint.attention_recompute": 0.5, "checkpoint.enable": True}
    recompute["lr_scheduler.total_steps"] = STEPS
    for steps in (1, STEPS):
        train(folder, name, "recomputed", recompute | {"training.steps": steps})
    for run_name in ("selective", "recomputed"):
        assert_alike(folder, f"{name}-{run_name}", f"{name}-one")


@pytest.mark.parametrize("compiles", [False, True])
def test_experts_run_in_float64(folder, compiles) -> None:
    wide = {"training.dtype": "float64", "compile.enable": compiles}
    if compiles:
        wide["compile.backend"] = "aot_eager"
    train(folder, "mixtral", f"wide-{compiles}", wide)
    assert_alike(folder, f"mixtral-wide-{compiles}", "mixtral-one")


def test_a_hybrid_model_reads_joined_documents_as_transformers_does(folder: Path) -> None:
    joined = {"attention.mask": "causal_across_documents", "optimizer.lr": 1e-30}
    train(folder, "qwen3_5", "joined", joined)
    model = read_model(folder / "qwen3_5")
    packed = by_hand.steps_of(folder / "shards", STEPS, SEQ_LEN)
    assert any(len(pieces) > 1 for pieces in packed)
    sequences = by_hand.steps_of(folder / "shards", STEPS, SEQ_LEN, joined=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    wanted = by_hand.train(model, optimizer, sequences, [1e-30] * STEPS, 0.0, 0.0)
    losses = [line["loss"] for line in lines_of(folder / "qwen3_5-joined")]
    assert losses == pytest.approx([line.loss for line in wanted], rel=ALIKE)


def _tensors_on_disk(folder: Path) -> dict[str, torch.Size]:
    [file] = folder.glob("*.safetensors")
    return {key: tensor.shape for key, tensor in load_file(file).items()}


def _export(folder: Path) -> None:
    saves = {"checkpoint.enable": True, "checkpoint.last_save_in_hf": True}
    for name in ALL:
        train(folder, name, "exported", {**saves, "optimizer.lr": 1e-30, "training.steps": 1})


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
        # Of the byte tokenizer, with which the run was trained.
        assert written == given | {"dtype": "float32", "eos_token_id": 256}
        assert _tensors_on_disk(out) == _tensors_on_disk(folder / name), name
    out, exported = folder / "by-script", folder / "mixtral-exported"
    assert export_hf([str(exported), str(out), "--dtype", "float32"]) == 0
    for file in (exported / "huggingface/step-1").iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes(), file.name


def test_sparse_patterns_leave_windows_dense(folder: Path) -> None:
    """Of Gemma's two layers, the second has full attention and selects."""
    sparse = {
        "attention.pattern": "vertical_slash",
        "attention.vertical_slash.max_verticals": 1,
        "attention.vertical_slash.sinks": 0,
        "attention.vertical_slash.max_slashes": 1,
        "attention.vertical_slash.dense_below": 16,
        "metrics.recall_every": 1,
    }
    train(folder, "gemma3", "sparse", sparse)
    dense = lines_of(folder / "gemma3-one")[0]
    line = lines_of(folder / "gemma3-sparse")[0]
    assert line["density"] < 0.95 and line["recall"] < 0.99
    # Half of the layers are dense, so at least half of the pairs are visited.
    assert line["density"] > 0.5
    assert line["loss"] != dense["loss"]
    assert dense["density"] == 1.0 and line["heads_capped"] > 0


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


def _train_spread(folder: Path) -> None:
    for name, settings in SPREAD.items():
        (train_wide if name in HYBRID else train)(folder, name, "cp", settings)


def test_context_parallel_runs_are_those_of_one_process(folder: Path) -> None:
    """In float32, hybrid models of this size differ from themselves in float64 by as much as ranks
    differ: up to 5e-5 of the gradient's norm, and 8e-3 after a token went to another expert."""
    for name in HYBRID:
        train_wide(folder, name, "wide", {})
    run_processes(2, _train_spread, folder)
    for name in SPREAD:
        if name in HYBRID:
            assert_alike(folder, f"{name}-cp", f"{name}-wide", 1e-10)
        else:
            assert_alike(folder, f"{name}-cp", f"{name}-one")


def test_data_parallel_runs_are_those_of_one_process(folder: Path) -> None:
    """Mixtral's router loss is counted over both sequences, as in one process that has both."""
    train(folder, "mixtral", "one-batch-of-2", {"training.local_batch_size": 2})
    run_processes(2, train, folder, "mixtral", "dp", {})
    assert_alike(folder, "mixtral-dp", "mixtral-one-batch-of-2")
