"""Which backend computes what, which one refuses, and an installation of
flash-attn-4 with missing parts.

The GPU is pretended.
"""

import importlib.util
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.refusals import refused
from titan_sparse.attention import attend, backends
from titan_sparse.attention.backends import cudnn, flex
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.config import Attention
from titan_sparse.kernels import block_sparse
from titan_sparse.training.attention import backend_case

CASE = ("cuda", torch.bfloat16, 128, 128)
WIDE = ("cuda", torch.bfloat16, 256, 128)
RESULTS = Path(__file__).parents[3] / "benchmarks/results"


def _forget() -> None:
    flex._import_failure.cache_clear()


@pytest.fixture
def patch(monkeypatch):
    """A Hopper GPU with cuDNN and Triton, and without FlashAttention-4."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(cudnn, "_failure", lambda dtype, head_dim: None)
    monkeypatch.setattr(block_sparse, "INTERPRETED", False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _forget()
    yield monkeypatch
    _forget()


def _install_flash(folder: Path, patch: pytest.MonkeyPatch, interface: str) -> None:
    """A package flash_attn.cute whose kernels' module says `interface`."""
    for name in ("flash_attn/cute/interface.py", "cutlass/cute.py"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    (folder / "flash_attn/cute/interface.py").write_text(interface)
    patch.syspath_prepend(folder)
    kept = [name for name in sys.modules if name.partition(".")[0] not in ("flash_attn", "cutlass")]
    patch.setattr(sys, "modules", {name: sys.modules[name] for name in kept})
    patch.setattr(importlib.util, "find_spec", lambda name: name)
    _forget()


def test_auto(patch, tmp_path):
    """FlashAttention-4 where it is installed, cuDNN for dense attention, our
    kernels for the rest."""
    others = [
        ("triton", CASE, {"dynamic": True}),
        ("triton", CASE, {"slices": True}),
        ("triton", ("cuda", torch.float32, 128, 128), {}),
        ("cudnn", WIDE, {}),
        ("eager", ("cuda", torch.float64, 128, 128), {}),
        ("eager", ("cpu", torch.bfloat16, 128, 128), {}),
    ]
    for expected, case, options in [("cudnn", CASE, {}), *others]:
        assert backends.choose("auto", *case, **options) == expected
    assert "not flex, since" in backends.explain("auto", *CASE)
    assert "cudnn" not in backends.explain("auto", *CASE, dynamic=True)
    _install_flash(tmp_path, patch, "")
    others[0] = ("flex", CASE, {"dynamic": True})
    others.append(("triton", CASE, {"dynamic": True, "is_short": True}))
    for expected, case, options in [("flex", CASE, {}), *others]:
        assert backends.choose("auto", *case, **options) == expected
    # The same is expected of such a machine on one without a GPU.
    patch.setattr(torch.cuda, "is_available", lambda: False)
    for expected, case, options in [("flex", CASE, {}), *others]:
        assert backends.choose("auto", *case, here=False, **options) == expected
    assert backends.choose("auto", *CASE) == "triton"


@pytest.mark.parametrize(
    "name, case, words",
    [
        ("cudnn", ("cpu", torch.bfloat16, 128, 128), "needs device cuda, not cpu"),
        ("cudnn", ("cuda", torch.float32, 128, 128), "torch.float16, not torch.float32"),
        ("cudnn", ("cuda", torch.bfloat16, 128, 32), "attention.block_size 64 or 128, not 32"),
        ("cudnn", ("cuda", torch.bfloat16, 192, 128), "head_dim .*, not 192"),
        ("cudnn", (*CASE, True), "does not compute masks of Slices"),
        ("cudnn", (*CASE, False, True), "this pattern is sparse"),
        ("flex", ("cuda", torch.float64, 128, 128), "not torch.float64"),
        ("flex", ("cuda", torch.bfloat16, 128, 64), "attention.block_size 128, not 64"),
        ("flex", ("cuda", torch.bfloat16, 272, 128), "not 272"),
        ("triton", ("cpu", torch.float32, 64, 64), "needs device cuda, not cpu"),
        ("triton", ("cuda", torch.float64, 64, 64), "torch.float64"),
        ("triton", ("cuda", torch.float32, 64, 32), "block_size 64 or 128, not 32"),
        ("triton", ("cuda", torch.float32, 72, 64), "head_dim .* not 72"),
        ("cuda", CASE, "is unknown"),
    ],
)  # fmt: skip
def test_refusals(patch, name, case, words):
    with refused(words):
        backends.choose(name, *case)
    assert backends.choose("auto", *case) != name


@pytest.mark.parametrize(
    "target, name, value, words",
    [
        (torch.cuda, "get_device_capability", lambda: (7, 5), "Ampere"),
        (torch.backends.cudnn, "is_available", lambda: False, "no cuDNN"),
        (torch.version, "cuda", None, "no cuDNN"),
        (torch, "are_deterministic_algorithms_enabled", lambda: True, "not deterministic"),
        (cudnn, "_failure", lambda dtype, head_dim: "it says no", "it says no"),
    ],
)
def test_where_cudnn_does_not_run(patch, target, name, value, words):
    patch.setattr(target, name, value)
    with pytest.raises(ValueError, match=f'"cudnn" cannot run: .*{words}.*; write "triton"'):
        backends.choose("cudnn", *CASE)
    banner = backends.explain("auto", *CASE)
    assert banner.startswith("triton") and "not cudnn, since" in banner and words in banner


@pytest.mark.parametrize(
    "interface, words",
    [
        ("import cutlass._no_such_part", "No module named 'cutlass._no_such_part'"),
        # As cutlass does without its package for the CUDA version.
        ("raise RuntimeError('no toolkit found\\nand more')", "no toolkit found"),
    ],
)
def test_a_half_installation_is_not_chosen(patch, tmp_path, interface, words):
    _install_flash(tmp_path, patch, interface)
    assert backends.choose("auto", *CASE) == "cudnn"
    banner = backends.explain("auto", *CASE)
    assert "flash-attn-4 is installed in part" in banner and words in banner
    assert "\n" not in banner
    with pytest.raises(ValueError, match='"flex" cannot run: .* in part .*; write "triton"'):
        backends.choose("flex", *CASE)


def test_auto_is_fast_at_the_density_of_each_recall(patch, tmp_path):
    """Within 3 % of the faster one by the measured times, interpolated between densities."""
    _install_flash(tmp_path, patch, "")
    times, densities = defaultdict(list), {}
    for row in json.loads((RESULTS / "backends_h200.json").read_text())["rows"]:
        times[row["heads"], row["head_dim"], row["tokens"]].append(row)
    for row in json.loads((RESULTS / "choose_h200.json").read_text())["rows"]:
        if row["setting"] != "dense":
            densities[row["tokens"], float(row["setting"].split()[1])] = row["density"]
    for (_, head_dim, tokens), rows in times.items():
        for measured, recall in [case for case in densities if case[0] == max(tokens, 16384)]:
            # Shorter sequences by the law of docs/benchmarks.md.
            density = densities[measured, recall] * (measured / tokens) ** 0.24
            ms = {}
            for name in ("flex", "triton"):
                points = [(row["density"], row[f"{name}_ms"]) for row in rows]
                (x, y), (last_x, last_y) = points[-2:]
                # A straight line beyond the last one.
                points.append((1, last_y + (1 - last_x) * (last_y - y) / (last_x - x)))
                ms[name] = np.interp(density, *zip(*points))
            is_short = tokens < backends.short_below(recall, head_dim)
            case = ("cuda", torch.bfloat16, head_dim, 128)
            chosen = backends.choose("auto", *case, dynamic=True, is_short=is_short)
            # Times are rounded to 0.01 ms.
            assert ms[chosen] <= 1.03 * min(ms.values()) + 0.01, (head_dim, tokens, recall, ms)


@pytest.mark.parametrize("recall, is_short", [(0.9, True), (0.99, False)])
def test_attention_and_configuration_ask_for_their_recall(monkeypatch, recall, is_short):
    asked = []
    monkeypatch.setattr(backends, "choose", lambda *case: asked.append(case[-1]) or "eager")
    q = torch.randn(1, 1, 2048, 64)
    attend(q, q, q, pattern=VerticalSlash(recall=recall, dense_below=128))
    section = Attention()
    section.vertical_slash.recall = recall
    case = backend_case(section, "cuda", torch.bfloat16, 64, 2048)
    assert asked == [case["is_short"]] == [is_short]
