"""--dry-run, --find-max-length, the allocator, and the launch scripts."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from titan_sparse.commands import train
from titan_sparse.config import Config, load, load_and_check
from titan_sparse.estimate.memory import GIB
from titan_sparse.models.flavours import resolve
from titan_sparse.training.dry_run import (
    World,
    _backend,
    dry_run,
    find_max_length,
    host_gib,
)
from titan_sparse.training.step_shape import step_of

ROOT = Path(__file__).parents[2]
SMALL = ["--config", str(ROOT / "train_configs/qwen2_5_0_5b_128k.toml")]


@pytest.fixture
def program(monkeypatch, capsys):
    """Runs train.py on SMALL in this process; returns its status and what it prints."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)

    def run(words: str) -> tuple[int, str]:
        status = train.main([*SMALL, *words.split()])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


def test_cuda_graphs(program):
    """As the run that starts so."""
    status, printed = program("--dry-run --training.seq_len 8192")
    assert status == 0 and "forward and backward are CUDA graphs from step 3 on" in printed
    ring = (
        "--dry-run --ranks 4 --parallelism.cp 4 --parallelism.cp_intra 1 --attention.schedule ring"
    )
    status, printed = program(ring)
    assert status == 0 and "not CUDA graphs, since attention.schedule = " in printed
    status, printed = program(f"{ring} --compile.cuda_graphs on")
    assert status == 2 and printed.count("\n") == 1 and "compile.cuda_graphs" in printed


def test_report(program):
    status, printed = program("--dry-run --device-memory 80")
    peak = float(re.search(r"peak (\S+) GiB", printed)[1])
    rows = [float(x) for x in re.findall(r"^  \(\d\) .*?(\d+\.\d\d)", printed, re.MULTILINE)]
    assert status == 0 and len(rows) == 6
    assert peak == max(rows)
    assert f"{rows[2]:.2f}  <- the peak" in printed
    assert f"{peak + 1.5:.2f} GiB of 80.0, 3 % kept free: fits" in printed
    columns = [
        line.split()[-6:]
        for line in printed.splitlines()
        if re.fullmatch(r"  [a-z][a-z -]*( +\d+\.\d\d){6}", line)
    ]
    for number, total in enumerate(rows):
        assert sum(float(row[number]) for row in columns) == pytest.approx(total, abs=0.05)
    # 6 x 494 M x S + 12 D x pairs x 336
    assert "1 sequences, 131,072 tokens, 2.61 PFLOP dense" in printed
    assert "density 11.1 %" in printed


def test_report_of_the_docs_is_what_is_printed(program):
    _, printed = program("--attention.backend flex --dry-run --device-memory 139.8")
    shown = (ROOT / "docs/training.md").read_text().split("### How to read")[1].split("```\n")[1]
    assert printed.startswith(shown)


def test_what_does_not_fit_says_what_would(monkeypatch, program):
    words = "--activation_checkpoint.mode none --training.loss_chunk_tokens 16384"
    status, printed = program(f"{words} --dry-run --device-memory 40")
    assert status == 1 and "does NOT fit" in printed
    assert "reshard_after_forward" not in printed, "it is on already"
    assert re.search(r'mode = "full" \S+ GiB \(fits\)', printed)
    assert re.search(r"all of these \S+ GiB \(fits\); parallelism.cp = 2 on 2 ranks", printed)
    assert "GiB (fits)" not in re.search(r"loss_chunk_tokens = 1024 .*?;|$", printed)[0]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, printed = program("--find-max-length")
    assert status == 2 and "write --device-memory GIB" in printed


