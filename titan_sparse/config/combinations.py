"""Which options go together: the table of those that would be ignored, and what attention cannot
run.

check() of checking.py calls both.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from titan_sparse.config.reading import ConfigError, require, show
from titan_sparse.config.sections import Attention, Config
from titan_sparse.config.sources import source_formats, source_weights


class Rule(NamedTuple):
    """Options that have to keep their defaults where they would do nothing.

    keys: names in one section, such as "optimizer.beta1 beta2". Nothing after the dot: all of it.
    because: the key that is the reason. idle: its values with which they do nothing, or whether
    they do nothing with a configuration. instead: the value of `because` with which they would do
    something; None: "another" one.
    """

    keys: str
    because: str
    idle: tuple[object, ...] | Callable[[Config], bool]
    instead: object = None

    def is_idle(self, config: Config) -> bool:
        if callable(self.idle):
            return self.idle(config)
        return attrgetter(self.because)(config) in self.idle


def _sources(config: Config) -> set[str]:
    return set(source_weights(config.data.source))


def _formats(config: Config) -> set[str]:
    return set(source_formats(config.data).values())


def _validates_python(config: Config) -> bool:
    return (config.validation.source or config.data.source) == "python"


_ACROSS_RANKS = (
    "attention.balance_costs backward_circulates gradient_dtype route_by overlap_stages "
    "overlap_stages_backward"
)
_RULES = (
    Rule(
        "model.rope_factor rope_original_length", "model.rope_scaling", ("flavour", "none"), "yarn"
    ),
    Rule("data.join_packages", "data.source", lambda config: "python" not in _sources(config)),
    Rule(
        "data.text_field bad_rows subset split",
        "data.source",
        lambda config: _sources(config) == {"python"},
    ),
    Rule("data.text_field", "data.format", lambda config: "text" not in _formats(config)),
    Rule("data.messages_field", "data.format", lambda config: "messages" not in _formats(config)),
    Rule(
        "data.loss_on chat_template chat_template_kwargs",
        "data.format",
        lambda config: _formats(config) == {"text"},
        "messages",
    ),
    Rule("attention.balance_costs", "attention.layout", ("contiguous", "zigzag", "striped")),
    Rule("attention.window_sinks", "attention.sliding_window", (0,), 4096),
    Rule(_ACROSS_RANKS, "parallelism.cp", (1,), 2),
    Rule(
        "attention.route_by",
        "attention.schedule",
        ("auto", "local", "all_gather", "group_cast"),
        "ring",
    ),
    Rule(
        "attention.backward_circulates", "attention.schedule", ("all_gather", "group_cast"), "ring"
    ),
    Rule(
        "attention.overlap_stages overlap_stages_backward",
        "attention.schedule",
        ("auto", "local", "all_gather", "ring", "double_ring"),
        "group_cast",
    ),
    Rule(
        "activation_checkpoint.attention_recompute", "activation_checkpoint.mode", ("none",), "full"
    ),
    Rule("optimizer.beta1 beta2 eps", "optimizer.name", ("SGD",), "AdamW"),
    Rule("float8.recipe filter", "float8.enable", (False,), True),
    Rule("lora.", "lora.rank", (0,), 16),
    Rule(
        "checkpoint.load_step initial_load_path last_save_in_hf",
        "checkpoint.enable",
        (False,),
        True,
    ),
    Rule("metrics.pictures_every", "metrics.tensorboard", (False,), True),
    Rule("validation.", "validation.enable", (False,), True),
    Rule("validation.needle_depths needle_samples", "validation.needle_lengths", ("",), "4096"),
    Rule("validation.split", "validation.source", _validates_python),
)


def check_ignored(config: Config, section: str | None = None) -> None:
    """Refuses options that would be ignored (of one section, or of all). Raises ConfigError."""
    default = Config()
    for rule in _RULES:
        of_section, _, names = rule.keys.partition(".")
        if section not in (None, of_section) or not rule.is_idle(config):
            continue
        reason = f"{rule.because} = {show(attrgetter(rule.because)(config))}"
        instead = f"another {rule.because}"
        if rule.instead is not None:
            instead = f"{rule.because} = {show(rule.instead)}"
        for name in names.split() or vars(getattr(default, of_section)):
            key = f"{of_section}.{name}"
            value = attrgetter(key)(config)
            unset = attrgetter(key)(default)
            require(
                value == unset,
                f"{key} = {show(value)} would be ignored with {reason}; write "
                f"{key} = {show(unset)} or {instead}",
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
    """Check the options of the pattern in use. Those of other patterns may have any value in
    range."""
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
