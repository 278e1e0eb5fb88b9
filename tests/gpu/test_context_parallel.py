"""Context parallelism on two or four GPUs (NCCL): errors, late ranks and transfers, memory, hangs.

For what attention does, the processes are started once, and each writes what it found.
"""

import contextlib
import functools
import gc
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scripts.compare_runs import differences
from tests.attention.context_parallel.test_stress import layer_inputs, layers
from tests.distributed import torchrun
from tests.faults.jobs import run_under_torchrun
from tests.faults.planted import Faults
from tests.gpu.errors import errors, exact, flash_errors, with_gradients
from tests.reference import gradients, structured_qkv
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.context_parallel.comm import Pending
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask
from titan_sparse.attention.patterns import Dense, Pattern, VerticalSlash
from titan_sparse.config.reading import as_words
from titan_sparse.training.faults.process_groups import set_timeout

RANKS = 4 if torch.cuda.device_count() >= 4 else 2
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ROOT = Path(__file__).parents[2]
SCHEDULES = ("all_gather", "ring", "double_ring", "ulysses")
HANG_SECONDS = 120
LATE_SECONDS = 2
LONGEST_DELAY_SECONDS = 0.01


BACKEND = "triton"
SIZE = 128
TOKENS = 24 * SIZE
"""Cut for 1 to 4 ranks."""
DOCUMENTS = Documents([1100, 9, 1500, 301])
SPARSE = VerticalSlash(recall=0.8, sinks=4, max_verticals=400, dense_below=256)


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
    _succeeds(_torchrun(RANKS, "-m", "tests.gpu.test_context_parallel", folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_late_ranks_and_transfers_do_not_change_a_bit(found):
    for rank in found:
        delays = rank["delays"]
        names = {f"{name} {kind}" for name in SCHEDULES for kind in ("repeated", "delayed")}
        assert set(delays["differing"]) == names
        assert not any(delays["differing"].values()), delays
        kinds = ("work", "wait", "transfer", "collective")
        assert min(delays["count"][kind] for kind in kinds) > 20, delays


def test_errors_do_not_grow_with_the_ranks(found):
    """Alone, over all ranks, and of four over two (two groups, on data of their own) and over three
    (without global rank 0): at most twice the errors of torch's dense flash attention in bf16."""
    seen = set()
    for rank in found:
        for name, got in rank["errors"].items():
            ranks, data, pattern, _ = name.split()
            seen.add((ranks, data))
            bounds = [2 * error for error in rank["flash"][data]]
            assert all(error <= bound for error, bound in zip(got, bounds)), (name, got, bounds)
            alone = rank["errors"].get(f"1 {data} {pattern} local")
            if alone:
                ratios = [error / one for error, one in zip(got, alone)]
                assert max(ratios) <= 1.1, (name, got, alone)
    expected = {("1", "0"), (str(RANKS), "0"), (str(RANKS), "cudnn")}
    if RANKS == 4:
        expected |= {("1", "1"), ("2", "0"), ("2", "1"), ("3", "0")}
    assert seen == expected


def test_autocast_changes_no_bit(found):
    for rank in found:
        assert rank["autocast"] == {name: [True] * 4 for name in SCHEDULES}


def test_memory_does_not_grow(found):
    for rank in found:
        assert set(rank["memory"]) == set(SCHEDULES)
        for name, ((held_5, peak_5), (held_50, peak_50)) in rank["memory"].items():
            assert 0 < held_5 == held_50, (name, held_5, held_50)
            # When a buffer of another stream is free again depends on when its kernels end.
            assert peak_50 <= 1.1 * peak_5, (name, peak_5, peak_50)


def _main(folder: str) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=HANG_SECONDS))
    mesh = init_device_mesh(
        "cuda", (dist.get_world_size() // 2, 2), mesh_dim_names=("cp_inter", "cp_intra")
    )
    contexts = {name: ContextParallel(mesh, "striped", name, SIZE) for name in SCHEDULES}
    results = {
        **_errors(mesh, contexts),
        "autocast": {name: _equal_in_autocast(cp) for name, cp in contexts.items()},
        "memory": {name: _memory(cp) for name, cp in contexts.items()},
        "delays": _delays(contexts),
    }
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def _inputs(tokens: int, seed: int = 0) -> list[Tensor]:
    q, k, v = structured_qkv(1, 8, 2, tokens, 64, seed, torch.bfloat16)
    d_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(seed + 1)).bfloat16()
    return [x.cuda() for x in (q, k, v, d_out)]


