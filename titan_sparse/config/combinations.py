"""Which options go together: the table of those that would be ignored, and what attention cannot run.

check() of checking.py calls both.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from titan_sparse.config.reading import ConfigError, require, show
from titan_sparse.config.sections import Attention, Config, Lora, Validation
from titan_sparse.config.sources import source_formats, source_weights


class Rule(NamedTuple):
    """Keys that have to keep their defaults where they would do nothing.

    section: of the keys, which are names in it. used: whether they do something. because: the keys
    whose values are the reason. instead: what to write if they should do something.
    """

    section: str
    keys: tuple[str, ...]
    used: Callable[[Config], bool]
    because: tuple[str, ...]
    instead: str


def _has_format(*formats: str) -> Callable[[Config], bool]:
    return lambda config: bool(set(formats) & set(source_formats(config.data).values()))


def _has_cp(config: Config) -> bool:
    return config.parallelism.cp > 1


def _has_python(config: Config) -> bool:
    return "python" in source_weights(config.data.source)


_CHATS = ("messages", "prompt_completion")
_CP = "parallelism.cp = 2 or more"
_RING = 'attention.schedule = "ring"'
_MEASURES = "validation.enable = true"

_RULES = (
    Rule(
        "model",
        ("rope_factor", "rope_original_length"),
        lambda config: config.model.rope_scaling in ("yarn", "llama3"),
        ("model.rope_scaling",),
        'model.rope_scaling = "yarn" or "llama3"',
    ),
    Rule("data", ("join_packages",), _has_python, ("data.source",), 'data.source = "python"'),
    Rule(
        "data",
        ("text_field", "bad_rows", "subset", "split"),
        lambda config: set(source_weights(config.data.source)) != {"python"},
        ("data.source",),
        "another data.source",
    ),
    Rule("data", ("text_field",), _has_format("text"), ("data.format",), 'data.format = "text"'),
    Rule(
        "data",
        ("messages_field",),
        _has_format("messages"),
        ("data.format",),
        'data.format = "messages"',
    ),
    Rule(
        "data",
        ("loss_on", "chat_template", "chat_template_kwargs"),
        _has_format(*_CHATS),
        ("data.format",),
        'data.format = "messages" or "prompt_completion"',
    ),
    Rule(
        "attention",
        ("balance_costs",),
        lambda config: config.attention.layout == "balanced",
        ("attention.layout",),
        'attention.layout = "balanced"',
    ),
    Rule(
        "attention",
        ("window_sinks",),
        lambda config: config.attention.sliding_window > 0,
        ("attention.sliding_window",),
        "attention.sliding_window = 4096",
    ),
    Rule(
        "attention",
        (
            "balance_costs",
            "backward_circulates",
            "gradient_dtype",
            "route_by",
            "overlap_stages",
            "overlap_stages_backward",
        ),
        _has_cp,
        ("parallelism.cp",),
        _CP,
    ),
    Rule(
        "attention",
        ("route_by",),
        lambda config: config.attention.schedule in ("ring", "double_ring"),
        ("attention.schedule",),
        _RING,
    ),
    Rule(
        "attention",
        ("backward_circulates",),
        lambda config: config.attention.schedule not in ("all_gather", "group_cast"),
        ("attention.schedule",),
        _RING,
    ),
    Rule(
        "attention",
        ("overlap_stages", "overlap_stages_backward"),
        lambda config: config.attention.schedule == "group_cast",
        ("attention.schedule",),
        'attention.schedule = "group_cast"',
    ),
    Rule(
        "activation_checkpoint",
        ("attention_recompute",),
        lambda config: config.activation_checkpoint.mode != "none",
        ("activation_checkpoint.mode",),
        'activation_checkpoint.mode = "full"',
    ),
    Rule(
        "optimizer",
        ("beta1", "beta2", "eps"),
        lambda config: config.optimizer.name != "SGD",
        ("optimizer.name",),
        "another optimizer.name",
    ),
    Rule(
        "float8",
        ("recipe", "filter"),
        lambda config: config.float8.enable,
        ("float8.enable",),
        "float8.enable = true",
    ),
    Rule(
        "lora",
        tuple(vars(Lora())),
        lambda config: config.lora.rank > 0,
        ("lora.rank",),
        "a rank, such as lora.rank = 16",
    ),
    Rule(
        "checkpoint",
        ("load_step", "initial_load_path", "last_save_in_hf"),
        lambda config: config.checkpoint.enable,
        ("checkpoint.enable",),
        "checkpoint.enable = true",
    ),
    Rule(
        "metrics",
        ("pictures_every",),
        lambda config: config.metrics.tensorboard,
        ("metrics.tensorboard",),
        "metrics.tensorboard = true",
    ),
    Rule(
        "validation",
        tuple(vars(Validation())),
        lambda config: config.validation.enable,
        ("validation.enable",),
        _MEASURES,
    ),
    Rule(
        "validation",
        ("needle_depths", "needle_samples"),
        lambda config: config.validation.needle_lengths != "",
        ("validation.needle_lengths",),
        'lengths, such as validation.needle_lengths = "4096"',
    ),
    Rule(
        "validation",
        ("split",),
        lambda config: (config.validation.source or config.data.source) != "python",
        ("validation.source", "data.source"),
        "another validation.source",
    ),
)


def check_ignored(config: Config, section: str | None = None) -> None:
    """Refuses options that would be ignored (of one section, or of all). Raises ConfigError."""
    default = Config()
    for rule in _RULES:
        if section not in (None, rule.section) or rule.used(config):
            continue
        reasons = [f"{key} = {show(attrgetter(key)(config))}" for key in rule.because]
        for name in rule.keys:
            key = f"{rule.section}.{name}"
            value = attrgetter(key)(config)
            unset = attrgetter(key)(default)
            require(
                value == unset,
                f"{key} = {show(value)} would be ignored with {' and '.join(reasons)}; write "
                f"{key} = {show(unset)} or {rule.instead}",
            )


def check_attention(config: Config) -> None:
    """Refuses impossible [attention] sections: ConfigError, one line."""
    attention = config.attention
    cp = config.parallelism.cp
    size = attention.block_size
    require(
        size >= 16 and size & (size - 1) == 0,
        f"attention.block_size = {size} is not a power of two of at least 16; write 64 or 128",
    )
    require(
        attention.schedule != "local" or cp == 1,
        f'attention.schedule = "local" cannot run with parallelism.cp = {cp}; '
        'write attention.schedule = "auto" or parallelism.cp = 1',
    )
    require(
        attention.schedule != "double_ring" or cp > 1,
        'attention.schedule = "double_ring" needs parallelism.cp above 1; '
        'write attention.schedule = "auto"',
    )
    require(
        attention.mask != "causal" or config.data.sequences != "packed",
        'attention.mask = "causal" would let a query see other documents with data.sequences = '
        '"packed"; write attention.mask = "documents" or data.sequences = "fixed", or '
        'attention.mask = "causal_across_documents" if a query should see them',
    )
    require(
        config.training.dtype != "float64" or attention.gradient_dtype == "float32",
        'attention.gradient_dtype = "bfloat16" would round what training.dtype = "float64" '
        'computes exactly; write attention.gradient_dtype = "float32"',
    )
    _check_window_sinks(attention)
    _check_cudnn(attention, config.training.deterministic)
    _check_pattern(config)
    _check_recompute(config)


def _check_window_sinks(attention: Attention) -> None:
    """A window with sinks gives a query two ranges of keys, which not everything takes."""
    if not attention.window_sinks:
        return
    sinks = f"attention.window_sinks = {attention.window_sinks}"
    require(
        attention.pattern == "dense",
        f'{sinks} does not go with attention.pattern = "{attention.pattern}"; write '
        'attention.pattern = "dense" or attention.window_sinks = 0',
    )
    require(
        attention.backend not in ("cudnn", "flex"),
        f'{sinks} does not go with attention.backend = "cudnn" or "flex"; '
        'write attention.backend = "auto"',
    )


def _check_cudnn(attention: Attention, deterministic: bool) -> None:
    """cuDNN computes dense attention, and its backward adds up in any order."""
    if attention.backend != "cudnn":
        return
    require(
        attention.pattern == "dense",
        'attention.backend = "cudnn" is for attention.pattern = "dense"; '
        'write attention.backend = "auto"',
    )
    require(
        not deterministic,
        'attention.backend = "cudnn" does not go with training.deterministic = true; write '
        'attention.backend = "triton" or training.deterministic = false',
    )


def _check_pattern(config: Config) -> None:
    """The options of the pattern that is used. The others may hold anything in their ranges."""
    attention = config.attention
    options = getattr(attention, attention.pattern)
    try:
        options.check()
        options.check_block_size(attention.block_size)
    except ValueError as error:
        raise ConfigError(f"attention.{error}") from error
    if attention.pattern == "vertical_slash":
        # Without a probe it is one block, which fits: the loader pads sequences to whole blocks.
        require(
            options.probe <= config.training.seq_len,
            f"attention.vertical_slash.probe = {options.probe} is above training.seq_len = "
            f"{config.training.seq_len}; write attention.vertical_slash.probe = 0",
        )


def _check_recompute(config: Config) -> None:
    share = config.activation_checkpoint.attention_recompute
    layout = config.attention.layout
    require(
        share in (0, 1) or layout == "striped" or config.parallelism.cp == 1,
        f'activation_checkpoint.attention_recompute = {share} needs attention.layout = "striped", '
        f'not "{layout}", with parallelism.cp above 1; write attention.layout = "striped" or '
        "activation_checkpoint.attention_recompute = 0 or 1",
    )