@pytest.mark.parametrize(
    "head_dim, words, expected",
    [
        (128, "--attention.pattern dense", "flex"),
        (256, "--attention.pattern dense", "cudnn"),
        (128, "--attention.pattern dense --attention.block_size 64", "cudnn"),
        (256, "", "triton"),
        (128, "", "flex"),
        (128, "--training.seq_len 4096", "triton"),
        (64, "--training.seq_len 8192", "triton"),
        (64, "--training.seq_len 8192 --attention.vertical_slash.recall 0.99", "flex"),
        (128, "--training.dtype float64", "eager"),
        (128, "--training.device cpu", "eager"),
    ],
)
def test_auto_is_resolved_as_on_a_hopper_gpu(monkeypatch, head_dim, words, expected):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config, _ = load([*SMALL, *words.split()])
    model = dataclasses.replace(resolve(**vars(config.model)), head_dim=head_dim)
    assert _backend(config, model) == expected


def test_launch_on_one_node():
    words = "train_configs/demo_cpu.toml --parallelism.cp 1 --print-config"
    result = _subprocess(["bash", "scripts/launch_node.sh", *words.split()], GPUS="1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith('[model]\nflavour = "debug"')


@pytest.mark.parametrize(
    "words, ranks", [("", 1), ("--parallelism.cp 4 --attention.layout zigzag", 8)]
)
def test_longest_length_is_the_last_that_fits(words, ranks):
    config, _ = load_and_check([*SMALL, *words.split()], ranks, ranks)
    where = World(ranks, ranks, 80.0)
    text, found = find_max_length(config, where)
    longest = int(re.search(r"seq_len = (\d+)", text)[1])
    multiple = 128 * (8 if ranks == 8 else 1)
    assert found and longest % multiple == 0 and longest > 131072
    assert "of 80.0, 3 % kept free: fits" in text
    for seq_len, fits in ((longest, True), (longest + multiple, False)):
        config.training.seq_len = seq_len
        assert dry_run(config, where)[1] == fits


def _subprocess(words: list[str], **environment: str) -> subprocess.CompletedProcess:
    dropped = ("SLURM", "RANK", "WORLD", "PYTORCH_")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    env = clean | {"PYTHON": sys.executable} | environment
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "given, wanted",
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
)
def test_segments_grow_unless_the_user_says_otherwise(given, wanted):
    """In a process of its own, as torch must not have been loaded before."""
    code = (
        "import os, sys; from titan_sparse.commands import train; train.set_allocator(); "
        "print(os.environ.get('PYTORCH_CUDA_ALLOC_CONF'), 'torch' in sys.modules)"
    )
    result = _subprocess([sys.executable, "-c", code], **given)
    assert result.stdout.split() == [str(wanted), "False"], result.stderr


@pytest.mark.parametrize(
    "words, expected",
    [
        ("launch_node.sh", "usage"),
        ("launch_slurm.sh", "usage"),
        ("launch_slurm.sh train_configs/demo_cpu.toml", "not inside of a Slurm job"),
    ],
)
def test_launch_refuses_what_it_cannot_start(words, expected):
    result = _subprocess(["bash", *f"scripts/{words}".split()])
    assert result.returncode == 2 and expected in result.stderr


# CPU memory -----------------------------------------------------------------------------------

PARAMETERS = 3_085_938_688
"""of Qwen2.5-3B, as Hugging Face counts them: the embedding is the head"""

MODEL = ["--model.flavour", "qwen2.5-3b"]
OFFLOADED = [
    *MODEL,
    *("--training.seq_len", "524288", "--parallelism.cp", "4"),
    *("--training.mlp_chunk_tokens", "16384", "--attention.pattern", "dense"),
    *("--activation_checkpoint.offload", "--optimizer.offload", "--compile.enable"),
    *("--checkpoint.enable", "--checkpoint.async_mode", "async_with_pinned_mem"),
]
# Qwen2.5-3B: hidden 2048, 16 heads of 128, 36 layers; four ranks share 524,288 tokens. Bytes.
INPUTS = 35 * 524288 // 4 * 2 * 2048
RESULTS = 35 * 524288 // 4 * (2 * 16 * 128 + 4 * 16)  # out in bf16, LSE in fp32


