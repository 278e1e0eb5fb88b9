"""The layout "balanced" over processes: its tables in use, refusals, costs, and training against one.

tests/attention/test_sinks_processes.py compares attention in it, as in all layouts.
"""

import functools
import json
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.attention.dense_twin import let_eager_serve_dense
from tests.distributed import run_processes
from tests.fake_step import fake_world
from tests.reference import gradients, structured_qkv
from tests.runs import metrics_of, tiny_config, train, write_texts
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.context_parallel.balanced import Costs
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.patterns import Dense, Pattern, VerticalSlash
from titan_sparse.commands.plan import DEFAULT_CONSTANTS
from titan_sparse.trainer import Trainer

eager = BACKENDS["eager"]

BLOCK, SEQ_LEN = 16, 192
DOCUMENTS = Documents([[100, 7, 1, 60], [20, 90, 30, 52]])
PATTERN = VerticalSlash(recall=0.8, sinks=3, local_slashes=1, max_verticals=60, dense_below=32)


@functools.cache
def _inputs() -> list[Tensor]:
    qkv = structured_qkv(2, 4, 2, SEQ_LEN, 8, seed=3)
    return [
        *qkv,
        torch.randn(qkv[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4)),
    ]


def _single(mask: Mask, pattern: Pattern) -> list[Tensor]:
    """out, dq, dk and dv of one process."""
    *qkv, d_out = _inputs()
    out, grads = gradients(lambda *x: attend(*x, mask, pattern, block_size=BLOCK), d_out, *qkv)
    return [out, *grads]


