"""Context parallelism under stress on four GPUs (NCCL).

Late ranks and transfers, groups beside each other, memory, hangs. Training and hangs are tested
with two GPUs where there are no four.

Run by `make test-gpu`. For what attention does, four processes are started once, and each writes
what it found. They run on the CPU too, at toy size:
OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 -m tests.gpu.test_context_parallel FOLDER cpu
"""

import contextlib
import functools
import gc
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scripts.compare_runs import beyond, differences
from tests.attention.context_parallel.test_stress import layer_inputs, layers
from tests.distributed import torchrun
from tests.gpu.test_attention import errors, flash_errors, inputs
from tests.reference import gradients
from tests.training.test_restarts import run_until_it_ends
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.context_parallel.comm import Pending
from titan_sparse.attention.masks.ranges import Causal, Documents
from titan_sparse.attention.patterns import Dense, VerticalSlash
from titan_sparse.training.distributed import set_timeout

pytestmark = pytest.mark.gpu
RANKS = 4 if torch.cuda.device_count() >= 4 else 2
needs_four = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ROOT = Path(__file__).parents[2]
SCHEDULES = ("all_gather", "ring", "double_ring")
HANG_SECONDS = 120
LATE_SECONDS = 2
LONGEST_DELAY_SECONDS = 0.01


class Case(NamedTuple):
    """What is computed on a kind of device. The sequence, blocks * block_size, is cut for 1 to 4 ranks."""

    backend: str
    block_size: int
    blocks: int
    documents: list[int]
    pattern: VerticalSlash


CASES = {
    "cuda": Case(
        "triton",
        128,
        24,
        [1100, 9, 1500, 301],
        VerticalSlash(recall=0.8, sinks=4, max_verticals=400, dense_below=256),
    ),
    "cpu": Case(
        "eager",
        16,
        24,
        [140, 1, 190, 37],
        VerticalSlash(recall=0.8, sinks=3, max_verticals=60, dense_below=48),
    ),
}


def _torchrun(processes: int, *words: object) -> subprocess.Popen:
    return subprocess.Popen(
        torchrun(processes, *words),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _succeeds(process: subprocess.Popen) -> None:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("found")
    _succeeds(_torchrun(4, "-m", "tests.gpu.test_context_parallel", folder, "cuda"))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@needs_four
def test_late_ranks_and_transfers_do_not_change_a_bit(found):
    for rank in found:
        names = {f"{name} {kind}" for name in SCHEDULES for kind in ("repeated", "delayed")}
        assert set(rank["delays"]["differing"]) == names
        assert not any(rank["delays"]["differing"].values()), rank["delays"]
        assert (
            min(
                rank["delays"]["count"][kind] for kind in ("work", "wait", "transfer", "collective")
            )
            > 20
        ), rank["delays"]


@needs_four
def test_errors_do_not_grow_with_the_ranks(found):
    """1, 2 (two groups, on data of their own), 3 (without global rank 0) and 4 ranks; the rule of
    test_attention.py."""
    seen = set()
    for rank in found:
        for name, got in rank["errors"].items():
            ranks, pattern, _, seed = name.split()
            seen.add((ranks, seed))
            bounds = [2 * error for error in rank["flash"][seed]]
            alone = rank["errors"][f"1 {pattern} local {seed}"]
            assert all(error <= bound for error, bound in zip(got, bounds, strict=True)), (
                name,
                got,
                bounds,
            )
            assert all(error <= 1.1 * one for error, one in zip(got, alone, strict=True)), (
                name,
                got,
                alone,
            )
    assert seen == {("1", "0"), ("1", "1"), ("2", "0"), ("2", "1"), ("3", "0"), ("4", "0")}


@needs_four
def test_memory_does_not_grow(found):
    for rank in found:
        assert set(rank["memory"]) == set(SCHEDULES)
        for name, (after_5, after_50) in rank["memory"].items():
            assert 0 < after_5 == after_50, (name, after_5, after_50)


def _main(folder: str, device: str) -> None:
    case = CASES[device]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        timeout=timedelta(seconds=HANG_SECONDS),
    )
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("cp_inter", "cp_intra"))
    four = {name: ContextParallel(mesh, "striped", name, case.block_size) for name in SCHEDULES}
    results = {
        **_errors(case, device, four),
        "memory": {name: _memory(case, device, cp) for name, cp in four.items()},
        "delays": _delays(case, device, four),
    }
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def _errors(case: Case, device: str, four: dict[str, ContextParallel]) -> dict:
    """By "ranks pattern schedule seed": errors of out, dq, dk, dv; and by seed those of dense flash attention."""
    rank, mask = dist.get_rank(), Documents(case.documents)
    two = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "cp"))
    group = two.get_local_rank("dp")
    contexts = [
        (1, 0, ContextParallel(None, "contiguous", "local", case.block_size)),
        *((4, 0, cp) for cp in four.values()),
    ]
    contexts += [
        (2, group, ContextParallel(two["cp"], "striped", name, case.block_size))
        for name in SCHEDULES[:2]
    ]
    contexts += [(1, group, contexts[0][2])] if group else []
    # Last: torch names a group by how many its process knows, and from here on rank 0 knows fewer.
    three = DeviceMesh(device, [1, 2, 3], mesh_dim_names=("cp",))
    if rank > 0:
        contexts += [
            (3, 0, ContextParallel(three, "zigzag", name, case.block_size))
            for name in SCHEDULES[:2]
        ]
    set_timeout(HANG_SECONDS)
    data = {seed: inputs(case.block_size * case.blocks, device, seed) for seed in {0, group}}
    by_case = {
        f"{ranks} {pattern.name} {cp.schedule} {seed}": errors(
            cp, mask, pattern, *data[seed], case.backend
        )
        for ranks, seed, cp in contexts
        for pattern in (Dense(), case.pattern)
    }
    return {"errors": by_case, "flash": {seed: flash_errors(mask, *x) for seed, x in data.items()}}


