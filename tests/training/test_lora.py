"""Whole runs with adapters have the losses and adapters of PEFT in a
textbook loop, on any ranks."""

import shutil
import sys
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.data.helpers import CHATML
from tests.distributed import run_processes
from tests.models.helpers import change_tensors
from tests.models.transformers_models import read_model, save_model
from tests.training import reference_loop as by_hand
from tests.training.wired_run import (
    ALIKE,
    SEQ_LEN,
    assert_alike,
    lines_of,
    run,
    write_model,
    write_shard,
)
from titan_sparse.commands.export_hf import main as export_hf
from titan_sparse.config import Config, ConfigError, Lora
from titan_sparse.models.config import is_adapter
from titan_sparse.models.initialization import canonical_name
from titan_sparse.training.checkpoint import reader
from titan_sparse.training.checkpoint.reader import read_metadata
from titan_sparse.training.metrics_output import read_lines
from titan_sparse.training.model import draw_dropout, without_dropout
from titan_sparse.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("fresh_compiler")

LR = 0.02
STEPS = 4
SETTINGS: dict[str, object] = {
    "lora.rank": 3,
    "lora.alpha": 12,
    "training.steps": STEPS,
    "training.max_norm": 0.0,
    "optimizer.lr": LR,
    "optimizer.weight_decay": 0.1,
    "optimizer.beta2": 0.95,
    "lr_scheduler.warmup_steps": 0,
    "lr_scheduler.min_lr_factor": 1.0,
}
FOREIGN = ("qwen3_moe", "qwen3_5", "gemma3")
"""Models that our own decoder does not have."""


def train(folder: Path, output: str, model: str, settings: dict[str, object]) -> Trainer:
    code = "transformers" if model in FOREIGN else "native"
    named = {"model.initial_hf": folder / model, "model.implementation": code}
    return run(folder, output, SETTINGS | named | settings)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], rel: float = ALIKE) -> None:
    """All tensors, beside the largest number of any."""
    assert found.keys() == expected.keys()
    largest = max(x.abs().max().item() for x in expected.values())
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max().item() <= rel * largest, name


class Case(NamedTuple):
    model: str
    settings: dict[str, object]
    layers: int
    """linear layers with adapters"""
    rel: float = ALIKE
    tables: int = 0
    """embedding and head, if rows of theirs are trained"""


