"""titan-sparse plan and scripts.calibrate: what they write, and what they refuse in one line."""

import json
import time

import pytest
import torch

from scripts import calibrate
from tests.distributed import run_program
from tests.refusals import error_of, refused
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.commands.plan import DEFAULT_CONSTANTS, main
from titan_sparse.estimate.constants import load_constants
from titan_sparse.estimate.indexes import ragged_lengths, save_indexes
from titan_sparse.models.flavours import FLAVOURS


@pytest.fixture
def config(tmp_path):
    (tmp_path / "c.toml").write_text(
        '[training]\nseq_len = 8000\n[attention]\nblock_size = 64\nlayout = "striped"\n'
    )
    return str(tmp_path / "c.toml")


def _plans(tmp_path, *words) -> dict:
    out = tmp_path / "plan.json"
    assert main([*words, "--out", str(out)]) == 0
    return json.loads(out.read_text())


def test_the_script_compares_layouts_and_schedules(config, tmp_path, capsys):
    words = f"""
        --ranks 8 --nodes 2 --layout striped zigzag --schedule ring double_ring group_cast
        --attention.overlap_stages 3 --density 0.2 --out {tmp_path}/plan.json {tmp_path}/plan.png
    """
    assert main([config, *words.split()]) == 0
    printed = capsys.readouterr().out
    assert printed.count("| zigzag | double_ring |") == 1
    found = json.loads((tmp_path / "plan.json").read_text())
    # 8000 tokens are padded to 2 x 8 x 64.
    assert found["seq_len"] == 8192
    assert found["density"] == pytest.approx(0.2, rel=0.1)
    striped, _, cast, zigzag, _, _ = found["plans"]
    assert sum(striped["pairs_of_rank"]) == pytest.approx(sum(zigzag["pairs_of_rank"]))
    assert sum(striped["pairs_of_rank"]) == pytest.approx(sum(cast["pairs_of_rank"]))
    assert striped["worker_imbalance_per_step"] < zigzag["worker_imbalance_per_step"]
    assert (tmp_path / "plan.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "documents, lengths",
    [(["6000", "500", "1"], [6000, 500, 1]), (["ragged"], ragged_lengths(8000, 0))],
)
def test_packed_documents_are_planned(config, tmp_path, documents, lengths):
    """The pairs are those of the documents, and the layout made for documents is balanced."""
    words = "--attention.pattern dense --ranks 4 --nodes 1 --layout contiguous balanced"
    words += " --schedule group_cast --model.flavour debug --documents"
    contiguous, balanced = _plans(tmp_path, config, *words.split(), *documents)["plans"]
    pairs = sum(n * (n + 1) / 2 for n in lengths) * FLAVOURS["debug"].heads
    for plan in (contiguous, balanced):
        assert sum(plan["pairs_of_rank"]) == pytest.approx(pairs)
    assert balanced["worker_imbalance"] < 1.1 < contiguous["worker_imbalance"]


@pytest.mark.parametrize("layouts", [["zigzag", "balanced"], ["balanced", "zigzag"]])
def test_padding_suits_all_layouts(config, tmp_path, layouts):
    """2112 tokens are 33 blocks: 36 for four ranks, 40 with zigzag's two runs a rank."""
    words = ["--ranks", "4", "--nodes", "1", "--seq-len", "2112", "--layout", *layouts]
    assert _plans(tmp_path, config, *words)["seq_len"] == 40 * 64


