"""A model small enough for tests, in place of the real one."""

from pathlib import Path

import pytest

from scripts.study.real_model import standard_library_text, train_tokenizer
from tests.models.transformers_models import VOCAB, save_model


@pytest.fixture
def tiny(tmp_path) -> Path:
    """A Llama of random weights for 256 tokens, with a tokenizer."""
    save_model(tmp_path, "llama")
    train_tokenizer(iter([standard_library_text("this.py")]), VOCAB, tmp_path / "tokenizer.json")
    return tmp_path
