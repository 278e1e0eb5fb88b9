"""When steps become CUDA graphs, and what a graph depends on.
tests/gpu/test_step_graphs.py runs them."""

import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.runs import TINY, tiny_config, train, write_texts
from titan_sparse.attention.context_parallel.group import one_rank
from titan_sparse.attention.masks.ranges import Causal, Documents
from titan_sparse.training.step_graphs import (
    Computed,
    MicroBatch,
    StepGraphs,
    _waits_for_the_gpu,
    explain,
    flattened,
)
from titan_sparse.training.trainer import Trainer

S = 1024
RING = {
    "parallelism__cp": 2,
    "attention__mask": "causal_across_documents",
    "training__seq_len": 320,
}
"""Whole sequences, all of which see the same."""


@pytest.mark.parametrize(
    "settings, schedule, said",
    [
        ({"optimizer__offload": True}, "local", "optimizer.offload = true"),
        ({"activation_checkpoint__offload": True}, "local", "activation_checkpoint.offload = true"),
        ({"lora__rank": 4, "lora__dropout": 0.1}, "local", "lora.dropout"),
        ({"parallelism__cp": 2}, "group_cast", 'attention.schedule = "group_cast"'),
        ({"parallelism__cp": 2}, "ring", 'attention.schedule = "ring" plans each batch of docu'),
        (
            {"parallelism__cp": 2, "parallelism__cp_intra": 1},
            "ulysses",
            'attention.schedule = "ulysses" plans each batch of documents',
        ),
        (RING | {"attention__layout": "zigzag"}, "ring", 'attention.route_by = "auto"'),
        ({"parallelism__cp": 2, "attention__layout": "balanced"}, "local", '"balanced"'),
        ({"attention__window_sinks": 4}, "local", "attention.window_sinks"),
        ({"attention__backend": "eager"}, "local", 'attention.backend = "eager"'),
        (RING | {"attention__sliding_window": 40}, "ring", "attention.sliding_window"),
        (RING | {"training__seq_len": 300}, "ring", "training.seq_len is no multiple of 32"),
        (RING | {"data__sequences": "fixed_and_rest"}, "double_ring", "data gives shorter"),
        (RING | {"data__format": "messages"}, "ring", "data gives shorter sequences"),
    ],
)
def test_what_cannot_be_captured(tmp_path, settings, schedule, said):
    """auto says why, and "on" refuses by the same name. Without the key both take graphs."""
    config = tiny_config(tmp_path, "run", attention__schedule=schedule, **settings)
    has_graphs, line = explain(config, TINY, "cuda", 2)
    assert not has_graphs and said in line
    config.compile.cuda_graphs = "on"
    with pytest.raises(ValueError, match='is impossible: .*; write "auto"') as refused:
        explain(config, TINY, "cuda", 2)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "settings, schedules",
    [
        ({"parallelism__cp": 2}, ("auto", "all_gather", "ulysses")),
        # Whole sequences are planned once.
        (RING, ("auto", "all_gather", "ulysses", "ring", "double_ring")),
        # One rank has nothing to plan.
        ({}, ("auto", "all_gather", "ulysses", "ring", "group_cast")),
    ],
)
def test_what_can_be_captured(tmp_path, settings, schedules):
    config = tiny_config(tmp_path, "run", compile__cuda_graphs="on", **settings)
    for config.attention.schedule in schedules:
        assert explain(config, TINY, "cuda", 2)[0]


def test_where_auto_takes_them(tmp_path):
    config = tiny_config(tmp_path, "run", training__seq_len=131072)
    assert explain(config, TINY, "cpu")[1].endswith("since graphs need a GPU, not a CPU")
    has_graphs, line = explain(config, TINY, "cuda", 2)
    assert not has_graphs and "131,072 tokens a GPU" in line
    # Half of them, over two ranks.
    config.parallelism.cp = 2
    assert explain(config, TINY, "cuda", 2)[0]
    config.compile.cuda_graphs = "off"
    assert 'compile.cuda_graphs = "off"' in explain(config, TINY, "cuda", 2)[1]


def _batch(mask) -> MicroBatch:
    # [1, S]
    tokens = torch.zeros(1, S, dtype=torch.int64)
    ranges = mask.rows(S)._replace(probe_seed=torch.tensor(1))
    return MicroBatch(tokens, tokens, tokens, ranges, torch.tensor(1.0))


