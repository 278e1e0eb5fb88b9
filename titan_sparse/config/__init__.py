"""The TOML configuration. Imports no torch: it is read and checked before any process group exists,
so that mistakes are reported at once.

sections.py: the sections as dataclasses, with the range and the meaning of each option.
reading.py: command line and TOML to a Config, and back. checking.py refuses impossible values and
combinations, and derives the sizes that other parts need. ignored.py refuses options that would do
nothing. sources.py: the parts of data.source and their files. start.py: what torchrun has set, and
the files that a run begins with. changes.py: what a start changes in the run that it resumes.
"""

from titan_sparse.options.extras import need_here

need_here("train")

from titan_sparse.config.checking import (
    check,
    load_and_check,
    needle_lengths,
    padding_multiple,
    resolve_cp_intra,
    resolve_overlap_stages,
    trains_random_base,
)
from titan_sparse.config.reading import ConfigError, Refusal, field_docs, load, save, to_toml, usage
from titan_sparse.config.sections import (
    ActivationCheckpoint,
    Attention,
    Checkpoint,
    Compile,
    Config,
    Data,
    Flags,
    Float8,
    Guard,
    Lora,
    LRScheduler,
    Model,
    Optimizer,
    Parallelism,
    Profiling,
)
from titan_sparse.config.start import check_launch, check_start, world_from_environment, world_of
