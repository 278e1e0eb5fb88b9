"""titan_sparse: long-context LLM training with dynamic sparse attention under context parallelism.

As a library (docs/attention.md):

    from titan_sparse import ContextParallel, attend, masks, patterns, recording

As a program: torchrun -m titan_sparse.train --config X.toml. docs/architecture.md has the
words and the contracts.
"""

import importlib

__version__ = "0.2.0"
"""The only place that says it: pyproject.toml reads it from here."""

__all__ = ["ContextParallel", "__version__", "attend", "masks", "patterns", "recording"]

# Loaded at first use. A mistake in a configuration must be told before torch has even been loaded,
# and `import titan_sparse.config` runs this file first.
_HOMES = dict.fromkeys(__all__, "titan_sparse.attention")
_HOMES["recording"] = "titan_sparse.attention.observe"


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # The next access finds it without coming here.
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
