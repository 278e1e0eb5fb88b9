"""titan-sparse evaluate, from a run's checkpoint, and inspect, whose numbers are those of
tables of all pairs."""

import csv
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.reference import structured_qkv
from tests.refusals import error_of, refused, room_for
from tests.runs import tiny_config
from titan_sparse.attention.context_parallel.group import one_rank
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns import MoBA, VerticalSlash, XAttention
from titan_sparse.commands import evaluate, inspect
from titan_sparse.commands.evaluate import main, parse
from titan_sparse.config import Attention, Data, save
from titan_sparse.data.shards import FORMATS
from titan_sparse.evaluation.inspection import SHARES, TOP_K, allowed_keys, curve, inspect_layer

SMALL = "--lengths 440 --samples 3 --buckets 4"


def _words(folder: Path, out: str, words: str) -> list[str]:
    run = folder / "run"
    of_run = ["--config", str(run / "config.toml"), "--checkpoint", str(run)]
    return [*of_run, *SMALL.split(), *words.split(), "--out", str(folder / out)]


def _results(folder: Path, out: str) -> dict:
    return json.loads((folder / out / "results.json").read_text())


@pytest.fixture(scope="module")
def one(folder) -> dict:
    assert main(_words(folder, "one", "--depths 2")) == 0
    return _results(folder, "one")


def test_results_of_a_run(folder, one):
    assert one["about"]["checkpoint"].endswith("run/checkpoint/step-2")
    assert one["about"]["pattern"] == "vertical_slash"
    (position,) = one["position"]
    buckets = position["buckets"]
    assert position["length"] == 440
    assert position["tokens"] == sum(part["tokens"] for part in buckets) > 300
    cells = [(cell["depth"], cell["samples"]) for cell in one["needle"]["cells"]]
    assert cells == [(0.0, 3), (1.0, 3)]
    names = {path.name for path in (folder / "one").iterdir()}
    assert names >= {"results.json", "position.csv", "needle.csv"}
    with open(folder / "one/position.csv", newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]
    assert losses == [part["loss"] for part in buckets if part["tokens"]]


def test_dense_and_generated(folder, one):
    # As in the config.toml of a run over several ranks.
    several = "--attention.schedule group_cast --attention.overlap_stages 3 "
    several += "--attention.layout balanced --parallelism.cp_intra 8"
    words = f"{several} --attention dense --depths 1 --samples 1 --answers generated"
    assert main(_words(folder, "dense", words)) == 0
    dense = _results(folder, "dense")
    assert dense["about"]["pattern"] == "dense"
    # The documents are shorter than both lengths: the windows are the same, but for their number.
    assert abs(dense["position"][0]["loss"] / one["position"][0]["loss"] - 1) > 1e-7
    (cell,) = dense["needle"]["cells"]
    assert (cell["length"], cell["samples"]) == (440, 1)
    # It was generated: there is no loss of the answer's tokens.
    assert "loss" not in cell


def test_lengths_that_are_dense_are_named(folder, capsys):
    """A window is not longer than its document."""
    run = folder / "run"
    of_run = f"--config {run}/config.toml --checkpoint {run} --samples 3 --out {folder}/below"
    (folder / "long.txt").write_text("a b c d " * 100)
    for task, below, is_dense in (
        ("position --buckets 4", "440", False),
        ("position --buckets 4", "441", True),
        ("needle --depths 1", "440", False),
        ("needle --depths 1", "441", True),
        ("needle --depths 1 --answers generated", "440", True),
    ):
        words = f"--tasks {task} --lengths 440 --attention.vertical_slash.dense_below {below}"
        said = f"{task.split()[0]}, --lengths 440: attention was dense, as"
        for source in ("long.txt", "texts"):
            assert main(f"{of_run} {words} --data.source {folder}/{source}".split()) == 0
            is_short = source == "texts" and task.startswith("position")
            assert (said in capsys.readouterr().out) == (is_dense or is_short)