def _memory(case: Case, device: str, cp: ContextParallel) -> list[int]:
    """Bytes after 5 and after 50 calls, forward and backward, without garbage collection, as in training."""
    *qkv, d_out = (cp.shard(x, 2) for x in inputs(case.block_size * case.blocks, device))
    gc.collect()
    gc.disable()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found = []
    for call in range(1, 51):
        gradients(
            lambda *x: attend(*x, Documents(case.documents), case.pattern, cp, case.backend),
            d_out,
            *qkv,
        )
        found += [_bytes(device)] if call in (5, 50) else []
    gc.enable()
    return found


def _bytes(device: str) -> int:
    """The peak on a GPU; on the CPU, which does not know it, what is held."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return sum(x.nbytes for x in gc.get_objects() if issubclass(type(x), torch.Tensor))


def _delays(case: Case, device: str, four: dict[str, ContextParallel]) -> dict:
    """Which results of three layers (out, dq, dk, dv, ...) differ when they are computed again.

    And again with delays.
    """
    made = [
        x.to(device, torch.bfloat16) for x in layer_inputs(8, case.block_size * case.blocks, 64)
    ]

    def compute(cp: ContextParallel) -> list[torch.Tensor]:
        return layers(cp, Causal(), case.pattern, made, case.backend, case.block_size)

    wanted = {name: compute(cp) for name, cp in four.items()}
    differing = {}

    def compare(kind: str, name: str) -> None:
        pairs = zip(compute(four[name]), wanted[name], strict=True)
        differing[f"{name} {kind}"] = [
            number for number, (x, y) in enumerate(pairs) if not torch.equal(x, y)
        ]

    for name in four:
        compare("repeated", name)
    count = _inject_delays(case, device)
    for number, name in enumerate(four):
        time.sleep(LATE_SECONDS if dist.get_rank() == number else 0)
        compare("delayed", name)
    return {"differing": differing, "count": count}


def _inject_delays(case: Case, device: str) -> Counter:
    """Delay this process from here on, by a different time at every call: the host, the compute
    stream before work, waits and collectives, and transfers alone. Returns the number of delays by
    kind.
    """
    delays, count = random.Random(dist.get_rank()), Counter()
    beside = torch.cuda.Stream() if device == "cuda" else None

    def delayed(kind, function):
        @functools.wraps(function)
        def late(*args, **kwargs):
            count[kind] += 1
            host, stream = (
                max(0.0, delays.uniform(-LONGEST_DELAY_SECONDS, LONGEST_DELAY_SECONDS))
                for _ in range(2)
            )
            time.sleep(host)
            with _started_on(beside if kind == "transfer" else None):
                torch.cuda._sleep(int(stream * 1e9)) if device == "cuda" else time.sleep(stream)
                return function(*args, **kwargs)

        return late

    transfers = ("shift", "start_all_gather", "start_reduce_scatter", "start_all_reduce")
    for kind, owner, names in (
        ("work", BACKENDS[case.backend], ("forward", "backward")),
        ("wait", Pending, ("wait",)),
        ("transfer", ContextParallel, transfers),
        ("collective", ContextParallel, ("all_reduce", "all_gather", "all_to_all")),
    ):
        for name in names:
            setattr(owner, name, delayed(kind, getattr(owner, name)))
    return count


@contextlib.contextmanager
def _started_on(stream: "torch.cuda.Stream | None"):
    """Work started inside waits for all earlier work, and later work does not wait for it."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


