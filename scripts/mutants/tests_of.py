"""Which test files may notice a fault in a source file: those of its folder, and whole runs."""

from pathlib import Path

ROOT = Path(__file__).parents[2]

_RUNS = ["tests/test_trainer.py", "tests/evaluation/test_validation.py", "tests/training"]
_KERNELS = ["tests/kernels", "tests/attention/patterns", "tests/attention/test_attend.py"]
_SCHEDULES = ["tests/attention/schedules", "tests/attention/context_parallel"]

PLACES: dict[str, list[str]] = {
    "titan_sparse/trainer.py": _RUNS,
    "titan_sparse/build.py": _RUNS,
    "titan_sparse/loss.py": ["tests/test_loss.py"],
    "titan_sparse/training/build_model.py": _RUNS,
    "titan_sparse/training/guard.py": _RUNS,
    "titan_sparse/training/optimizer.py": _RUNS,
    "titan_sparse/training/checkpoint": ["tests/training"],
    "titan_sparse/models/decoder.py": ["tests/models"],
    "titan_sparse/data/loader.py": ["tests/data", "tests/training/checkpoint/test_resuming.py"],
    "titan_sparse/data/stream.py": ["tests/data"],
    "titan_sparse/data/packing.py": ["tests/data"],
    "titan_sparse/attention/masks": ["tests/attention/masks", *_KERNELS],
    "titan_sparse/attention/tiles": [*_SCHEDULES, *_KERNELS],
    "titan_sparse/attention/patterns": _KERNELS,
    "titan_sparse/attention/schedules": _SCHEDULES,
    "titan_sparse/attention/context_parallel": _SCHEDULES,
    "titan_sparse/attention/backends/eager.py": ["tests/attention/backends", *_SCHEDULES],
    "titan_sparse/attention/merge.py": ["tests/attention/test_merge.py", *_SCHEDULES],
    "titan_sparse/attention/recomputed.py": ["tests/attention/test_recomputed.py"],
    "titan_sparse/integrations/transformers": ["tests/integrations/transformers"],
    "kernels/antidiagonals/naive.py": _KERNELS,
    "kernels/prices/naive.py": _KERNELS,
    "kernels/probe/naive.py": _KERNELS,
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
