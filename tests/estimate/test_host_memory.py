"""CPU memory of a rank and of a node, counted by hand, and told by --dry-run and --find-max-length."""

import pytest

from titan_sparse.config import Checkpoint, ConfigError, load_and_check
from titan_sparse.estimate.dry_run import World, dry_run, find_max_length
from titan_sparse.estimate.host_memory import host_gib
from titan_sparse.estimate.memory import GIB, step_of
from titan_sparse.from_config import build_pattern
from titan_sparse.models.flavours import resolve

PARAMETERS = 3_085_938_688
"""of Qwen2.5-3B, as Hugging Face counts them: the embedding is the head"""

OFFLOADED = [
    *("--model.flavour", "qwen2.5-3b", "--training.seq_len", "524288", "--parallelism.cp", "4"),
    *("--training.mlp_chunk_tokens", "16384", "--attention.pattern", "dense"),
    *("--activation_checkpoint.offload", "--optimizer.offload", "--compile.enable"),
    *("--checkpoint.enable", "--checkpoint.async_mode", "async_with_pinned_mem"),
]


def _parts(words: list[str], ranks: int) -> dict[str, float]:
    config, _ = load_and_check(words, ranks, ranks)
    model = resolve(**vars(config.model))
    pattern = build_pattern(config.attention)
    step = step_of(config, model, pattern, "triton", world_size=ranks, local_world_size=ranks)
    return host_gib(step, config.checkpoint)


def test_a_case_counted_by_hand():
    """Qwen2.5-3B: hidden 2048, 16 heads of 128, 36 layers; four ranks share 524,288 tokens."""
    tokens = 524288 // 4
    of_token = 2 * 2048 + 2 * 16 * 128 + 4 * 16  # input and out in bf16, LSE in fp32
    by_hand = {
        "optimizer.offload": 16 * PARAMETERS / 4,  # weights, gradients, two states, in fp32
        "activation_checkpoint.offload": 35 * tokens * of_token,
        "copy for a save": 12 * PARAMETERS / 4,  # weights and two states
    }
    found = _parts(OFFLOADED, 4)
    assert found.keys() == by_hand.keys()
    for part, size in by_hand.items():
        assert found[part] == pytest.approx(size / GIB, rel=1e-9)


def test_what_is_recomputed_is_not_offloaded():
    tokens = 524288 // 4
    found = _parts([*OFFLOADED, "--activation_checkpoint.attention_recompute", "1"], 4)
    by_hand = 35 * tokens * 2 * 2048
    assert found["activation_checkpoint.offload"] == pytest.approx(by_hand / GIB)


def test_a_run_that_keeps_all_on_its_gpu_needs_none():
    assert _parts(["--model.flavour", "qwen2.5-3b"], 1) == {}
    config, _ = load_and_check(["--model.flavour", "qwen2.5-3b"], 1, 1)
    text, fits = dry_run(config, World(1, 1, 139.8, host_memory=1.0))
    assert fits and "CPU memory" not in text


def test_saves_that_stop_the_run_need_no_copy():
    words = ["--model.flavour", "qwen2.5-3b", "--checkpoint.enable"]
    assert _parts(words, 1) == {}
    found = _parts([*words, "--checkpoint.async_mode", "async"], 1)
    assert found == {"copy for a save": pytest.approx(12 * PARAMETERS / GIB)}
    assert Checkpoint().async_mode == "disabled"


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


def test_the_longest_sequence_fits_both_memories():
    config, _ = load_and_check(OFFLOADED, 4, 4)
    lengths = []
    for host_memory in (400.0, 200.0):
        text, found = find_max_length(config, World(4, 4, 139.8, host_memory))
        assert found and "CPU memory" in text
        lengths.append(int(text.split()[2]))
    assert lengths[0] > 1.5 * lengths[1]
    # 80.4 GiB are there whatever the length; what is left holds 35 blocks of the tokens.
    left = (0.9 * 200 - 28 * PARAMETERS / GIB) * GIB
    of_token = 35 * (4 * 2048 + 4 * 16)
    assert lengths[1] == int(left / of_token) // 512 * 512
    text, found = find_max_length(config, World(4, 4, 139.8, 50.0))
    assert not found and text.startswith("nothing fits") and "does NOT fit" in text


def test_host_memory_without_a_report_is_refused():
    with pytest.raises(ConfigError, match="--host-memory would be ignored"):
        load_and_check(["--host-memory", "100"], 1, 1)
