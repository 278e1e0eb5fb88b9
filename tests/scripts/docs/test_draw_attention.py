"""The pictures of scripts.docs.draw_attention: written, and their bars are the pairs that each rank computes."""

import sys

import pytest
import torch

from scripts.docs import draw_attention
from titan_sparse.estimate.planner import table_of

TOKENS, SIZE = 192, 16


@pytest.mark.parametrize(
    "name, layout",
    [
        ("documents", "zigzag"),
        ("prefix_lm", "striped"),
        ("slices", "contiguous"),
        ("sinks", "balanced"),
    ],
)
def test_work_of_the_ranks(tmp_path, name, layout):
    pytest.importorskip("matplotlib")
    mask, out = draw_attention.EXAMPLES[name](TOKENS), tmp_path / "new" / "picture.png"
    index = draw_attention.select("dense", mask, TOKENS, SIZE)
    work = draw_attention.picture(mask, index, layout, 3, "title", str(out))
    by_block = mask.dense(TOKENS)[0].sum(-1).unflatten(0, (-1, SIZE)).sum(-1)
    assert torch.equal(work, by_block[table_of(mask.rows(TOKENS), layout, 3, SIZE)].sum(-1))
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 10_000


def test_commands(tmp_path):
    pytest.importorskip("matplotlib")
    draw_attention.main(["--gallery", str(tmp_path / "gallery.png")])
    draw_attention.main(
        ["--mask", "documents", "--pattern", "vertical_slash", "--out", str(tmp_path / "one.png")]
    )
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("gallery.png", "one.png"))


@pytest.mark.parametrize(
    "words, said",
    [
        (["--mask", "sinks", "--pattern", "vertical_slash", "--out", "x.png"], "not Slices"),
        ([], "one of --out"),
        (["--tokens", "100", "--out", "x.png"], "pad it"),
    ],
)
def test_refusals(words, said, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=said):
        draw_attention.main(words)
    assert not list(tmp_path.iterdir())


def test_needs_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r'needs matplotlib: pip install -e "\.\[eval\]"'):
        draw_attention.gallery("x.png")
