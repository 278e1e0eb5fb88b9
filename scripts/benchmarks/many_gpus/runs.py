"""What scripts.benchmarks.many_gpus starts, by the number of GPUs.

Seconds are expected on H200s with NVLink, from a start with empty caches.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

PARTS = (1, 2, 3, 4, 5)
PACKAGE = "scripts.benchmarks.many_gpus"
ATTENTION = f"{PACKAGE}.attention"


class Run(NamedTuple):
    """A program that is started once.

    ranks: GPUs that it needs. seconds: that it takes. files: {name of a result: the words that make
    it}. The module attention makes several, under torchrun; others make one. needs_flash: those
    that are about flash-attn-4.
    """

    part: int
    name: str
    ranks: int
    seconds: float
    module: str
    files: dict[str, list[str]]
    needs_flash: frozenset[str] = frozenset()

    def command(self, out: Path, names: list[str]) -> list[str]:
        """What makes these files in the folder `out`."""
        python = [sys.executable, "-m"]
        if self.module != ATTENTION:
            [name] = names
            return [*python, self.module, *self.files[name], "--out", str(out / f"{name}.json")]
        torchrun = [*python, "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", str(self.ranks)]
        plan = json.dumps({name: self.files[name] for name in names})
        return [*torchrun, "-m", ATTENTION, str(out), plan]


class Size(NamedTuple):
    """lengths: tokens of all GPUs together. tokens_a_rank: of masks. words: of all attention."""

    device: str
    lengths: tuple[int, ...]
    tokens_a_rank: tuple[int, ...]
    backends: tuple[str, ...]
    words: list[str]


FULL = Size(
    "cuda",
    lengths=(524288, 1048576),
    tokens_a_rank=(8192, 65536),
    backends=("triton", "flex"),
    words=["--repeats", "3", "--warm-ups", "1"],
)
TOY = Size(
    "cpu",
    lengths=(1024,),
    tokens_a_rank=(512,),
    backends=("eager",),
    words=[
        *("--device", "cpu", "--repeats", "1", "--warm-ups", "0"),
        *("--head-dim", "16", "--block-size", "64"),
    ],
)
TOY_SCALING = ["--heads", "2:1", "--density", "0.4", "--columns", "0.04"]


def runs(gpus: int, toy: bool) -> list[Run]:
    """All five parts in order. What needs more GPUs than there are is among them."""
    size = TOY if toy else FULL
    largest = max(ranks for ranks in (1, 2, 4, 8) if ranks <= gpus)
    # Everything is asked for on 8; what is here is measured too.
    here_and_8 = [ranks for ranks in dict.fromkeys((largest, 8)) if ranks > 1]
    found = [scaling(size, ranks) for ranks in (1, 2, 4, 8)]
    found += [nodes(size, ranks) for ranks in (4, 8)]
    found += [masks(size, ranks) for ranks in here_and_8]
    for ranks in here_and_8:
        found += [toy_step(ranks)] if toy else steps(ranks)
    for ranks in here_and_8:
        found += faults(size, ranks)
    # In the order of the parts.
    return sorted(found, key=lambda run: run.part)


# Parts 1 and 2 -----------------------------------------------------------------------------------


def scaling(size: Size, ranks: int) -> Run:
    """Sparse attention by all schedules, and dense beside torch's."""
    schedules = ["all_gather", "ring"]
    if ranks > 2:
        schedules.append("double_ring")
    toy = TOY_SCALING if size is TOY else []
    files = {}
    needs_flash = []
    for backend in size.backends:
        for seq_len in size.lengths:
            name = f"scaling_{ranks}x_{seq_len}_{backend}"
            files[name] = [
                *("context_parallel", "scaling", "--seq-len", str(seq_len), "--backend", backend),
                *("--schedules", *schedules, "--gradient-dtypes", "float32", *toy, *size.words),
            ]
            if backend == "flex":
                needs_flash.append(name)
    # A dense call over a million tokens takes 13 s on two GPUs.
    dense = size.lengths if ranks > 2 else size.lengths[:1] if ranks == 2 else ()
    for seq_len in dense:
        files[f"dense_{ranks}x_{seq_len}"] = [
            *("context_parallel", "dense", "--brief", "--seq-len", str(seq_len), *size.words),
            # Calls of seconds, which vary little.
            *(toy or ["--repeats", "1"]),
        ]
    seconds = {1: 50, 2: 65, 4: 95, 8: 85}[ranks]
    return Run(1, f"scaling_{ranks}x", ranks, seconds, ATTENTION, files, frozenset(needs_flash))