@pytest.mark.parametrize(
    "words, ranks, expected",
    [
        (
            OFFLOADED,
            4,
            {
                # Weights, gradients, two states, in fp32.
                "optimizer.offload": 16 * PARAMETERS / 4,
                "activation_checkpoint.offload": INPUTS + RESULTS,
                # Weights and two states.
                "copy for a save": 12 * PARAMETERS / 4,
            },
        ),
        (MODEL, 1, {}),
        (
            [*MODEL, "--checkpoint.enable", "--checkpoint.async_mode", "async"],
            1,
            {"copy for a save": 12 * PARAMETERS},
        ),
    ],
)
def test_cpu_memory_by_hand(words, ranks, expected):
    config, _ = load_and_check(words, ranks, ranks)
    model = resolve(**vars(config.model))
    step = step_of(config, model, "triton", ranks, ranks)
    found = {part: gib * GIB for part, gib in host_gib(step, config.checkpoint).items()}
    assert found == pytest.approx(expected, rel=1e-9)


def test_a_node_needs_what_its_ranks_need():
    """11.5 + 35.3 + 8.6 GiB a rank, four ranks: 221.6 GiB, and a tenth of the node stays free."""
    config, _ = load_and_check(OFFLOADED, 4, 4)
    for host_memory, verdict in ((247.0, "fits"), (246.0, "does NOT fit")):
        text, fits = dry_run(config, World(4, 4, 139.8, host_memory))
        assert fits == (verdict == "fits")
        [line] = [line for line in text.splitlines() if line.startswith("CPU memory")]
        assert "55.39 GiB a rank" in line and "221.57 a node" in line and line.endswith(verdict)
    text, fits = dry_run(config, World(4, 4, 139.8))
    assert fits and "write --host-memory GIB of a node" in text


# Models that run through transformers' own code -------------------------------------------------


def _number(pattern: str, report: str) -> float:
    return float(re.search(pattern, report).group(1).replace(",", ""))


DENSE = r"([\d.,]+) PFLOP dense"


def test_active_parameters_of_a_mixture_of_experts():
    path = ROOT / "train_configs/qwen3_30b_a3b_64k.toml"
    config = load(["--config", str(path)])[0]
    report, _ = dry_run(config, World(8, 8, 139.8))
    assert "30,532.1 M parameters" in report
    assert "8 of 128 experts a token" in report
    active = _number(r"([\d.,]+) M active", report)
    # The card's 3.3 B count the embedding too.
    assert active == pytest.approx(3042, abs=5)
    config.attention.sliding_window = 1
    without_attention = _number(DENSE, dry_run(config, World(8, 8, 139.8))[0])
    assert without_attention == pytest.approx(6 * active * 1e6 * 65536 / 1e15, abs=0.02)


def test_layers_of_linear_attention(tmp_path):
    """Qwen3-Next-80B-A3B's shape, whole and with 8 of its 48 layers. One in four has attention."""
    transformers.Qwen3NextConfig().save_pretrained(tmp_path)
    config = Config()
    config.model.initial_hf = str(tmp_path)
    config.model.random_weights = True
    config.attention.pattern = "dense"
    config.training.seq_len = 262144
    config.parallelism.cp = 8
    for layers, parameters, verdict in ((0, "79,674.4 M", False), (8, "13,797.7 M", True)):
        config.model.layers = layers
        report, fits = dry_run(config, World(8, 8, 139.8))
        assert fits == verdict and f"{parameters} parameters" in report
        full = (layers or 48) // 4
        assert f"linear attention in {3 * full} of {4 * full} layers" in report
        # 12 D for each pair of 16 heads.
        attention = 12 * 256 * 16 * full * 262144**2 / 2 / 1e15
        share = _number(r"of which attention (\d+) %", report) / 100
        assert _number(DENSE, report) * share == pytest.approx(attention, rel=0.01)