@pytest.mark.parametrize(
    "words, reason",
    [
        ("--data.min_document_length 9999", "no document has 9999 tokens (data.min_document_len"),
        ("--lengths 200", "a needle and its question do not fit in 200 tokens; write"),
        ("--model.layers 5", "has no layers.4.input_layernorm.weight, the model of --config has ["),
    ],
)
def test_what_does_not_fit_a_run_is_refused_before_any_process_group(folder, capsys, words, reason):
    if dist.is_initialized():
        dist.destroy_process_group()
    assert reason in error_of(capsys, main, *_words(folder, "none", words))
    assert not dist.is_initialized()


EVALUATE = {
    "--tasks ruler": "lm_eval --model titan_sparse --tasks ruler --model_args checkpoint=",
    "--lengths 4kb": '--lengths = "4kb" are no lengths',
    "--stride half": "--stride: half is not a number of tokens; write for example 4096 or 4k",
    "--samples 0": "--samples: 0 is too small",
    "--buckets 441": "--buckets 441 is above 440",
    "--tasks needle": "--buckets would be ignored with --tasks needle; leave it out",
    "--tasks position --seed 1": "--seed would be ignored with --tasks position",
    "--tasks needle --buckets 16 --data.min_document_length 9": "length would be ignored with --tasks needle",
    "--training.seq_len 4k": "training.seq_len would be ignored with --lengths; leave it out",
    "--dry-run": "flags of train.py would be ignored",
    "--data.source a:1,b:1": 'evaluation reads one source; write one of its parts, such as data.source = "a"',
    "--data.source a:1,b:1 --data.format messages,text": 'such as data.source = "a" and data.format = "messages"',
    "": "holds no complete checkpoint",
}
INSPECT = {
    "--layers 0,99": '--layers = "0,99" are not layers',
    "--rows 0": "--rows: 0 is too small",
    "--length -1": "--length: -1 is not a number of tokens",
    "--length 20": "--length 20 is below two blocks",
    "--length 4k --training.seq_len 4k": "seq_len would be ignored with --length; leave it out",
    "--data.min_document_length 9": "length would be ignored as --length decides which document",
    "--parallelism.cp 2": "one process inspects the whole",
    "": "holds no complete checkpoint",
}


@pytest.mark.parametrize(
    "command, small, table", [(main, SMALL, EVALUATE), (inspect.main, "", INSPECT)]
)
def test_what_cannot_be_evaluated_or_inspected_is_refused(tmp_path, capsys, command, small, table):
    path = tmp_path / "config.toml"
    path.write_text('[training]\ndevice = "cpu"\n')
    of_run = ["--config", str(path), "--checkpoint", str(tmp_path), *small.split()]
    for words, reason in table.items():
        assert reason in error_of(capsys, command, *of_run, *words.split())


@pytest.mark.parametrize(
    ("trained", "ranks", "shared"), [(2, 1, 1), (8, 4, 4), (2, 6, 2), (3, 4, 1)]
)
def test_ranks_of_this_launch_take_the_place_of_others(
    trained, ranks, shared, tmp_path, monkeypatch
):
    """A run over several ranks is evaluated on the ranks of this launch, which share a sequence."""
    config = tiny_config(tmp_path, "run", model__flavour="debug", parallelism__cp=trained)
    config.parallelism.dp_replicate = 3
    save(config, tmp_path / "run")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    words = ["--config", str(tmp_path / "run/config.toml"), "--checkpoint", "run"]
    # A probe may be longer than the sequences of training.
    probe = ["--attention.vertical_slash.probe=1k", "--attention.vertical_slash.dense_below=1k"]
    args, evaluated = parse([*words, "--lengths", "128,1k", *probe])
    assert args.lengths == [128, 1024]
    parallelism = evaluated.parallelism
    assert (parallelism.cp, parallelism.dp_replicate, parallelism.dp_shard) == (shared, 1, -1)
    if shared < trained:
        with refused("does not fit"):
            parse([*words, "--lengths", "128", "--parallelism.cp", str(trained)])


CHATS = {"data__format": "messages", "data__loss_on": "all"}