def nodes(size: Size, ranks: int) -> Run:
    """double_ring over two pretended nodes, beside its computing and its transfers alone."""
    files = {}
    for seq_len in size.lengths:
        files[f"nodes_{ranks}x_{seq_len}"] = [
            *("context_parallel", "nodes", "--pretend-nodes", "2", "--seq-len", str(seq_len)),
            *("--backend", size.backends[0], *(TOY_SCALING if size is TOY else []), *size.words),
        ]
    return Run(1, f"nodes_{ranks}x", ranks, 80, ATTENTION, files)


def masks(size: Size, ranks: int) -> Run:
    """Packed documents and a window by group_cast, ring and all_gather."""
    files = {}
    for tokens in size.tokens_a_rank:
        toy = ["--heads", "2:1", "--window", "128"] if size is TOY else []
        # Long sequences of documents are much alike, and take long.
        packs = "1" if tokens > 8192 else "2"
        files[f"masks_{ranks}x_{tokens}"] = [
            *("masks", "varlen", "--varlen-masks", "documents", "window", "--packs", packs),
            *("--stages", "1", "2", "--seq-len", str(tokens * ranks), *toy, *size.words),
        ]
    return Run(2, f"masks_{ranks}x", ranks, 105, ATTENTION, files)


# Parts 3 and 4 -----------------------------------------------------------------------------------

QWEN3 = "train_configs/qwen3_8b_1m.toml"
LLAMA = "train_configs/llama3_1_8b_512k.toml"
QWEN25 = "train_configs/qwen2_5_3b_512k.toml"

STEP_WORDS = [
    *("--training.gradient_accumulation_steps", "1"),
    *("--training.mlp_chunk_tokens", "16384"),
    *("--data.source", "python", "--data.join_packages", "--data.tokenizer", "bytes"),
    *("--data.min_document_length", "65536"),
    *("--checkpoint.enable", "false"),
    *("--metrics.log_every", "1", "--metrics.tensorboard", "false"),
    # Recall is measured in the first step, which is not timed.
    *("--metrics.recall_every", "1000"),
]
SMALLER = [
    *("--activation_checkpoint.attention_recompute", "1"),
    *("--attention.backend", "triton"),
]
OFFLOADED = [*SMALLER, "--optimizer.offload"]
DENSE = [
    *("--attention.pattern", "dense"),
    *("--attention.layout", "zigzag"),
    *("--attention.schedule", "ring"),
]


def steps(ranks: int) -> list[Run]:
    """Steps of whole models. Fewer GPUs have fewer tokens, and dense steps fewer layers."""
    if ranks == 8:
        million = 1048576
        whole = step(3, "qwen3_8b_dense_all_layers", QWEN3, 8, million, 460, DENSE, timed=0)
        return [
            step(3, "qwen3_8b", QWEN3, 8, million, 230, timed=2),
            step(3, "qwen3_8b_dense", QWEN3, 8, million, 190, [*DENSE, "--model.layers", "4"]),
            # By triton it would take more than eight minutes.
            whole._replace(needs_flash=frozenset(whole.files)),
            step(4, "llama3_1_8b", LLAMA, 8, 524288, 150, timed=2),
            step(4, "qwen2_5_3b", QWEN25, 8, 2 * million, 300, timed=2),
            longest(8, 360),
        ]
    if ranks == 4:
        return [
            step(3, "qwen3_8b", QWEN3, 4, 524288, 150),
            step(3, "qwen3_8b_dense", QWEN3, 4, 524288, 110, [*DENSE, "--model.layers", "4"]),
            step(4, "llama3_1_8b", LLAMA, 4, 524288, 140),
            step(4, "qwen2_5_3b", QWEN25, 4, 1048576, 140),
            longest(4, 360),
        ]
    return [
        step(3, "qwen3_8b", QWEN3, 2, 262144, 150, OFFLOADED),
        step(3, "qwen3_8b_dense", QWEN3, 2, 262144, 100, [*DENSE, "--model.layers", "4"]),
        step(4, "llama3_1_8b", LLAMA, 2, 524288, 190, OFFLOADED),
        step(4, "qwen2_5_3b", QWEN25, 2, 1048576, 210, SMALLER),
        longest(2, 360),
    ]