def test_the_script_takes_a_saved_index(config, tmp_path, capsys):
    rows = Causal().rows(1024)
    pattern = VerticalSlash(recall=0.5, sinks=3)
    torch.manual_seed(0)
    q = torch.randn(1, 4, 1024, 8)
    index = pattern.select(q, torch.randn(1, 1, 1024, 8), rows, block_size=64)
    path = str(tmp_path / "index.pt")
    save_indexes(path, pattern, rows, [index, index])
    found = _plans(tmp_path, config, "--ranks", "4", "--index", path)
    pairs = index.dense(Causal()).sum().item()
    assert sum(found["plans"][0]["pairs_of_rank"]) == pytest.approx(pairs)
    assert found["density"] == pytest.approx(pairs / (4 * 1024 * 1025 / 2))
    for words, message in (
        ("--seq-len 512", "--seq-len 512 is not that of --index, 1024; leave it out"),
        ("--training.seq_len 1024", "training.seq_len would be ignored as --index decides"),
        ("--attention.block_size 128", "not that of --index; write --attention.block_size 64"),
        ("--model.flavour qwen3-0.6b", "of a model with 4 heads, not 16"),
    ):
        words = f"--ranks 4 --index {path} {words}".split()
        assert message in error_of(capsys, main, config, *words)


@pytest.mark.parametrize("pattern", ["vertical_slash", "dense"])
def test_a_million_tokens_take_seconds(config, tmp_path, pattern):
    """Of one processor, so that others do not matter."""
    words = "--ranks 32 --nodes 4 --seq-len 1048576 --layout zigzag --schedule ring double_ring"
    words += f" --attention.pattern {pattern} --attention.block_size 128"
    began = time.process_time()
    assert _plans(tmp_path, config, *words.split())["seq_len"] == 1 << 20
    assert time.process_time() - began < 8


@pytest.mark.parametrize("words", ["", "--attention.pattern dense --documents ragged"])
@pytest.mark.parametrize("tokens", [1, 3, 16, 40])
def test_a_sequence_of_few_tokens_is_planned(config, tmp_path, tokens, words):
    assert _plans(tmp_path, config, "--seq-len", str(tokens), *words.split())["density"] == 1


def test_the_file_is_the_first_word(config, capsys):
    assert "write titan-sparse plan FILE" in error_of(capsys, main, "--config", config)
    assert "write titan-sparse plan FILE" in error_of(capsys, main, "--ranks", "2")


@pytest.mark.parametrize(
    "words, message",
    [
        ("--config other.toml", "--config is not an option here; write titan-sparse plan FILE"),
        ("--ranks 6 --nodes 4", "another --nodes"),
        ("--print-config", "flags of train.py would be ignored"),
        ("--ranks 2 --parallelism.cp 4", "cp would be ignored as --ranks decides over it"),
        ("--nodes 1 --parallelism.cp_intra 4", "cp_intra would be ignored as --nodes decides"),
        ("--layout zigzag --attention.layout zigzag", "layout would be ignored as --layout"),
        ("--schedule ring --attention.schedule ring", "schedule would be ignored as --schedule"),
        ("--seq-len 9 --training.seq_len 9", "seq_len would be ignored as --seq-len decides"),
        ("--attention.mask documents", "mask would be ignored as --documents, or one"),
        ("--attention.vertical_slash.recall 0.5", "recall would be ignored as no plan depends"),
        ("--parallelism.dp_shard 1", "dp_shard would be ignored as no plan depends on it"),
        ("--constants missing.json", "--constants missing.json"),
        ("--training.sequence 5", "unknown key"),
        ("--schedule local --ranks 2", "local"),
        ("--attention.pattern moba", "or --index FILE"),
        ("--documents ragged", "write --attention.pattern dense"),
        ("--documents 5 --index x.pt", "not allowed with argument --documents"),
        ("--attention.pattern dense --documents 9000", "add up to 8000"),
        ("--attention.pattern dense --documents many", "write ragged"),
        ("--density 0.1 --attention.pattern dense", "write --attention.pattern vertical_slash"),
        ("--density 2", "--density 2.0"),
        ("--seed 1 --attention.pattern dense", "--seed would be ignored"),
        ("--seed 1 --index x.pt", "--seed would be ignored"),
        ("--ranks 2 --layout balanced --attention.balance_costs none", "cannot read it"),
    ],
)
def test_the_script_refuses_in_one_line(config, capsys, words, message):
    assert message in error_of(capsys, main, config, *words.split())


