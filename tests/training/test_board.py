"""TensorBoard opens on the loss, and its pictures can be read."""

import io
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.distributed import run_processes
from tests.runs import metrics_of, tiny_config, train, write_texts
from titan_sparse.training.metrics_output import tag
from titan_sparse.training.pictures import heat_map

DARK, MIDDLE, BRIGHT = (68, 1, 84), (32, 144, 140), (253, 231, 36)
"""viridis at 0, 1/2 and 1"""


def _train(folder: Path) -> None:
    config = tiny_config(
        folder,
        "run",
        training__steps=4,
        parallelism__cp=2,
        checkpoint__enable=True,
        checkpoint__interval=2,
        metrics__tensorboard=True,
        metrics__pictures_every=2,
    )
    train(config)


def _sorted(tags: list[str]) -> list[str]:
    """As TensorBoard sorts tags: by letters, with slashes and underscores before them."""
    return sorted(tags, key=lambda tag: ["/_".find(c) - 2 if c in "/_" else ord(c) for c in tag])


def test_tensorboard_opens_on_the_loss(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(2, _train, tmp_path)
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    tags = _sorted(events.Tags()["scalars"])
    assert tags[:2] == ["Train/grad_norm", "Train/loss"]
    sections = [name for name, _ in itertools.groupby(tags, lambda tag: tag.split("/")[0])]
    assert sections == [
        "Train",
        "attention",
        "attention_capped_by_layer",
        "attention_density_by_layer",
        "attention_recall_by_layer",
        "comm",
        "memory",
        "speed",
    ]
    lines = metrics_of(tiny_config(tmp_path, "run"))
    for field in lines[-1].keys() - {"step", "time", "mfu"}:
        assert events.Scalars(tag(field))[-1].value == pytest.approx(lines[-1][field]), field
    # The save after step 2 is in the line of step 3; that after the last step is in none.
    assert [line["step"] for line in lines if "save_seconds" in line] == [3]
    assert len(events.Scalars("speed/save_seconds")) == 1
    times = [line["time"] for line in lines]
    assert times == sorted(times) and events.Scalars("Train/loss")[-1].wall_time - times[-1] < 5

    pictures = [
        f"attention/{name}" for name in ("density_heat_map", "recall_heat_map", "selection")
    ]
    assert sorted(events.Tags()["images"]) == pictures
    for name in pictures:
        assert [event.step for event in events.Images(name)] == [1, 2, 4]
        encoded = events.Images(name)[-1].encoded_image_string
        image = np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))
        assert image.shape[0] > 100 and image.shape[1] > 200
        # White paper, black letters.
        assert (image == 255).all(-1).any() and (image < 60).all(-1).any()


def _pixels(figure: Figure) -> np.ndarray:
    """Colors of the picture, uint8 [h, w, 3], as a PNG holds them."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return np.asarray(Image.open(file).convert("RGB"))


def _color_at(figure: Figure, pixels: np.ndarray, head: float, layer: float) -> tuple:
    column, row = figure.axes[0].transData.transform((head, layer))
    return tuple(pixels[pixels.shape[0] - 1 - int(row), int(column)].tolist())


def test_a_heat_map_has_a_color_for_each_head():
    values = torch.tensor([[0.0, 1.0, 1.0], [torch.nan, 0.5, 0.0]])
    for figure, middle in (
        (heat_map(values, "share of what"), MIDDLE),
        # Cells of a head that are all alike, and a root is drawn.
        (heat_map(values.square()[:, :, None, None].expand(2, 3, 4, 4), "", (0, 0.25, 1)), MIDDLE),
    ):
        axes, scale = figure.axes
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("query head", "layer")
        pixels = _pixels(figure)
        assert _color_at(figure, pixels, -0.1, -0.1) == DARK
        assert _color_at(figure, pixels, 0.9, -0.1) == BRIGHT
        assert _color_at(figure, pixels, 0.9, 0.9) == middle
        assert _color_at(figure, pixels, -0.1, 0.9) == (255, 255, 255)
    # The gap on the right, and a color's share beside it.
    assert _color_at(figure, pixels, 1.4, 0) == (255, 255, 255)
    assert list(scale.get_yticks()) == [0, 0.5, 1]
    assert [text.get_text() for text in scale.get_yticklabels()] == ["0", "0.25", "1"]