@pytest.mark.parametrize(
    ("of_run", "words", "reset"),
    [
        ({"data__text_field": "body"}, "--data.source python", "text_field"),
        ({"data__split": "test"}, "--data.source b.jsonl", "split"),
        (CHATS, "--data.source a --data.format text", "loss_on"),
        (
            CHATS | {"data__source": "a:1, b:1", "data__format": "text, messages"},
            "--data.source a --data.format text",
            "loss_on",
        ),
        (
            {"data__source": "python:1, b.jsonl:1", "data__join_packages": True},
            "--data.source b.jsonl",
            "join_packages",
        ),
        (CHATS, "--data.source {}/prepared", "loss_on"),
        ({"data__split_special_tokens": True}, "--data.source {}/prepared", "split_special_tokens"),
    ],
)
def test_another_text_does_not_need_the_options_of_the_runs(of_run, words, reset, tmp_path):
    """They are those of other sources. On the command line they are refused."""
    if "prepared" in words:
        (tmp_path / "prepared").mkdir()
        (tmp_path / "prepared/meta.json").write_text(json.dumps({"format": FORMATS[-1]}))
    save(tiny_config(tmp_path, "run", model__flavour="debug", **of_run), tmp_path / "run")
    of_run = ["--config", str(tmp_path / "run/config.toml"), "--checkpoint", str(tmp_path / "run")]
    of_run += words.format(tmp_path).split()
    _, config = parse(of_run)
    assert getattr(config.data, reset) == getattr(Data(), reset)
    if reset in ("text_field", "loss_on", "join_packages") and "prepared" not in words:
        given = {"text_field": "body", "loss_on": "all", "join_packages": "true"}[reset]
        with refused(f"data.{reset} = .* would be ignored"):
            parse([*of_run, f"--data.{reset}", given])


def test_other_weights_and_patterns_than_those_that_are_evaluated_are_refused(tmp_path):
    """On the command line, as is what only training reads. Those of a run's file are left out."""
    more = {"attention__pattern": "moba", "optimizer__lr": 1.0}
    config = tiny_config(tmp_path, "run", model__flavour="debug", **more)
    save(config, tmp_path / "run")
    of_run = ["--config", str(tmp_path / "run/config.toml")]
    _, config = parse([*of_run, "--checkpoint=run", "--attention=dense"])
    assert config.attention.pattern == "dense"
    with refused('attention.pattern = "xattention" would be ignored, as attention is dense; leave'):
        parse([*of_run, "--checkpoint=run", "--attention=dense", "--attention.pattern=xattention"])
    recall = "--attention.vertical_slash.recall=0.5"
    with refused('recall would be ignored with attention.pattern = "dense"; leave it out'):
        parse([*of_run, "--checkpoint=run", "--attention=dense", recall])
    with refused('recall would be ignored with attention.pattern = "moba"; leave it out'):
        parse([*of_run, "--checkpoint=run", recall])
    with refused('model.initial_hf = "a" would be ignored, as the weights are those of "b"; leave'):
        parse([*of_run, "--hf=b", "--model.initial_hf=a"])
    for given in ("model.random_weights=true", "lora.rank=4", "lora.alpha=4"):
        with refused(f"{given.partition('=')[0]} = .* would be ignored, as the weights are those"):
            parse([*of_run, "--hf=b", f"--{given}"])
    with refused("optimizer.lr, metrics.log_every would be ignored; leave out what only training"):
        parse([*of_run, "--checkpoint=run", "--optimizer.lr=1", "--metrics.log_every=1"])


# Inspection

BLOCK, TOKENS, PADDED = 16, 150, 160
MASK = Causal(valid=(TOKENS,))


def _dense_mass(q, k) -> torch.Tensor:
    """[Hq, S, S] of the first sequence."""
    scores = (q[0] @ k[0].mT * 8**-0.5).masked_fill(~MASK.dense(PADDED), -torch.inf)
    return scores.softmax(-1)


