"""The TOML configuration. Imports no torch: it is read and checked before any process group exists,
so that mistakes are told at once.

sections.py: the sections as dataclasses, with a documented field for each key. reading.py: command
line and TOML to a Config, and back. ranges.py, checking.py, checking_attention.py: refuse
impossible values and combinations, and derive the sizes that other parts need. environment.py: what
torchrun has set. checking_start.py, text_files.py: the files and folders that a run begins with.
mixture.py: the parts of data.source.
"""

from titan_sparse.config.checking import (
    check,
    load_and_check,
    needle_lengths,
    padding_multiple,
    resolve_cp_intra,
    resolve_overlap_stages,
)
from titan_sparse.config.checking_lora import trains_random_base
from titan_sparse.config.checking_start import check_start
from titan_sparse.config.environment import check_launch, world_from_environment, world_of
from titan_sparse.config.keys import field_docs
from titan_sparse.config.reading import ConfigError, Refusal, load, save, to_toml, usage
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
    Guard,
    Lora,
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
)

__all__ = [
    "ActivationCheckpoint",
    "Attention",
    "Checkpoint",
    "Compile",
    "Config",
    "ConfigError",
    "Data",
    "Dense",
    "Flags",
    "Float8",
    "Guard",
    "LRScheduler",
    "Lora",
    "Metrics",
    "MoBA",
    "Model",
    "Optimizer",
    "Parallelism",
    "Profiling",
    "Refusal",
    "Training",
    "Validation",
    "VerticalSlash",
    "XAttention",
    "check",
    "check_launch",
    "check_start",
    "field_docs",
    "load",
    "load_and_check",
    "needle_lengths",
    "padding_multiple",
    "resolve_cp_intra",
    "resolve_overlap_stages",
    "save",
    "to_toml",
    "trains_random_base",
    "usage",
    "world_from_environment",
    "world_of",
]
