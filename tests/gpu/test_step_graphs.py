"""Training with CUDA graphs is training without them, to the bit, on one GPU and on two."""

import dataclasses
import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import torchrun
from tests.runs import TINY, metrics_of, tiny_config, train, weights_of, write_texts
from titan_sparse.config.reading import Refusal
from titan_sparse.models import flavours
from titan_sparse.training import step_graphs
from titan_sparse.training.step_graphs import StepGraphs
from titan_sparse.training.trainer import Trainer

ROOT = Path(__file__).parents[2]
STEPS = 30
SETTINGS = {
    "model__flavour": "small",
    "training__device": "cuda",
    "training__dtype": "bfloat16",
    "training__deterministic": True,
    "training__steps": STEPS,
    "training__seq_len": 1000,
    "training__seed": 3,
    "attention__block_size": 64,
    "attention__backend": "triton",
    "attention__vertical_slash__recall": 0.6,
    "attention__vertical_slash__dense_below": 128,
    "optimizer__name": "AdamW",
    "optimizer__lr": 1e-2,
    "lr_scheduler__total_steps": STEPS,
    "metrics__log_every": 3,
    "metrics__recall_every": 6,
    "compile__cuda_graphs": "on",
}
CASES = {
    "packed": {},
    "whole": {"data__sequences": "fixed", "attention__mask": "causal", "data__source": "long"},
    "dense": {"attention__pattern": "dense"},
    "accumulated": {"training__gradient_accumulation_steps": 3},
    "compiled": {"compile__enable": True},
    "kept": {"activation_checkpoint__mode": "none"},
    "xattention": {"attention__pattern": "xattention", "attention__xattention__dense_below": 128},
    "moba": {
        "attention__pattern": "moba",
        "attention__moba__chunk_size": 64,
        "attention__moba__top_k": 2,
    },
}


def prepare(folder: Path) -> None:
    # The kernels take heads of 16 and more.
    flavours.FLAVOURS["small"] = replace(TINY, head_dim=16)
    if (folder / "texts").exists():
        return
    write_texts(folder / "texts", 300)
    (folder / "long").mkdir()
    texts = [path.read_text() for path in sorted((folder / "texts").iterdir())]
    for number in range(0, 300, 10):
        (folder / f"long/{number}.txt").write_text("".join(texts[number : number + 10]))


@pytest.fixture(autouse=True)
def _alone(tmp_path):
    prepare(tmp_path)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _lines(config) -> list[dict]:
    """What is logged, without times and memory."""
    measured = ("time", "seconds", "per_second", "tflops", "mfu", "memory", "communication", "imb")
    lines = []
    for line in metrics_of(config):
        lines.append({k: v for k, v in line.items() if not any(word in k for word in measured)})
    return lines


def both(folder: Path, name: str, **overrides) -> Trainer:
    """Train with graphs and without; all that is logged and all weights have to be equal."""
    if "data__source" in overrides:
        overrides["data__source"] = str(folder / overrides["data__source"])
    trainers, lines = [], []
    for setting in ("on", "off"):
        config = tiny_config(
            folder, f"{name}-{setting}", **SETTINGS | overrides | {"compile__cuda_graphs": setting}
        )
        trainers.append(train(config))
        lines.append(_lines(config))
    assert lines[0] == lines[1]
    weights = [weights_of(trainer) for trainer in trainers]
    for key, weight in weights[0].items():
        assert torch.equal(weight, weights[1][key]), key
    assert trainers[0].graphs.replayed and not trainers[1].graphs.replayed
    # NCCL cannot end a process group whose collectives a graph holds.
    assert not trainers[0].graphs.graphs
    return trainers[0]


@pytest.mark.parametrize("name", CASES)
def test_graphs_change_nothing(tmp_path, name):
    """Losses, gradient norms, density, recall, and weights of 30 steps."""
    trainer = both(tmp_path, name, **CASES[name])
    assert all(line["loss"] < 5 for line in metrics_of(trainer.config)[-3:])


def test_frozen_rows_would_be_seen(tmp_path, monkeypatch):
    """The bug of a graph that goes on with the rows that it was captured with."""
    replay = step_graphs._Graph.replay

    def frozen(self, inputs):
        # The last tensor of a mask.
        at = [x.dtype == torch.int64 and x.ndim == 0 for x in inputs].index(True)
        return replay(self, [*inputs[:at], self.inputs[at], *inputs[at + 1 :]])

    monkeypatch.setattr(step_graphs._Graph, "replay", frozen)
    with pytest.raises(AssertionError):
        both(tmp_path, "frozen")