def test_documents_share_a_graph():
    """Their number and lengths are tensors of the same size. A mask without
    padding is another kind."""
    shapes = [
        flattened(_batch(mask))[1]
        for mask in (
            Documents([[100, 20, 904]]),
            Documents([[1] * 60]),
            Documents([[1024]]),
            Causal(valid=(S,)),
            Causal(valid=(S - 1,)),
        )
    ]
    assert shapes[0] == shapes[1] == shapes[2]
    assert len({*shapes}) == 3
    tensors, _ = flattened(_batch(Documents([[5]])))
    # Tokens, positions, labels, four of the mask with its offsets, the seed,
    # and the labels' number.
    assert len(tensors) == 9


class _Operations(TorchDispatchMode):
    """Notes each operation of torch, with its numbers and with the shapes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # The profiler names ranges, and collectives their process groups.
        if func.namespace not in ("profiler", "c10d"):
            leaves = tree_leaves((args, kwargs))
            self.seen.append((func, *(x.shape if isinstance(x, Tensor) else x for x in leaves)))
        return func(*args, **kwargs)


def test_only_tensors_change_from_step_to_step(tmp_path, monkeypatch):
    """A replay would go on with all other numbers: those of the step that was captured."""
    steps = defaultdict(list)
    forward_backward = Trainer._forward_backward

    def noted(self: Trainer, batch: MicroBatch, records: tuple[int, int] | None) -> Computed:
        with _Operations() as operations:
            computed = forward_backward(self, batch, records)
        # The first step makes the gradients.
        if self.progress.step > 0:
            steps[flattened(batch)[1]].append((batch, operations.seen))
        return computed

    monkeypatch.setattr(Trainer, "_forward_backward", noted)
    write_texts(tmp_path / "texts")
    settings = {"metrics__log_every": 10, "training__steps": 7, "training__z_loss": 1e-3}
    train(tiny_config(tmp_path, "run", **settings))
    # Those that are not recorded.
    [batches] = steps.values()
    batches = batches[:-1]
    assert len({batch.valid.item() for batch, _ in batches}) > 1
    for _, seen in batches[1:]:
        assert seen == batches[0][1] and len(seen) > 100


def test_a_step_without_a_graph_adds_to_no_gradient_of_a_graph():
    """Gradients of graphs keep their memory, also after the run has given graphs up."""
    model = torch.nn.Linear(2, 1, bias=False)
    graphs = StepGraphs(model, one_rank(64), "off")

    def compute(batch: MicroBatch, records: None) -> Computed:
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return Computed(loss.detach(), [], None)

    batch = _batch(Causal(valid=(S,)))
    graphs(compute, batch, None, adds=False)
    graphs.clear_gradients()
    assert model.weight.grad is None
    graphs.graphs["of another shape"] = None
    for adds, wanted in ((False, 1), (True, 2), (False, 1)):
        graphs(compute, batch, None, adds)
        graphs.clear_gradients()
        assert model.weight.grad.tolist() == [[wanted, wanted]]


def test_a_run_leaves_no_graph(tmp_path, monkeypatch):
    """NCCL cannot end a process group whose collectives a graph holds."""
    calls, load = [], Trainer._load
    graph = SimpleNamespace(reset=lambda: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("waited"))

    def planted(self: Trainer) -> None:
        load(self)
        self.graphs.graphs["of another shape"] = SimpleNamespace(graph=graph)

    monkeypatch.setattr(Trainer, "_load", planted)
    write_texts(tmp_path / "texts")
    trainer = train(tiny_config(tmp_path, "run", training__steps=1))
    assert calls == ["waited", "reset"] and not trainer.graphs.graphs


def test_a_gpu_that_has_failed_does_not_end_the_watch():
    def failing() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    graphs = StepGraphs(torch.nn.Linear(2, 1), one_rank(64), "off")
    assert not graphs.is_running()
    for query, wanted in ((lambda: False, True), (lambda: True, False), (failing, False)):
        graphs.replayed = SimpleNamespace(query=query)
        assert graphs.is_running() == wanted


def test_other_warnings_pass_while_waits_are_collected(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with pytest.warns(UserWarning) as seen, _waits_for_the_gpu() as waits:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert modes == ["warn", 0]
    assert len(waits) == 2 and all(__file__ in place for place in waits)
    assert [str(warning.message) for warning in seen] == ["something else"]