CASES = {
    "all of native Qwen3": Case("Qwen3", {}, 14),
    "two of native Llama": Case(
        "Llama",
        {
            "lora.targets": "q_proj, down_proj",
            "lora.init": "gaussian",
            "optimizer.name": "SGD",
            "training.z_loss": 0.02,
            "training.gradient_accumulation_steps": 2,
        },
        4,
    ),
    "rows of a tied Qwen3": Case("Qwen3", {"lora.trainable_tokens": "e, a"}, 14, tables=1),
    "rows of native Llama": Case(
        "Llama",
        {
            "lora.trainable_tokens": "h,c,b",
            "lora.targets": "v_proj",
            "training.z_loss": 0.02,
            "training.gradient_accumulation_steps": 2,
        },
        2,
        tables=2,
    ),
    "rows of transformers' Gemma, whose embedding is scaled": Case(
        "gemma3",
        {"lora.trainable_tokens": "a", "lora.targets": "q_proj", "optimizer.name": "SGD"},
        2,
        tables=1,
    ),
    "attention of transformers' Qwen3-MoE": Case("qwen3_moe", {"optimizer.name": "SGD"}, 12),
    "all of a hybrid Qwen3.5": Case(
        "qwen3_5", {"optimizer.name": "SGD", "lora.alpha": 1}, 23, rel=2e-5
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    write_shard(folder)
    for case in CASES.values():
        if case.model in FOREIGN:
            save_model(folder / case.model, case.model)
        else:
            write_model(folder, case.model)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_pefts_loop(folder, name):
    case = CASES[name]
    output = name.replace(" ", "_")
    # The adapters that the run begins with, in PEFT's format.
    nothing = {"optimizer.lr": 1e-30, "optimizer.weight_decay": 0.0, "training.steps": 1}
    train(folder, f"{output}-first", case.model, case.settings | nothing)
    first = folder / f"{output}-first/huggingface/step-1"
    base = read_model(folder / case.model)
    model = peft.PeftModel.from_pretrained(base, first, is_trainable=True)
    about = model.peft_config["default"]
    assert (about.r, about.lora_alpha) == (3, case.settings.get("lora.alpha", 12))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * case.layers + case.tables
    before = {name: p.detach().clone() for name, p in trained.items()}

    accumulated = int(case.settings.get("training.gradient_accumulation_steps", 1))
    z_loss = float(case.settings.get("training.z_loss", 0.0))
    groups = [{"params": list(trained.values()), "weight_decay": 0.1}]
    if case.settings.get("optimizer.name") == "SGD":
        optimizer = torch.optim.SGD(groups, lr=LR)
    else:
        optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    steps = by_hand.steps_of(folder / "shards", STEPS, SEQ_LEN, accumulated)
    wanted = by_hand.train(model, optimizer, steps, [LR] * STEPS, 0.0, z_loss)

    train(folder, output, case.model, case.settings)
    for line, by_peft in zip(lines_of(folder / output), wanted, strict=True):
        assert line["loss"] == pytest.approx(by_peft.loss, rel=case.rel), line["step"]
        assert line["grad_norm"] == pytest.approx(by_peft.grad_norm, rel=case.rel), line["step"]
    expected = peft.get_peft_model_state_dict(model)
    found = load_file(folder / output / f"huggingface/step-{STEPS}/adapter_model.safetensors")
    assert_close(found, expected, case.rel)
    assert all(not torch.equal(trained[name], before[name]) for name in trained)


@pytest.fixture(scope="module")
def trained(folder) -> Trainer:
    """A run of native Llama, whose adapters have come far from zero."""
    return train(folder, "trained", "Llama", {"optimizer.lr": 0.1})


def test_resuming_is_exact(folder):
    """With dropout, whose numbers come from the step alone, and rows of three tokens."""
    drops = {"lora.dropout": 0.3, "checkpoint.interval": 1, "lr_scheduler.total_steps": STEPS}
    drops["lora.trainable_tokens"] = "a,h,c"
    whole = train(folder, "whole", "Qwen3", drops)
    train(folder, "resumed", "Qwen3", drops | {"training.steps": 2})
    torch.rand(7)
    resumed = train(folder, "resumed", "Qwen3", drops)
    for line, wanted in zip(lines_of(folder / "resumed"), lines_of(folder / "whole"), strict=True):
        assert (line["loss"], line["grad_norm"]) == (wanted["loss"], wanted["grad_norm"])
    for found, wanted in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(found.full_tensor(), wanted.full_tensor())
    # A recomputation drops what the forward has dropped.
    train(folder, "kept-drops", "Qwen3", drops | {"activation_checkpoint.mode": "none"})
    assert_alike(folder, "kept-drops", "whole")
    train(folder, "undropped", "Qwen3", drops | {"lora.dropout": 0.0})
    losses = [line["loss"] for line in lines_of(folder / "undropped")]
    assert losses[1:] != [line["loss"] for line in lines_of(folder / "whole")][1:]


def test_checkpoints_hold_adapters_alone(folder, trained):
    saved = read_metadata(folder / f"trained/checkpoint/step-{STEPS}").state_dict_metadata
    tensors = [name for name, item in saved.items() if hasattr(item, "size")]
    of_model = [name for name in tensors if name.startswith("layers.")]
    assert len(of_model) == 2 * 14 and all(is_adapter(name) for name in of_model)
    of_optimizer = [name for name in tensors if name.startswith("optimizer.state.")]
    assert len(of_optimizer) == 3 * 2 * 14


def test_another_base_is_refused(folder, trained, capsys):
    shutil.copytree(folder / "trained", folder / "moved")
    shutil.copytree(folder / "Llama", folder / "another")
    change_tensors(folder / "another", lambda tensors: tensors["model.norm.weight"].add_(1))
    steps = {"training.steps": STEPS + 1}
    with pytest.raises(ConfigError, match="trained on other weights .*write model.initial_hf = "):
        train(folder, "moved", "another", steps)
    # The same weights under another name are the same.
    shutil.copytree(folder / "Llama", folder / "same")
    train(folder, "moved", "same", steps | {"checkpoint.last_save_in_hf": False})
    assert lines_of(folder / "moved")[-1]["step"] == STEPS + 1

    weights = folder / "Llama/model.safetensors"
    kept = weights.read_bytes()
    shutil.copy(folder / "another/model.safetensors", weights)
    try:
        assert export_hf([str(folder / "trained"), str(folder / "wrong"), "--merge"]) == 2
    finally:
        weights.write_bytes(kept)
    assert "has other weights than those that the adapters" in capsys.readouterr().err
    assert not (folder / "wrong").exists()


def test_an_export_is_that_of_the_run_with_the_chat_template_of_the_base(folder, trained):
    (folder / "Llama/chat_template.jinja").write_text(CHATML)
    assert export_hf([str(folder / "trained"), str(folder / "adapter")]) == 0
    assert (folder / "adapter/chat_template.jinja").read_text() == CHATML
    assert not (folder / "adapter/model.safetensors").exists()
    of_run = folder / f"trained/huggingface/step-{STEPS}"
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (folder / "adapter" / name).read_bytes() == (of_run / name).read_bytes()
    model = peft.PeftModel.from_pretrained(read_model(folder / "Llama"), of_run)
    assert model.peft_config["default"].base_model_name_or_path == str(folder / "Llama")


ROWS = {"lora.trainable_tokens": "a,h,c"}


@pytest.mark.parametrize(
    "model, settings, moved",
    [("Llama", {}, 14), ("qwen3_moe", {}, 12), ("Llama", ROWS, 16), ("Qwen3", ROWS, 16)],
)
def test_merged_weights_are_what_peft_merges(folder, trained, model, settings, moved):
    output = "trained"
    if model != "Llama" or settings:
        output = f"merged-{model}-{len(settings)}"
        train(folder, output, model, {"optimizer.lr": 0.1} | settings)
    out = folder / f"{output}-merged"
    # In the dtype of the run, and without PEFT.
    with patch.dict(sys.modules, peft=None):
        assert export_hf([str(folder / output), str(out), "--merge"]) == 0
    assert {x.dtype for x in load_file(out / "model.safetensors").values()} == {torch.float32}
    found, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not any(report.values()), report
    adapter = folder / output / f"huggingface/step-{STEPS}"
    base = read_model(folder / model)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    expected = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    assert_close(found.state_dict(), expected, 1e-6)
    changed = [name for name, tensor in expected.items() if not torch.equal(tensor, before[name])]
    assert len(changed) == moved


def test_half_precision_is_merged_in_full(folder):
    """The weights of a bfloat16 run are rounded once, after the sum. The metadata of the checkpoint
    is read for checking it, and once more for reading it."""
    settings = {"optimizer.lr": 0.1, "training.dtype": "bfloat16"}
    train(folder, "half-merged", "Llama", settings)
    check = reader._check_metadata
    with patch.object(reader, "_check_metadata", side_effect=check) as checked:
        assert export_hf([str(folder / "half-merged"), str(folder / "half-out"), "--merge"]) == 0
    assert checked.call_count == 2
    adapter = folder / f"half-merged/huggingface/step-{STEPS}"
    model = peft.PeftModel.from_pretrained(read_model(folder / "Llama"), adapter)
    expected = model.merge_and_unload().state_dict()
    found = load_file(folder / "half-out/model.safetensors")
    rounded = {name: tensor.bfloat16() for name, tensor in expected.items()}
    assert found.keys() == rounded.keys()
    same = sum((found[name] == x).sum().item() for name, x in rounded.items())
    assert same >= 0.999 * sum(x.numel() for x in rounded.values())


def test_validation_drops_nothing(folder):
    """The loss is that of PEFT's model without dropout, and afterwards training drops as before."""
    held_out = b"the cab had a bad bed, he added"
    (folder / "held_out.txt").write_bytes(held_out)
    settings = {
        "optimizer.lr": 0.1,
        "lora.dropout": 0.6,
        "validation.enable": True,
        "validation.every": 2,
        "validation.source": folder / "held_out.txt",
    }
    train(folder, "validated", "Qwen3", settings)
    train(folder, "unvalidated", "Qwen3", {"optimizer.lr": 0.1, "lora.dropout": 0.6})
    last = [lines_of(folder / name)[-1] for name in ("validated", "unvalidated")]
    assert last[0]["loss"] == last[1]["loss"]
    adapter = folder / f"validated/huggingface/step-{STEPS}"
    model = peft.PeftModel.from_pretrained(read_model(folder / "Qwen3"), adapter).eval()
    tokens = torch.tensor([*held_out, 256])
    with torch.no_grad():
        total = by_hand.loss_sum(model, by_hand.Piece(tokens[:-1], tokens[1:]), 0.0).item()
    line = read_lines(folder / "validated/validation.jsonl")[-1]
    assert line["loss"] == pytest.approx(total / len(held_out), rel=ALIKE)


def test_modules_that_did_not_drop_do_not_drop_afterwards():
    drops, off = torch.nn.Dropout(0.5), torch.nn.Dropout(0.5).eval()
    model = torch.nn.Sequential(drops, off)
    with pytest.raises(KeyError), without_dropout(model):
        assert not drops.training and not off.training
        raise KeyError
    assert drops.training and not off.training


def test_frozen_weights_stay_as_they_were_read(folder):
    """In bfloat16, without gradients and without states."""
    trainer = train(folder, "half-run", "Qwen3", {"training.dtype": "bfloat16"})
    base = read_model(folder / "Qwen3").state_dict()
    frozen = 0
    for name, parameter in trainer.model.named_parameters():
        if is_adapter(name):
            assert parameter.dtype == torch.float32 and parameter.requires_grad
            continue
        frozen += 1
        assert parameter.dtype == torch.bfloat16 and not parameter.requires_grad
        assert parameter.grad is None
        stored = base[f"model.{canonical_name(name)}"]
        assert torch.equal(parameter.to_local(), stored.bfloat16()), name
    assert frozen == len(base) - 1  # transformers has the tied head twice
    assert len(trainer.optimizer.state) == 2 * 14
    losses = [line["loss"] for line in lines_of(folder / "half-run")]
    assert losses[-1] < losses[0]


MESHES = {"cp": {"parallelism.cp": 2}, "shards": {"parallelism.dp_shard": 2}}


def _on_two_ranks(folder: Path) -> None:
    for output, mesh in MESHES.items():
        train(folder, output, "Qwen3", mesh | ROWS | {"training.steps": 2})
    draw_dropout(Config(lora=Lora(rank=2, dropout=0.1)), 7)
    torch.save(torch.rand(4), folder / f"dropped-{dist.get_rank()}")


def test_two_ranks_are_one(folder):
    """Two data-parallel ranks read what one reads in two micro-batches."""
    run_processes(2, _on_two_ranks, folder)
    # Each rank drops other inputs.
    first, second = (torch.load(folder / f"dropped-{rank}") for rank in range(2))
    assert not torch.equal(first, second)
    for accumulated in (1, 2):
        settings = ROWS | {"training.gradient_accumulation_steps": accumulated}
        settings["training.steps"] = 2
        train(folder, f"one-{accumulated}", "Qwen3", settings)
    for mesh, wanted in (("cp", "one-1"), ("shards", "one-2")):
        assert_alike(folder, mesh, wanted)
        files = [
            load_file(folder / output / "huggingface/step-2/adapter_model.safetensors")
            for output in (mesh, wanted)
        ]
        assert_close(*files)