SHORT = {
    "config": ROOT / "train_configs/demo_gpu.toml",
    "training.seq_len": 8192,
    "metrics.log_every": 1,
    "metrics.recall_every": 0,
    "metrics.tensorboard": "false",
    "compile.enable": "false",
    "lr_scheduler.warmup_steps": 5,
    "optimizer.lr": 1e-5,
}  # with larger steps rounding grows from step to step


def _trains(folder: Path, ranks: int, options: dict) -> subprocess.Popen:
    options = options | {
        "parallelism.cp": ranks,
        "training.steps": 5,
        "training.output_dir": folder / str(ranks),
    }
    return _torchrun(
        ranks, "train.py", *(word for key, value in options.items() for word in (f"--{key}", value))
    )


def _check_training(folder: Path, options: dict, double_ring: dict) -> None:
    """One rank and several: the same losses and gradient norms but for bf16's rounding."""
    for process in [_trains(folder, 1, options), _trains(folder, RANKS, options | double_ring)]:
        _succeeds(process)
    for field, share in (("tokens_seen", 0), ("loss", 5e-3), ("grad_norm", 5e-2)):
        found = differences(folder / "1", folder / str(RANKS), field)
        assert len(found) == 5 and not beyond(found, math.inf, share), (field, found)


@needs_two
def test_training_on_several_is_training_on_one(tmp_path):
    _check_training(
        tmp_path, SHORT, {"attention.schedule": "double_ring", "parallelism.cp_intra": RANKS // 2}
    )


TIMEOUT_SECONDS = 8
HANGS = SHORT | {"parallelism.cp": RANKS, "parallelism.timeout_seconds": TIMEOUT_SECONDS}


@needs_two
def test_a_rank_that_dies_is_named(tmp_path):
    output, seconds = run_until_it_ends(tmp_path, RANKS, 1, "time.sleep(1); os._exit(1)", HANGS)
    assert re.search(
        r"rank 1 \(host \S+, process \d+\) has given no sign of life, last seen in step 3, at ",
        output,
    ), output
    assert not re.search(r"rank [023] .* has given no sign of life", output), output
    assert seconds < TIMEOUT_SECONDS + 30


@needs_two
def test_a_rank_that_hangs_is_named_before_the_timeout(tmp_path):
    output, seconds = run_until_it_ends(tmp_path, RANKS, 1, "time.sleep(1e6)", HANGS)
    named = r"rank 1 \(host \S+, process \d+\) holds up the others in step 3, at <string>:1 in <module>; rank"
    assert re.search(
        rf"nothing has moved for \d+ s, collectives fail after {TIMEOUT_SECONDS} s: {named}", output
    ), output
    assert not re.search(r"rank [023] \(host .* holds up", output), output
    assert seconds < TIMEOUT_SECONDS + 30


if __name__ == "__main__":
    _main(*sys.argv[1:])