def test_resumed_in_the_middle(tmp_path):
    keys = {"checkpoint__enable": True, "checkpoint__interval": 15}
    whole = tiny_config(tmp_path, "whole", **SETTINGS | keys)
    train(whole)
    halves = SETTINGS | keys | {"training__steps": 15}
    train(tiny_config(tmp_path, "halves", **halves))
    resumed = tiny_config(tmp_path, "halves", **SETTINGS | keys)
    train(resumed)
    by_step = {line["step"]: line for line in _lines(resumed)}
    for line in _lines(whole):
        for name in ("loss", "grad_norm"):
            assert by_step[line["step"]][name] == line[name], line["step"]


def test_a_skipped_update(tmp_path, monkeypatch):
    clip = Trainer._clip

    def poisoned(self: Trainer) -> torch.Tensor:
        if self.progress.step + 1 in (2, 9, 10):
            next(self.model.parameters()).grad.to_local()[0] = torch.nan
        return clip(self)

    monkeypatch.setattr(Trainer, "_clip", poisoned)
    trainer = both(tmp_path, "skipped")
    assert trainer.progress.skipped_updates == 3


def test_a_rare_shape_is_queued(tmp_path, monkeypatch):
    """Between replays, and adds to no gradient of theirs."""
    on_device, capture = Trainer._on_device, StepGraphs._capture
    captured = []

    def noted(self, compute, batch, *args):
        captured.append(batch.tokens.shape)
        return capture(self, compute, batch, *args)

    def cut(self, batch, *args):
        if self.progress.step + 1 in (8, 14):
            half = batch.tokens.shape[1] // 2
            tokens, labels, positions = (
                x[:, :half].clone() for x in (batch.tokens, batch.labels, batch.positions)
            )
            begins = list(itertools.accumulate(batch.lengths[0], initial=0))
            lengths = [min(stop, half) - start for start, stop in itertools.pairwise(begins)]
            lengths = [[length for length in lengths if length > 0]]
            batch = dataclasses.replace(
                batch, tokens=tokens, labels=labels, positions=positions, lengths=lengths
            )
        return on_device(self, batch, *args)

    monkeypatch.setattr(StepGraphs, "_capture", noted)
    monkeypatch.setattr(Trainer, "_on_device", cut)
    both(tmp_path, "rare")
    assert len(set(captured)) == 1


def test_a_wait_of_the_host_is_named(tmp_path, monkeypatch):
    """With "auto" the run goes on without graphs; "on" refuses."""
    forward_backward = Trainer._forward_backward

    def waiting(self, batch, records):
        batch.labels.sum().item()
        return forward_backward(self, batch, records)

    monkeypatch.setattr(Trainer, "_forward_backward", waiting)
    auto = tiny_config(tmp_path, "auto", **SETTINGS | {"compile__cuda_graphs": "auto"})
    trainer = train(auto)
    assert trainer.progress.step == STEPS and not trainer.graphs.replayed
    with pytest.raises(Refusal, match="waits for the GPU in .*test_step_graphs"):
        train(tiny_config(tmp_path, "on", **SETTINGS))


def test_what_cannot_be_captured_is_named(tmp_path, monkeypatch):
    """An error inside a capture says what it was."""
    forward_backward = Trainer._forward_backward

    def failing(self, batch, records):
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return forward_backward(self, batch, records)

    monkeypatch.setattr(Trainer, "_forward_backward", failing)
    with pytest.raises(Refusal, match='cannot be captured .* write compile.cuda_graphs = "off"'):
        train(tiny_config(tmp_path, "failing", **SETTINGS))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "name, cp", [("packed", 2), ("dense", 2), ("accumulated", 2), ("whole", 1), ("packed", 1)]
)
def test_two_gpus(tmp_path, name, cp):
    words = torchrun(2, "-m", "tests.gpu.test_step_graphs", tmp_path, name, cp)
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


if __name__ == "__main__":
    words = sys.argv[1:]
    prepare(Path(words[0]))
    both(Path(words[0]), "two", parallelism__cp=int(words[2]), **CASES[words[1]])
    # NCCL waits here for ever if a graph is left.
    dist.destroy_process_group()
