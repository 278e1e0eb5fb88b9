"""The configuration to evaluate with: that of a run, without what only training uses."""

import dataclasses
import math

from titan_sparse.config import Config, Flags, Parallelism, load, world_from_environment
from titan_sparse.config.reading import require
from titan_sparse.config.sources import single_source


def load_for_evaluation(words: list[str], hf: str | None, dense: bool) -> Config:
    """The configuration of `words`, as train.py takes them: --config FILE and --section.key value.

    hf: a Hugging Face folder in place of the run's model. dense: attend densely, whatever the pattern
    in training. What only training uses is reset, so that it cannot conflict with another mesh. The
    result is not checked yet. Raises ConfigError, one line.
    """
    config, flags = load(words)
    require(flags == Flags(), "flags of train.py would be ignored; leave them out")
    if hf:
        config.model.initial_hf = hf
    if dense:
        config.attention.pattern = "dense"
    if not any(word.startswith("--parallelism.") for word in words):
        _use_mesh_of_launch(config.parallelism, world_from_environment()[0])
    if config.parallelism.cp == 1:  # then ranks do not share a sequence
        config.attention.schedule = "auto"
        config.parallelism.cp_intra = 0
    if config.attention.schedule != "group_cast":
        config.attention.overlap_stages = 0
        config.attention.overlap_stages_backward = 0
    config.attention.backward_circulates = "auto"
    config.attention.route_by = "auto"
    config.attention.gradient_dtype = "float32"
    config.attention.balance_costs = ""
    defaults = Config()
    config = dataclasses.replace(
        config,
        activation_checkpoint=defaults.activation_checkpoint,
        float8=defaults.float8,
        compile=defaults.compile,
        optimizer=defaults.optimizer,
        validation=defaults.validation,
        checkpoint=defaults.checkpoint,
    )
    config.data.source = single_source(config.data.source, "data.source")
    # Each window and each prompt is of one document.
    config.data.sequences = "fixed"
    config.training.mlp_chunk_tokens = 0
    return config


def _use_mesh_of_launch(parallelism: Parallelism, ranks: int) -> None:
    """Share each sequence as in training, if the ranks of this launch allow it.

    The remaining ranks are data-parallel.
    """
    parallelism.dp_replicate = 1
    parallelism.dp_shard = -1
    parallelism.cp_intra = 0
    parallelism.cp = math.gcd(parallelism.cp, ranks)
