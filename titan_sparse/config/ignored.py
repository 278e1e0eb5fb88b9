"""The options that do nothing because of another one. They have to keep their defaults, so that
nothing that a user writes is ignored."""

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NamedTuple

from titan_sparse.config.reading import KINDS, clash, show
from titan_sparse.config.sections import Config
from titan_sparse.config.sources import has_chats, is_local, source_formats, source_weights


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


def _formats(config: Config) -> set[str]:
    return set(source_formats(config.data).values())


_ACROSS_RANKS = (
    "attention.balance_costs backward_circulates gradient_dtype route_by overlap_stages "
    "overlap_stages_backward"
)
_RULES = (
    Rule(
        "model.rope_factor rope_original_length", "model.rope_scaling", ("flavour", "none"), "yarn"
    ),
    Rule(
        "data.join_packages",
        "data.source",
        lambda config: "python" not in source_weights(config.data.source),
    ),
    Rule(
        "data.text_field bad_rows subset split",
        "data.source",
        lambda config: set(source_weights(config.data.source)) == {"python"},
    ),
    Rule("data.text_field", "data.format", lambda config: "text" not in _formats(config)),
    Rule("data.messages_field", "data.format", lambda config: "messages" not in _formats(config)),
    Rule(
        "data.loss_on chat_template chat_template_kwargs",
        "data.format",
        lambda config: not has_chats(config.data),
        "messages",
    ),
    Rule("data.add_bos", "data.format", lambda config: _formats(config) == {"messages"}, "text"),
    Rule("attention.balance_costs", "attention.layout", ("contiguous", "zigzag", "striped")),
    Rule("attention.dense_layers", "attention.pattern", ("dense",), "vertical_slash"),
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
        ("auto", "local", "all_gather", "ring", "double_ring", "ulysses"),
        "group_cast",
    ),
    Rule(
        "activation_checkpoint.attention_recompute", "activation_checkpoint.mode", ("none",), "full"
    ),
    Rule("optimizer.beta1 beta2 eps", "optimizer.name", ("SGD",), "AdamW"),
    Rule("lr_scheduler.decay_type min_lr_factor", "lr_scheduler.decay_ratio", (0,), -1.0),
    Rule("float8.recipe filter", "float8.enable", (False,), True),
    Rule("lora.", "lora.rank", (0,), 16),
    Rule("compile.backend", "compile.enable", (False,), True),
    Rule(
        "guard.spike_factor average_steps warmup_steps max_skips_in_a_row max_rollbacks",
        "guard.enable",
        (False,),
        True,
    ),
    Rule("guard.average_steps warmup_steps", "guard.spike_factor", (0,), 10.0),
    Rule(
        "checkpoint.load_step initial_load_path last_save_in_hf",
        "checkpoint.enable",
        (False,),
        True,
    ),
    Rule("metrics.recall_rows", "metrics.recall_every", (0,), 50),
    Rule("metrics.pictures_every", "metrics.tensorboard", (False,), True),
    Rule("validation.", "validation.enable", (False,), True),
    Rule("validation.needle_depths needle_samples", "validation.needle_lengths", ("",), "4096"),
    Rule(
        "validation.split",
        "validation.source",
        lambda config: is_local(config.validation.source or config.data.source),
    ),
)


def check_ignored(config: Config, section: str | None = None) -> None:
    """Refuses options that would be ignored (of one section, or of all). Raises ConfigError."""
    for key, rule in ignored_options(config, section):
        unset = attrgetter(key)(Config())
        instead = f"another {rule.because}"
        if rule.instead is not None:
            instead = f"{rule.because} = {show(rule.instead)}"
        either = f"{key} = {show(unset)} or {instead}"
        clash(config, key, rule.because, either, "would be ignored with")


def ignored_options(config: Config, section: str | None) -> Iterator[tuple[str, Rule]]:
    """The keys, of one section or of all, that would do nothing but do not have their defaults."""
    default = Config()
    for rule in _RULES:
        of_section, _, names = rule.keys.partition(".")
        if section not in (None, of_section) or not rule.is_idle(config):
            continue
        for name in names.split() or vars(getattr(default, of_section)):
            key = f"{of_section}.{name}"
            if attrgetter(key)(config) != attrgetter(key)(default):
                yield key, rule


def of_other_patterns(config: Config) -> dict[str, str]:
    """The options of patterns that `config` does not use, and the reason why
    they would be ignored."""
    pattern = config.attention.pattern
    # Only patterns have sections within a section.
    keys = (key for key in KINDS if key.count(".") > 1)
    reason = f"with attention.pattern = {show(pattern)}"
    return {key: reason for key in keys if not key.startswith(f"attention.{pattern}.")}
