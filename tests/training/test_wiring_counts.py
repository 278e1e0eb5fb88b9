"""How often a run does what its configuration says, counted by hand: lines, checkpoints, validations,
chunks, recomputed products. A key that is dropped changes a number here."""

import gc
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import titan_sparse.loss
import titan_sparse.trainer
from tests.training import reference_loop as by_hand
from tests.training.wired_run import SEQ_LEN, lines_of, read_model, run, write_model, write_shard
from titan_sparse.trainer import Trainer

pytest.importorskip("transformers")

LAYERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A shard, another for validation, and a small Qwen2."""
    folder = tmp_path_factory.mktemp("counts")
    write_shard(folder)
    write_shard(folder / "other", seed=1)
    write_model(folder, "Qwen2")
    return folder


def _run(folder: Path, output: str, **settings) -> Trainer:
    """A short run. settings: keys, with __ for the dot."""
    short = {
        "model.initial_hf": folder / "Qwen2",
        "training.steps": 2,
        "lr_scheduler.warmup_steps": 0,
        "checkpoint.enable": False,
        "checkpoint.last_save_in_hf": False,
    }
    overrides = {key.replace("__", "."): value for key, value in settings.items()}
    return run(folder, output, short | overrides)


def test_every_key_does_what_it_says(folder, monkeypatch):
    """Seven steps with what can be counted from outside."""
    recorded, collected, rows, lengths = [], [], [], []

    def counted(module, name: str, note) -> None:
        function = getattr(module, name)

        def call(*args, **kwargs):
            note(*args, **kwargs)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counted(titan_sparse.trainer, "recording", lambda rows, cells: recorded.append((rows, cells)))
    counted(gc, "collect", lambda generation=2: collected.append(generation))
    counted(titan_sparse.loss, "_cross_entropy", lambda logits, *_: rows.append(len(logits)))
    counted(nn.functional, "silu", lambda x, *_, **__: lengths.append(x.shape[-2]))
    trainer = _run(
        folder,
        "all",
        training__steps=7,
        training__gc_interval=2,
        training__deterministic=True,
        training__loss_chunk_tokens=40,
        training__mlp_chunk_tokens=24,
        parallelism__reshard_after_forward=False,
        activation_checkpoint__attention_recompute=0.25,
        checkpoint__enable=True,
        checkpoint__interval=2,
        checkpoint__keep_latest_k=2,
        metrics__log_every=3,
        metrics__recall_every=2,
        metrics__recall_rows=9,
        metrics__peak_tflops=2.0,
        profiling__enable=True,
        profiling__first_step=3,
        profiling__steps=3,
        profiling__with_stack=True,
    )
    # The first line, every third, the last. Recall in those of the first and each second step.
    lines = lines_of(folder / "all")
    assert [line["step"] for line in lines] == [1, 3, 6, 7]
    assert [line["tokens_seen"] for line in lines] == [SEQ_LEN * step for step in (1, 3, 6, 7)]
    assert recorded == [(9, 0), (0, 0), (9, 0), (0, 0)]
    assert [line["step"] for line in lines if "recall" in line] == [1, 6]
    # Dense attention computes all that the mask allows: both speeds are of the same FLOPs.
    speeds = [line["dense_equivalent_tflops"] / 2 for line in lines]
    assert [line["mfu"] for line in lines] == pytest.approx(speeds)
    assert not (folder / "all/tensorboard").exists()
    # Every second step and the last one are saved, and the last two of these are kept.
    assert {path.name for path in (folder / "all/checkpoint").glob("step*")} == {"step-6", "step-7"}
    assert collected.count(1) == 3  # after steps 2, 4 and 6
    assert torch.are_deterministic_algorithms_enabled()

    # Of 64 tokens.
    assert rows == [40, 24] * 7
    assert set(lengths) == {24, 16} and lengths[:3] == [24, 24, 16]
    for block in trainer.model.layers.values():
        assert block.self_attn.attend.keywords["recomputed"] == 0.25
        group = block._get_fsdp_state()._fsdp_param_group
        assert group._reshard_after_forward is False

    # The third step to the fifth. The profiler counts from 0.
    events = json.loads((folder / "all/profile/rank0.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event["name"].startswith("ProfilerStep")}
    assert names == {"ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"}
    assert any("trainer.py" in event["name"] for event in events)  # with_stack


def test_validation_is_the_loss_of_transformers(folder):
    """After every third step and the last: of the documents' first windows, one by one."""
    _run(
        folder,
        "validated",
        training__steps=4,
        training__z_loss=0.1,
        checkpoint__enable=True,
        checkpoint__interval=2,
        checkpoint__keep_latest_k=0,
        checkpoint__last_save_in_hf=True,
        optimizer__lr=0.01,
        validation__enable=True,
        validation__source=folder / "other/shards",
        validation__every=3,
        validation__windows=5,
        validation__position_buckets=4,
    )
    text = (folder / "validated/validation.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == [3, 4]
    saved = {path.name for path in (folder / "validated/checkpoint").glob("step*")}
    assert saved == {"step-2", "step-4"}

    model = read_model(folder / "validated/huggingface/step-4")
    windows = []
    for document in by_hand.read_documents(folder / "other/shards"):
        # A window scores the token after its last, so the next begins with that.
        for start in range(0, len(document) - 1, SEQ_LEN):
            part = torch.from_numpy(document[start : start + SEQ_LEN + 1])
            windows.append((part[:SEQ_LEN], part[1:]))
    totals, counts = torch.zeros(4), torch.zeros(4)
    with torch.no_grad():
        for tokens, labels in windows[:5]:
            logits = model(input_ids=tokens[None]).logits[0, : len(labels)]
            losses = nn.functional.cross_entropy(logits, labels, reduction="none")
            bucket = torch.arange(len(labels)) // (SEQ_LEN // 4)
            totals.index_add_(0, bucket, losses)
            counts.index_add_(0, bucket, torch.ones(len(labels)))
    assert lines[-1]["tokens"] == counts.sum()
    assert lines[-1]["loss"] == pytest.approx((totals.sum() / counts.sum()).item(), rel=1e-5)
    buckets = lines[-1]["buckets"]
    assert [bucket["tokens"] for bucket in buckets] == counts.tolist()
    assert [bucket["loss"] for bucket in buckets] == pytest.approx(
        (totals / counts).tolist(), rel=1e-5
    )
    assert lines[0]["loss"] != lines[1]["loss"]


class _Products(TorchDispatchMode):
    """Counts matrix products, with and without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_what_is_computed_again(folder):
    """Of a block's seven products the backward recomputes all but the last, half of these, or none."""
    products = {}
    for mode in ("none", "selective", "full"):
        with _Products() as counted:
            _run(folder, mode, training__steps=1, activation_checkpoint__mode=mode)
        products[mode] = counted.count
    # The last product, of down_proj, is nothing that a gradient needs.
    assert products["none"] == LAYERS * 7 * 3
    assert products["full"] - products["none"] == LAYERS * 6
    assert products["selective"] - products["none"] == LAYERS * 3