def test_refusals():
    """What needs a table, or has one that does not belong there."""
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        cp = ContextParallel(mesh, "balanced", "ring", BLOCK)
        striped = ContextParallel(mesh, "striped", "ring", BLOCK)
        ranges = DOCUMENTS.rows(SEQ_LEN)
        q, k, v, _ = (x[:, :, : SEQ_LEN // cp.size] for x in _inputs())
        balanced = cp.balance(ranges)
        wrong = balanced._replace(table=balanced.table[:, 1:])
        for call, words in (
            (lambda: attend(q, k, v, ranges, cp=cp), "cp.balance"),
            (lambda: attend(q, k, v, wrong, cp=cp), "cp.balance"),
            (lambda: cp.shard(q, 2), "cp.balance"),
            (lambda: attend(q, k, v, balanced, cp=striped), '"striped"'),
            (lambda: attend(q, k, v, balanced, cp=cp, recomputed=0.5), 'layout "striped"'),
        ):
            with pytest.raises(ValueError, match=words):
                call()
        assert striped.balance(ranges) is ranges and not striped.depends_on_mask


def _check_two_ranks() -> None:
    """Batches run forward, then backward in the other order. Nothing is compiled anew for another
    table."""
    cp = ContextParallel(
        init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), "balanced", "ring", BLOCK
    )
    first, second = Documents([10, 170, 12]), Documents([90, 90])
    tables, results = [], []
    layer = torch.compile(
        lambda q, k, v, ranges: attend(q, k, v, ranges, PATTERN, cp),
        fullgraph=True,
        backend="aot_eager",
    )
    masks = (first, second, Documents([30] * 6))
    for mask in masks:
        ranges = cp.balance(mask.rows(SEQ_LEN))
        *qkv, d_out = [cp.shard(x, 2, ranges.table) for x in _inputs()]
        leaves = [x.requires_grad_() for x in qkv]
        with torch._dynamo.config.patch(error_on_recompile=True):
            results.append((layer(*leaves, ranges), leaves, d_out))
        tables.append(ranges.table)
    assert not torch.equal(tables[0], tables[1])
    for mask, table, (out, leaves, d_out) in reversed(
        list(zip(masks, tables, results, strict=True))
    ):
        got = [cp.unshard(x, 2, table) for x in torch.autograd.grad(out, leaves, d_out)]
        for a, b in zip(got, _single(mask, PATTERN)[1:], strict=True):
            assert (a - b).abs().max() < 1e-9
    # Masks of other layers share a table. Without holes there are no rectangles in this layout,
    # whatever the backend serves.
    for mask, pattern in ((second & SlidingWindow(30), PATTERN), (Causal(), Dense())):
        ranges = mask.rows(SEQ_LEN)._replace(table=tables[0])
        with pytest.MonkeyPatch.context() as patch:
            let_eager_serve_dense(patch)
            local = [cp.shard(x, 2, tables[0]) for x in _inputs()[:3]]
            got = cp.unshard(attend(*local, ranges, pattern, cp), 2, tables[0])
        assert (got - _single(mask, pattern)[0]).abs().max() < 1e-9


def test_backward_has_the_table_of_its_forward():
    run_processes(2, _check_two_ranks)


def _check_costs() -> None:
    """Ranks report an error when their costs differ: here one of three has another file."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
    cp = ContextParallel(mesh, "balanced", costs=Costs(transfer=100_000))
    assert cp.bytes_sent == 0 and cp.costs.transfer == 100_000
    transfer = 280 + (dist.get_rank() == 1)
    with pytest.raises(ValueError, match=r"\[120, 280\], \[120, 281\], \[120, 280\]"):
        ContextParallel(mesh, "balanced", costs=Costs(transfer=transfer))


def test_ranks_deal_by_the_same_costs():
    run_processes(3, _check_costs)


RUNS = [
    {
        "attention__pattern": "vertical_slash",
        "training__local_batch_size": 2,
        "training__gradient_accumulation_steps": 2,
        "attention__schedule": "ring",
    },
    {
        "attention__pattern": "dense",
        "training__local_batch_size": 2,
        "attention__sliding_window": 40,
        "attention__window_sinks": 3,
        "activation_checkpoint__mode": "selective",
    },
]


def _run(
    folder: Path, output: str, overrides: dict
) -> tuple[list, dict[str, Tensor], list[Tensor]]:
    """Losses and gradient norms, weights, and the tables of all batches."""
    config = tiny_config(folder, output, training__steps=2, **overrides)
    tables, balance = [], ContextParallel.balance
    ContextParallel.balance = lambda cp, ranges: [
        balanced := balance(cp, ranges),
        tables.append(balanced.table),
    ][0]
    try:
        trainer = train(config)
    finally:
        ContextParallel.balance = balance
    dist.barrier()
    weights = {
        name: p.full_tensor() if isinstance(p, DTensor) else p
        for name, p in trainer.model.state_dict().items()
    }
    return [[line["loss"], line["grad_norm"]] for line in metrics_of(config)], weights, tables


def _train(folder: Path) -> None:
    size = dist.get_world_size()
    for number, case in enumerate(RUNS):
        layout = {
            "attention__layout": "balanced",
            "parallelism__cp": size,
            "parallelism__cp_intra": size,
        }
        losses, weights, tables = _run(folder, f"{size}_{number}", case | layout)
        if size == 1:
            torch.save((losses, weights), folder / f"{number}.pt")
            continue
        wanted = torch.load(folder / f"{number}.pt")
        say = functools.partial("{}: {}".format, case)
        torch.testing.assert_close(losses, wanted[0], rtol=1e-8, atol=1e-8, msg=say)
        torch.testing.assert_close(weights, wanted[1], rtol=1e-8, atol=1e-8, msg=say)
        assert len({str(table.tolist()) for table in tables}) > 1
    # What outlives the process groups may abort the process when Python ends.
    layout = {"attention__layout": "balanced", "parallelism__cp": size}
    if size > 1:
        layout["attention__balance_costs"] = str(folder / "constants.json")
    trainer = Trainer(tiny_config(folder, "held", **layout))
    # In fp64: 2 x 16 x 8 x 24 bytes in 6.144 us, beside tiles of 2 x 16 x 16 x 8 x 14 FLOP in 4.096.
    assert trainer.cp.costs == (Costs(300, 150) if size > 1 else Costs())
    held = weakref.ref(trainer)
    del trainer
    assert held() is None


def test_training_is_that_of_one_process(tmp_path):
    write_texts(tmp_path / "texts")
    constants = json.loads(DEFAULT_CONSTANTS.read_text())["constants"]
    for name, value in (("dense_tflops", 0.014), ("partial_tile", 3), ("inside_gb_s", 1)):
        constants[name] = {"value": value}
    (tmp_path / "constants.json").write_text(json.dumps({"constants": constants}))
    for size in (1, 2):
        run_processes(size, _train, tmp_path)
