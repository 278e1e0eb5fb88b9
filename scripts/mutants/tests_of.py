"""Which test files may notice a fault in a source file: those of its folder, and whole runs."""

from pathlib import Path

ROOT = Path(__file__).parents[2]

_RUNS = ["tests/test_trainer.py", "tests/evaluation/test_validation.py", "tests/training"]
_ATTENTION = ["tests/attention", "tests/kernels"]

PLACES: dict[str, list[str]] = {
    "titan_sparse/trainer.py": _RUNS,
    "titan_sparse/build.py": _RUNS,
    "titan_sparse/loss.py": ["tests/test_loss.py", "tests/kernels/test_cross_entropy.py"],
    "titan_sparse/training/build_model.py": _RUNS,
    "titan_sparse/training/guard.py": _RUNS,
    "titan_sparse/training/optimizer.py": _RUNS,
    "titan_sparse/training/checkpoint": ["tests/training"],
    "titan_sparse/models/decoder.py": ["tests/models"],
    "titan_sparse/data/loader.py": ["tests/data", "tests/training/checkpoint/test_resuming.py"],
    "titan_sparse/data/stream.py": ["tests/data"],
    "titan_sparse/data/packing.py": ["tests/data"],
    "titan_sparse/attention": _ATTENTION,
    "titan_sparse/integrations/transformers": ["tests/integrations/transformers"],
    "titan_sparse/kernels/antidiagonals/naive.py": _ATTENTION,
    "titan_sparse/kernels/prices/naive.py": _ATTENTION,
    "titan_sparse/kernels/probe/naive.py": _ATTENTION,
}
"""Source files or folders -> test files or folders."""


def _files(place: str, pattern: str) -> list[str]:
    path = ROOT / place
    found = [path] if path.is_file() else sorted(path.rglob(pattern))
    return [str(file.relative_to(ROOT)) for file in found]


TESTS: dict[str, list[str]] = {
    source: [test for tests in places for test in _files(tests, "test_*.py")]
    for place, places in PLACES.items()
    for source in _files(place, "*.py")
    if not source.endswith("__init__.py")
}
