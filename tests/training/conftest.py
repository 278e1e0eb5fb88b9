import os
from pathlib import Path

import pytest

from tests.training.checkpoint.helpers import join_alone


@pytest.fixture
def alone() -> None:
    """Saving and loading are collective."""
    join_alone()


@pytest.fixture
def events(monkeypatch) -> list[str]:
    noted = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor: int) -> None:
        noted.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def noted_rename(source: Path, target: Path) -> None:
        noted.append(f"{source.name} > {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    return noted
