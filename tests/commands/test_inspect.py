"""titan-sparse inspect, and its numbers against tables of all pairs."""

import json

import pytest
import torch
import torch.distributed as dist

from tests.reference import structured_qkv
from titan_sparse.attention.context_parallel.group import one_rank
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns import MoBA, VerticalSlash, XAttention
from titan_sparse.commands.inspect import main
from titan_sparse.config import Attention
from titan_sparse.evaluation.inspection import SHARES, TOP_K, curve, inspect_layer, keys_of_rows

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
        assert torch.equal(keys_of_rows(of_head, rows, at), pairs[head])
    mass = _dense_mass(q, k)[:, at]
    point = curve(pattern, q, k, rows, cp, at, mass)
    assert point["density"] == pytest.approx((pairs.sum((1, 2)) / (at + 1).sum()).tolist())
    assert point["recall"] == pytest.approx((mass * pairs).sum(-1).mean(-1).tolist())
    assert ("verticals" in point) == isinstance(pattern, VerticalSlash)


def test_a_checkpoint_is_inspected(folder, tmp_path):
    run = folder / "run"
    words = f"--checkpoint {run} --length 256 --rows 20 --layers 1 --out {tmp_path}/out"
    assert main(["--config", f"{run}/config.toml", *words.split()]) == 0
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


@pytest.mark.parametrize(
    "words, reason",
    [
        (["--layers", "0,99"], '--layers = "0,99" are not layers'),
        (["--rows", "0"], "--rows: 0 is too small"),
        (["--length", "20"], "--length 20 is below two blocks"),
        (["--parallelism.cp", "2"], "one process inspects the whole"),
        ([], "holds no complete checkpoint"),
    ],
)
def test_what_cannot_be_inspected_is_refused(tmp_path, capsys, words, reason):
    path = tmp_path / "config.toml"
    path.write_text('[training]\ndevice = "cpu"\n')
    assert main(["--config", str(path), "--checkpoint", str(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.startswith("error: ") and error.count("\n") == 1