def test_masses_against_the_table_of_all_pairs():
    attention = Attention(block_size=BLOCK)
    attention.vertical_slash.sinks = 2
    q, k, _ = structured_qkv(1, 2, 1, PADDED, 8)
    ranges = MASK.rows(PADDED)
    layer = inspect_layer(q, k, ranges, attention, one_rank(BLOCK), TOKENS, seed=0)
    dense = _dense_mass(q, k)[:, :TOKENS]
    last = dense[:, -BLOCK:]
    torch.testing.assert_close(layer.vertical_mass, last.mean(1))
    # All rows are sampled, and the last ones count twice.
    rows = torch.cat([dense, last], 1)
    of_row = torch.cat([torch.arange(TOKENS), torch.arange(TOKENS - BLOCK, TOKENS)])
    distance = of_row[:, None] // BLOCK - torch.arange(PADDED) // BLOCK
    by_distance = [(rows * (distance == d)).sum((1, 2)) for d in range(10)]
    torch.testing.assert_close(layer.slash_mass, torch.stack(by_distance, 1) / rows.shape[1])
    ranked = dense.sort(-1, descending=True).values
    keys = torch.arange(1, TOKENS + 1)
    for number, count in enumerate(TOP_K):
        mass = ranked[..., :count].sum(-1).mean(-1)
        torch.testing.assert_close(layer.top_k[:, number], mass)
        density = keys.clamp(max=count).sum() / keys.sum()
        assert layer.top_k_density[number].item() == pytest.approx(density.item())
    assert min(layer.curves[len(SHARES) - 1]["verticals"]) > 20  # without caps
    assert list(dict.fromkeys(point["pattern"] for point in layer.curves)) == [
        "vertical_slash joint",
        "vertical_slash independent",
        "xattention",
        "moba, chunks of 16",
    ]


@pytest.mark.parametrize(
    "pattern",
    [
        VerticalSlash(0.7, sinks=2, dense_below=BLOCK, budget="joint"),
        XAttention(4, 0.7, BLOCK),
        MoBA(32, 2),
    ],
    ids=lambda pattern: pattern.name,
)
def test_curves_against_the_table_of_all_pairs(pattern):
    q, k, _ = structured_qkv(1, 2, 1, PADDED, 8)
    rows, cp = MASK.rows(PADDED), one_rank(BLOCK)
    index, at = pattern.select(q, k, rows, cp), torch.tensor([3, 40, 77, 149])
    pairs = index.dense(MASK)[0][:, at]
    for head in range(2):
        of_head = index.of_heads(slice(head, head + 1))
        selected = of_head.selected_keys(at)[0, 0]
        assert torch.equal(selected & allowed_keys(rows, at), pairs[head])
    mass = _dense_mass(q, k)[:, at]
    point = curve(pattern, q, k, rows, cp, at, mass)
    assert point["density"] == pytest.approx((pairs.sum((1, 2)) / (at + 1).sum()).tolist())
    assert point["recall"] == pytest.approx((mass * pairs).sum(-1).mean(-1).tolist())
    assert ("verticals" in point) == isinstance(pattern, VerticalSlash)


def test_a_full_disk_and_a_folder_that_cannot_be_made_are_named(
    folder, tmp_path, monkeypatch, capsys
):
    run = folder / "run"
    of_run = f"--config {run}/config.toml --checkpoint {run} --out {tmp_path}/out".split()
    sizes = {inspect: ["--length=256"], evaluate: SMALL.split()}
    for module, words in sizes.items():
        with room_for(100):
            error = error_of(capsys, module.main, *words, *of_run)
        dist.destroy_process_group()
        assert f"File too large: '{tmp_path}/out'" in error
    # Nothing is computed that could not be written.
    (tmp_path / "file").touch()
    for module, words in sizes.items():
        monkeypatch.setattr(module, "build_scorer", None)
        error = error_of(capsys, module.main, *words, *of_run[:-1], str(tmp_path / "file"))
        assert f"File exists: '{tmp_path}/file'" in error


def test_a_checkpoint_is_inspected(folder, tmp_path):
    run = folder / "run"
    words = f"--checkpoint {run} --length 256 --rows 20 --layers 1 --out {tmp_path}/out"
    assert inspect.main(["--config", f"{run}/config.toml", *words.split()]) == 0
    dist.destroy_process_group()
    found = json.loads((tmp_path / "out/inspection.json").read_text())
    (layer,) = found["layers"]
    assert layer["layer"] == 1 and found["about"]["checkpoint"].endswith("step-2")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"inspection.json", "layer-1.png", "curves.png", "top_k.png"}
    of_joint = []
    for point in layer["curves"]:
        assert all(0 < x <= 1 for x in point["density"])
        assert all(0 < x <= 1 + 1e-5 for x in point["recall"])
        if point["pattern"] == "vertical_slash joint":
            of_joint.append(point["density"])
    assert len(of_joint) == len(SHARES) and of_joint[0] <= of_joint[-1]