def step(
    part: int,
    model: str,
    config: str,
    ranks: int,
    tokens: int,
    seconds: float,
    words: list[str] | None = None,
    timed: int = 1,
) -> Run:
    """One step to warm up, and the timed ones. Budgets are 5 % of the pairs at any length."""
    name = f"step_{ranks}x_{model}_{tokens}"
    options = [
        *("--ranks", str(ranks), "--config", config, "--parallelism.cp", str(ranks)),
        *("--training.seq_len", str(tokens), "--training.steps", str(1 + timed)),
        *("--attention.vertical_slash.max_verticals", str(tokens // 200)),
        *("--attention.vertical_slash.max_slashes", str(tokens * 384 // 1048576)),
        *STEP_WORDS,
        *(words or []),
    ]
    return Run(part, name, ranks, seconds, f"{PACKAGE}.step", {name: options})


def longest(ranks: int, seconds: float) -> Run:
    """Qwen2.5-3B at the length that --find-max-length says; budgets stay those of 512K tokens."""
    name = f"step_{ranks}x_qwen2_5_3b_longest"
    options = [
        *("--longest", "--ranks", str(ranks), "--config", QWEN25),
        *("--parallelism.cp", str(ranks), "--training.steps", "2"),
        *STEP_WORDS,
        *SMALLER,
        # The estimate does not know what measuring it takes.
        *("--metrics.recall_every", "0"),
    ]
    return Run(4, name, ranks, seconds, f"{PACKAGE}.step", {name: options})


def toy_step(ranks: int) -> Run:
    name = f"step_{ranks}x_toy"
    options = [
        *("--ranks", str(ranks), "--device", "cpu", "--config", "train_configs/demo_cpu.toml"),
        *("--parallelism.cp", str(ranks), "--training.steps", "2", "--training.seq_len", "1024"),
        *("--attention.vertical_slash.dense_below", "256", "--checkpoint.enable", "false"),
        *("--metrics.log_every", "1", "--metrics.tensorboard", "false"),
        *("--metrics.recall_every", "1000", "--lr_scheduler.warmup_steps", "1"),
    ]
    return Run(3, name, ranks, 20, f"{PACKAGE}.step", {name: options})


# Part 5 ------------------------------------------------------------------------------------------


def faults(size: Size, ranks: int) -> list[Run]:
    """Parity, a hang, a soak, a restart, and a kill."""
    where = ["--device", size.device, "--ranks", str(ranks)]
    steps_of_soak = ["--steps", "200", "--kill-every", "100"]
    trained = [
        *("--model.flavour", "qwen2.5-0.5b", "--training.seq_len", "32768"),
        *("--data.join_packages=true", "--compile.enable=true"),
        *("--checkpoint.async_mode", "async_with_pinned_mem"),
    ]
    if size is TOY:
        steps_of_soak = ["--steps", "12", "--kill-every", "8"]
        trained = ["--training.seq_len", "1024"]
    programs = [
        ("parity", 75, f"{PACKAGE}.parity", where),
        ("hang", 45, f"{PACKAGE}.hang", ["hang", *where]),
        ("soak", 135, "tests.faults.soak", [*where, *steps_of_soak]),
        ("restart", 105, "scripts.benchmarks.restart", [*where, "--restarts", "1", *trained]),
        ("kill", 45, f"{PACKAGE}.hang", ["kill", *where]),
    ]
    found = []
    for kind, seconds, module, words in programs:
        name = f"{kind}_{ranks}x"
        found.append(Run(5, name, ranks, seconds, module, {name: words}))
    return found
