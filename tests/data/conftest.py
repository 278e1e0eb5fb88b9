from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is kept in the test's own folder."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
