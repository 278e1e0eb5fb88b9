"""Steps of the ready configurations, for the tests of the estimate."""

from pathlib import Path

from titan_sparse.config import load_and_check
from titan_sparse.estimate.step import StepShape, step_of
from titan_sparse.from_config import build_pattern
from titan_sparse.models.flavours import resolve

ROOT = Path(__file__).parents[2]


def step_of_words(config: str, backend: str = "triton", ranks: int = 1, *words: str) -> StepShape:
    """The step of a ready configuration with further words, on one node."""
    path = ROOT / f"train_configs/{config}.toml"
    checked, _ = load_and_check(["--config", str(path), *words], ranks, ranks)
    model = resolve(**vars(checked.model))
    pattern = build_pattern(checked.attention)
    return step_of(checked, model, pattern, backend, ranks, ranks)
