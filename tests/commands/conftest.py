from pathlib import Path

import pytest

from tests.runs import tiny_config, train, write_texts
from titan_sparse.config import save


@pytest.fixture(scope="package")
def folder(tmp_path_factory) -> Path:
    """A float32 run of the flavour debug, which other processes also know, with a checkpoint after two steps."""
    folder = tmp_path_factory.mktemp("runs")
    write_texts(folder / "texts")
    config = tiny_config(
        folder,
        "run",
        model__flavour="debug",
        training__steps=2,
        training__dtype="float32",
        checkpoint__enable=True,
        optimizer__lr=0.05,
    )
    train(config)
    save(config, config.training.output_dir)
    return folder