def _errors(mesh: DeviceMesh, contexts: dict[str, ContextParallel]) -> dict:
    """By "ranks data pattern schedule": errors of out, dq, dk, dv; and by data
    those of flash attention."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def over(mesh: DeviceMesh | None, layout: str, *schedules: str) -> list[ContextParallel]:
        return [ContextParallel(mesh, layout, name, SIZE) for name in schedules]

    # Ranks, name of the data, and context.
    [alone] = over(None, "contiguous", "local")
    runs = [(1, "0", alone)]
    runs += [(world, "0", cp) for cp in contexts.values()]
    runs += [(world, "0", cp) for cp in over(mesh, "striped", "group_cast")]
    runs += [(world, "0", cp) for cp in over(mesh, "balanced", "ring", "group_cast")]
    ways = over(mesh, "zigzag", "ring", "double_ring", "all_gather")
    ways += over(mesh, "contiguous", "ring") + over(mesh, "striped", "ring")
    runs += [(world, "cudnn", cp) for cp in ways]
    if world == 4:
        two = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "cp"))
        group = str(two.get_local_rank("dp"))
        runs += [(2, group, cp) for cp in over(two["cp"], "striped", "all_gather", "ring")]
        runs += [(1, group, alone)]
        # Last: torch names a group by how many its process knows, and from here
        # on rank 0 knows fewer.
        three = DeviceMesh("cuda", [1, 2, 3], mesh_dim_names=("cp",))
        if rank > 0:
            runs += [(3, "0", cp) for cp in over(three, "zigzag", "all_gather", "ring")]
    set_timeout(HANG_SECONDS)

    found = {}
    flash = {}
    for name in sorted({name for _, name, _ in runs}):
        of_cudnn = name == "cudnn"
        data = _inputs(2 * TOKENS) if of_cudnn else _inputs(TOKENS, int(name))
        flash[name] = flash_errors(data[:3], data[3])
        mask = Causal() if of_cudnn else DOCUMENTS
        patterns = [Dense()] if of_cudnn else [Dense(), SPARSE]
        for (ranks, _, cp), pattern in itertools.product(
            [run for run in runs if run[1] == name], patterns
        ):
            backend = "cudnn" if of_cudnn else BACKEND
            way = "local" if ranks == 1 else f"{cp.layout}/{cp.schedule}"
            label = f"{ranks} {name} {pattern.name} {way}"
            found[label] = _errors_of(cp, mask, pattern, data, backend)
    return {"errors": found, "flash": flash}


def _errors_of(
    cp: ContextParallel, mask: Mask, pattern: Pattern, tensors: list[Tensor], backend: str
) -> list[float]:
    """Relative errors of out, dq, dk, dv in bf16 against fp64 over the pairs that were selected."""
    *qkv, d_out = tensors
    ranges = cp.balance(mask.rows(d_out.shape[2], d_out.device))
    local = [cp.shard(x, 2, ranges.table) for x in qkv]
    _, aux = attend(*local, ranges, pattern, cp, backend, return_aux=True)
    want, _ = exact(qkv, d_out, aux.index.dense(mask))
    got = with_gradients(
        lambda *x: attend(*x, ranges, pattern, cp, backend),
        local,
        cp.shard(d_out, 2, ranges.table),
    )
    return errors([cp.unshard(x, 2, ranges.table) for x in got], want)


def _equal_in_autocast(cp: ContextParallel) -> list[bool]:
    """Which of out, dq, dk and dv, in fp16 and unsharded, autocast to bf16 leaves as they are."""
    *qkv, d_out = (cp.shard(x.half(), 2) for x in _inputs(TOKENS))

    def results() -> list[Tensor]:
        found = with_gradients(
            lambda *x: attend(*x, DOCUMENTS, SPARSE, cp, BACKEND),
            qkv,
            d_out,
        )
        return [cp.unshard(x, 2) for x in found]

    wanted = results()
    with torch.autocast("cuda", torch.bfloat16):
        got = results()
    return [torch.equal(x, y) for x, y in zip(got, wanted, strict=True)]


def _memory(cp: ContextParallel) -> list[tuple[int, int]]:
    """Bytes held after 5 and after 50 calls, and at most, forward and backward.

    There is no garbage collection, as in training. The bytes are those that were asked for: what
    the allocator gives depends on how it has split its memory before.
    """
    *qkv, d_out = (cp.shard(x, 2) for x in _inputs(TOKENS))
    gc.collect()
    gc.disable()
    torch.cuda.reset_peak_memory_stats()
    found = []
    for call in range(1, 51):
        gradients(
            lambda *x: attend(*x, DOCUMENTS, SPARSE, cp, BACKEND),
            d_out,
            *qkv,
        )
        # Otherwise the peak says how many calls the host is ahead.
        torch.cuda.synchronize()
        if call in (5, 50):
            # The allocator looks at the events of other streams when it is asked for memory.
            torch.empty(1, device="cuda")
            stats = torch.cuda.memory_stats()
            found.append([stats[f"requested_bytes.all.{kind}"] for kind in ("current", "peak")])
    gc.enable()
    return found


def _delays(contexts: dict[str, ContextParallel]) -> dict:
    """Which results of three layers (out, dq, dk, dv, ...) differ when they are computed again.

    And again with delays.
    """
    made = [x.to("cuda", torch.bfloat16) for x in layer_inputs(8, TOKENS, 64)]

    def compute(cp: ContextParallel) -> list[torch.Tensor]:
        return layers(cp, Causal(), SPARSE, made, BACKEND, SIZE)

    wanted = {name: compute(cp) for name, cp in contexts.items()}
    differing = {}

    def compare(kind: str, name: str) -> None:
        pairs = zip(compute(contexts[name]), wanted[name], strict=True)
        differing[f"{name} {kind}"] = [
            number for number, (x, y) in enumerate(pairs) if not torch.equal(x, y)
        ]

    for name in contexts:
        compare("repeated", name)
    count = _inject_delays()
    for number, name in enumerate(contexts):
        time.sleep(LATE_SECONDS if dist.get_rank() == number else 0)
        compare("delayed", name)
    return {"differing": differing, "count": count}


def _inject_delays() -> Counter:
    """Delay this process from here on, by a different time at every call: the host, the compute
    stream before work, waits and collectives, and transfers alone. Returns the number of delays by
    kind.
    """
    delays, count = random.Random(dist.get_rank()), Counter()
    beside = torch.cuda.Stream()

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
                torch.cuda._sleep(int(stream * 1e9))
                return function(*args, **kwargs)

        return late

    transfers = ("shift", "start_all_gather", "start_reduce_scatter", "start_all_reduce")
    for kind, owner, names in (
        ("work", BACKENDS[BACKEND], ("forward", "backward")),
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
    return _torchrun(ranks, "train.py", *as_words(options))


def test_training_on_several_is_training_on_one(tmp_path):
    """The same losses and gradient norms but for bf16's rounding."""
    double_ring = {"attention.schedule": "double_ring", "parallelism.cp_intra": RANKS // 2}
    for process in [_trains(tmp_path, 1, SHORT), _trains(tmp_path, RANKS, SHORT | double_ring)]:
        _succeeds(process)
    for field, share in (("tokens_seen", 0), ("loss", 5e-3), ("grad_norm", 5e-2)):
        found = differences(tmp_path / "1", tmp_path / str(RANKS), field)
        assert len(found) == 5, field
        assert all(step.relative <= share for step in found), (field, found)


TIMEOUT_SECONDS = 8
HANGS = SHORT | {
    "training.device": "cuda",
    "training.dtype": "bfloat16",
    "attention.pattern": "vertical_slash",
    "attention.block_size": 128,
    "parallelism.cp": RANKS,
    "parallelism.timeout_seconds": TIMEOUT_SECONDS,
    "data.join_packages": "false",
    "data.min_document_length": 0,
}


@pytest.mark.parametrize(
    "graphs, fault, named",
    [
        (
            "auto",
            "import os, time; time.sleep(1); os._exit(1)",
            "has given no sign of life, last seen in step 3, at ",
        ),
        (
            "auto",
            "import time; time.sleep(1e6)",
            "holds up the others in step 3, at <string>:1 in <module>",
        ),
        (
            "off",
            "import time; time.sleep(1e6)",
            "holds up the others in step 3, at <string>:1 in <module>",
        ),
    ],
    ids=["dies", "hangs", "hangs, no graphs"],
)
def test_a_rank_is_named_before_the_timeout(tmp_path, graphs, fault, named):
    """The others wait for it inside the replay of a graph, in step 3, or in a collective."""
    began = tmp_path / "began"
    faults = Faults(rank=1, code=f"open({str(began)!r}, 'w'); {fault}")
    output = run_under_torchrun(tmp_path, RANKS, HANGS | {"compile.cuda_graphs": graphs}, faults)
    assert began.exists(), output
    seconds = time.time() - began.stat().st_mtime
    assert re.search(rf"rank 1 \(host \S+, process \d+\) {named}", output), output
    assert not re.search(rf"rank [023] \(host .* {named[:14]}", output), output
    assert seconds < TIMEOUT_SECONDS + 30


if __name__ == "__main__":
    _main(*sys.argv[1:])
