from pathlib import Path

import pytest

from tests.runs import debug_run, write_texts


@pytest.fixture(scope="package")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_texts(folder / "texts")
    debug_run(folder, optimizer__lr=0.05)
    return folder
