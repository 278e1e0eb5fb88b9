"""A flash-attn-4 installation with missing parts is not chosen, and is refused when asked for by name."""

import importlib.util
import sys

import pytest
import torch

from titan_sparse.attention import backends
from titan_sparse.attention.backends import BACKENDS, flash

triton = BACKENDS["triton"]

CASE = ("cuda", torch.bfloat16, 128, 128)


def _forget() -> None:
    flash._installed.cache_clear()
    flash._import_failure.cache_clear()


@pytest.fixture
def hopper(monkeypatch):
    """A GPU that FlashAttention-4 supports, as far as the choice of a backend can see."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    # Whether Triton itself is installed is another question.
    monkeypatch.setattr(triton, "refusal", lambda *case: None)
    _forget()
    yield
    _forget()


def _plant(tmp_path, monkeypatch, interface: str) -> None:
    """Install a package flash_attn.cute whose kernels' module says `interface`."""
    folder = tmp_path / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    (tmp_path / "flash_attn" / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "interface.py").write_text(interface)
    cutlass = tmp_path / "cutlass"
    cutlass.mkdir()
    (cutlass / "__init__.py").touch()
    (cutlass / "cute.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in list(sys.modules):
        if name.partition(".")[0] in ("flash_attn", "cutlass"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


BROKEN = {
    "no module": ("import cutlass._no_such_part", "No module named 'cutlass._no_such_part'"),
    "no library": ("raise OSError('libcuda_part.so: not found\\nand more')", "libcuda_part.so"),
    # As cutlass does without its package for the CUDA version.
    "no CUDA part": ("raise RuntimeError('no toolkit found')", "no toolkit found"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_half_installation_is_not_chosen(name, hopper, tmp_path, monkeypatch):
    interface, words = BROKEN[name]
    _plant(tmp_path, monkeypatch, interface)
    assert importlib.util.find_spec("flash_attn.cute") is not None
    assert backends.choose("auto", *CASE) == "triton"
    banner = backends.explain("auto", *CASE)
    assert "flash-attn-4 is installed in part" in banner and words in banner
    assert "\n" not in banner
    assert not backends.has_flash_attention_4()
    with pytest.raises(ValueError, match="flex cannot run: flash-attn-4 is installed in part"):
        backends.choose("flex", *CASE)


def test_a_whole_installation_is_chosen(hopper, tmp_path, monkeypatch):
    _plant(tmp_path, monkeypatch, "")
    assert backends.choose("auto", *CASE) == backends.choose("flex", *CASE) == "flex"


def test_nothing_installed(hopper, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert flash.missing() == "flash-attn-4 is not installed"
    assert backends.choose("auto", *CASE) == "triton"


def test_head_dim_256_does_without_it(hopper, tmp_path, monkeypatch):
    """Triton computes whether or not it is installed, and the user is not asked to install it."""
    case = ("cuda", torch.bfloat16, 256, 128)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        assert "would be faster" in backends.explain("auto", *CASE)
        assert "would be faster" not in backends.explain("auto", *case)
    _forget()
    _plant(tmp_path, monkeypatch, "")
    assert backends.choose("auto", *CASE) == "flex"
    assert backends.choose("auto", *case) == "triton"