def test_balanced_goes_by_the_costs_of_the_machine(config, tmp_path):
    """The costs come from the file that the run would read, otherwise from --constants."""
    built_in = json.loads(DEFAULT_CONSTANTS.read_text())["constants"]
    for name, gb_s in (("slow", 1e-4), ("fast", 1e6)):
        changed = {"dense_tflops": 400, "partial_tile": 2, "inside_gb_s": gb_s}
        entries = {key: {"value": value, "source": "planted"} for key, value in changed.items()}
        (tmp_path / name).write_text(json.dumps({"constants": built_in | entries}))
    slow = str(tmp_path / "slow")
    fast = str(tmp_path / "fast")
    words = [config, "--attention.pattern", "dense", "--ranks", "4", "--nodes", "1"]
    words += ["--documents", "4096", *["64"] * 60, "--schedule", "group_cast"]
    words += ["--layout", "balanced"]
    costs = []
    megabytes = []
    for more in (
        [],
        ["--constants", slow],
        ["--constants", fast],
        # The run's own file, which layouts other than "balanced" ignore.
        ["striped", "--constants", fast, "--attention.balance_costs", slow],
    ):
        found = _plans(tmp_path, *words, *more)
        costs.append(found["balance_costs"])
        megabytes.append(found["plans"][0]["forward_inside_mb"])
    assert costs[0] == {"partial": 120, "transfer": 280}
    assert costs[1] == costs[3]
    assert costs[1]["partial"] == 200
    assert costs[2]["transfer"] == 0 < 100_000 < costs[1]["transfer"]
    assert megabytes[1] == megabytes[3] < megabytes[2]


# Calibration


def test_calibration_writes_what_plans_read(tmp_path):
    words = "--seq-len 4096 --heads 2 1 --head-dim 8 --megabytes 0.1 --repeats 2 --device cpu"
    out = ["--out", str(tmp_path / "c.json"), "--across-gb-s", "2"]
    printed = run_program(2, calibrate.main, [*words.split(), *out])
    constants = load_constants(tmp_path / "c.json")
    assert constants.across_gb_s == 2
    assert constants.forward_tflops > 0
    assert 0 < constants.inside_gb_s < 1000
    assert constants.dense_tflops > 0 and constants.partial_tile >= 1
    written = json.loads(printed)
    assert written["machine"] == "CPU, 1 nodes of 2"
    assert written["constants"]["dense_tflops"]["source"].endswith("2:1 heads, backend eager")


@pytest.mark.parametrize("call, whole, partial", [(0.0, 2e-6, 3e-6), (5e-3, 1e-5, 2e-5)])
def test_times_of_tiles_are_recovered(call, whole, partial):
    tiles = [(0, 200), (3, 290), (700, 190), (700, 280)]
    runs = [calibrate.TiledRun(w, p, call + w * whole + p * partial) for w, p in tiles]
    assert calibrate.tile_seconds(runs) == pytest.approx((whole, partial))
    # A little noise spoils little.
    noise = (0.998, 1.002, 0.998, 1.002)
    noisy = [run._replace(seconds=run.seconds * factor) for run, factor in zip(runs, noise)]
    assert calibrate.tile_seconds(noisy) == pytest.approx((whole, partial), rel=0.1)


def test_times_of_tiles_that_cannot_be():
    tiles = [(0, 200), (0, 290), (700, 190), (700, 280)]
    cheaper_if_cut = [calibrate.TiledRun(w, p, 1e-6 * w + 5e-7 * p) for w, p in tiles]
    whole, partial = calibrate.tile_seconds(cheaper_if_cut)
    assert partial == whole == pytest.approx(1e-6)
    with refused("noise; write a larger --seq-len"):
        calibrate.tile_seconds([calibrate.TiledRun(w, p, 1.0 - 1e-4 * w) for w, p in tiles])


@pytest.mark.parametrize("ranks, expected", [(None, "--nproc-per-node"), ("2", "--across-gb-s")])
def test_calibration_refuses_in_one_line(tmp_path, capsys, monkeypatch, ranks, expected):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE") if ranks else ():
        monkeypatch.setenv(name, ranks)
    assert expected in error_of(capsys, calibrate.main, "--out", str(tmp_path / "c.json"))
