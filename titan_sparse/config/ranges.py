"""The range of every number of the configuration, and what its texts may hold."""

from operator import attrgetter

from titan_sparse.config.keys import KINDS
from titan_sparse.config.reading import require, show
from titan_sparse.config.sections import Config

# Least value -> the keys that it holds for.
_MINIMUMS = {
    0: (
        "model.vocab_size",
        "model.layers",
        "model.rope_original_length",
        "model.rope_theta",
        "data.min_document_length",
        "training.seed",
        "training.max_norm",
        "training.z_loss",
        "training.mlp_chunk_tokens",
        "training.stop_grace_seconds",
        "parallelism.cp_intra",
        "attention.sliding_window",
        "attention.window_sinks",
        "attention.overlap_stages",
        "attention.overlap_stages_backward",
        "attention.vertical_slash.probe",
        "attention.vertical_slash.sinks",
        "attention.vertical_slash.min_columns",
        "attention.vertical_slash.min_slashes",
        "attention.vertical_slash.max_slashes",
        "attention.vertical_slash.dense_below",
        "attention.xattention.dense_below",
        "optimizer.weight_decay",
        "lora.rank",
        "lora.dropout",
        "lr_scheduler.warmup_steps",
        "lr_scheduler.total_steps",
        "guard.spike_factor",
        "guard.warmup_steps",
        "guard.max_rollbacks",
        "checkpoint.keep_latest_k",
        "metrics.recall_every",
        "metrics.peak_tflops",
        "metrics.pictures_every",
    ),
    1: (
        "model.rope_factor",
        "training.steps",
        "training.seq_len",
        "training.local_batch_size",
        "training.gradient_accumulation_steps",
        "training.loss_chunk_tokens",
        "training.gc_interval",
        "parallelism.dp_replicate",
        "parallelism.cp",
        "parallelism.first_step_timeout_seconds",
        "parallelism.timeout_seconds",
        "attention.vertical_slash.local_diagonals",
        "attention.vertical_slash.max_columns",
        "attention.xattention.stride",
        "attention.moba.chunk_size",
        "attention.moba.top_k",
        "lora.alpha",
        "checkpoint.interval",
        "guard.average_steps",
        "guard.max_skips_in_a_row",
        "metrics.log_every",
        "metrics.recall_rows",
        "profiling.first_step",
        "profiling.steps",
        "validation.every",
        "validation.windows",
        "validation.position_buckets",
        "validation.needle_depths",
        "validation.needle_samples",
    ),
    -1: ("checkpoint.load_step",),
}

_MAXIMUM = 2**31 - 1
"""Of every integer that _MAXIMUMS does not hold. Tokens, steps and seconds stay far below it, and
sums and products of a few stay within int64."""

# Key -> its greatest value. Loops of Python count up to most of them: a slip would hang the run.
_MAXIMUMS = {
    "model.layers": 10**4,
    "model.vocab_size": 10**7,
    "lora.rank": 10**5,
    "training.local_batch_size": 10**4,
    "training.gradient_accumulation_steps": 10**6,
    "metrics.recall_rows": 10**6,
    "validation.windows": 10**6,
    # What torch.manual_seed takes and TOML can write.
    "training.seed": 2**63 - 1,
}

_NEVER_EMPTY = (
    "data.source",
    "data.tokenizer",
    "data.format",
    "data.text_field",
    "data.messages_field",
    "data.split",
    "lora.targets",
    "training.output_dir",
)


def check_ranges(config: Config) -> None:
    """Refuses numbers below their least or above their greatest value, and texts that no file can
    be named by. Raises ConfigError, one line that names the key.

    Ranges that are no closed interval, or that depend on other keys, are in checking.py.
    """
    for key, kind in KINDS.items():
        value = attrgetter(key)(config)
        if kind is int:
            maximum = _MAXIMUMS.get(key, _MAXIMUM)
            require(
                value <= maximum,
                f"{key} = {show(value)} is too large; write {maximum} or less",
            )
        if kind is str:
            _check_text(key, value)
    for minimum, keys in _MINIMUMS.items():
        for key in keys:
            value = attrgetter(key)(config)
            require(
                value >= minimum,
                f"{key} = {show(value)} is too small; write {minimum} or more",
            )


def _check_text(key: str, text: str) -> None:
    default = attrgetter(key)(Config())
    require(
        text != "" or key not in _NEVER_EMPTY,
        f"{key} is empty; write {show(default)} or another",
    )
    require("\0" not in text, f"{key} = {show(text)} holds a zero byte; leave it out")
    # Bytes of the command line that are no UTF-8 arrive as lone surrogates.
    is_utf8 = not any("\ud800" <= letter <= "\udfff" for letter in text)
    require(is_utf8, f"{key} = {ascii(text)} is no UTF-8; write other letters")
