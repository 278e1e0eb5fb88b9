"""The TOML configuration. Imports no torch: all of it runs before any process group exists, and errors come at once.

sections.py: the sections as dataclasses, a documented field per key. reading.py: command line and TOML to a Config,
and back. checking.py, checking_attention.py: refuse impossible combinations; the sizes that other parts derive.
"""

from titan_sparse.config.checking import (
    check,
    load_and_check,
    needle_lengths,
    padding_multiple,
    resolve_cp_intra,
    resolve_overlap_stages,
    world_from_environment,
    world_of,
)
from titan_sparse.config.reading import ConfigError, load, save, to_toml, usage
from titan_sparse.config.sections import (
    ActivationCheckpoint,
    Attention,
    Checkpoint,
    Compile,
    Config,
    Data,
    Dense,
    Flags,
    Float8,
    LRScheduler,
    Metrics,
    MoBA,
    Model,
    Optimizer,
    Parallelism,
    Profiling,
    Training,
    Validation,
    VerticalSlash,
    XAttention,
    field_docs,
)

__all__ = [
    "ActivationCheckpoint", "Attention", "Checkpoint", "Compile", "Config", "ConfigError", "Data", "Dense", "Flags",
    "Float8", "LRScheduler", "Metrics", "MoBA", "Model", "Optimizer", "Parallelism", "Profiling", "Training",
    "Validation", "VerticalSlash", "XAttention", "check",
    "field_docs", "load", "load_and_check", "needle_lengths", "padding_multiple", "resolve_cp_intra",
    "resolve_overlap_stages", "save", "to_toml", "usage",
    "world_from_environment", "world_of",
]
