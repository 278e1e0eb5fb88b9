"""What [attention] can run and what it cannot; check() of checking.py calls it."""

import math

from titan_sparse.config.reading import require
from titan_sparse.config.sections import Attention, Config, MoBA, VerticalSlash, XAttention


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
        'attention.mask = "causal_across_documents" if it shall',
    )
    _check_window_sinks(attention)
    _check_cudnn(attention, config.training.deterministic)
    _check_travel(attention, cp, config.training.dtype)
    for key, share, example in (
        ("vertical_slash.recall", attention.vertical_slash.recall, 0.95),
        ("xattention.threshold", attention.xattention.threshold, 0.9),
    ):
        require(
            0 < share <= 1,
            f"attention.{key} = {share} is not in (0, 1]; write for example {example}",
        )
    if attention.pattern == "vertical_slash" and attention.vertical_slash.index == "probe":
        _check_vertical_slash(attention.vertical_slash, size, config.training.seq_len)
    elif attention.pattern == "vertical_slash":
        _check_borrowed_index(attention.vertical_slash)
    if uses_xattention(attention):
        _check_xattention(attention.xattention, size)
    if attention.pattern == "moba":
        _check_moba(attention.moba, size)


def _check_window_sinks(attention: Attention) -> None:
    """A window with sinks gives a query two ranges of keys, which not everything takes."""
    if not attention.window_sinks:
        return
    sinks = f"attention.window_sinks = {attention.window_sinks}"
    require(
        attention.sliding_window > 0,
        f"{sinks} would be ignored without a window; write attention.sliding_window = 4096, "
        "or attention.window_sinks = 0",
    )
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


def _check_routes(attention: Attention, cp: int) -> None:
    """route_by: only for a ring, and the index only where it says more than the mask."""
    asked = f'attention.route_by = "{attention.route_by}"'
    if attention.route_by == "auto":
        return
    require(
        cp > 1,
        f"{asked} would be ignored with parallelism.cp = 1; "
        'write attention.route_by = "auto" or parallelism.cp = 2 or more',
    )
    require(
        attention.schedule in ("ring", "double_ring"),
        f'{asked} would be ignored with attention.schedule = "{attention.schedule}"; write '
        'attention.route_by = "auto" or attention.schedule = "ring"',
    )
    if attention.route_by == "mask":
        return
    require(
        attention.pattern == "vertical_slash",
        f'{asked} says no more than the mask with attention.pattern = "{attention.pattern}"; '
        'write attention.route_by = "auto"',
    )
    require(
        attention.layout != "balanced",
        f'{asked} skips nothing with attention.layout = "balanced"; '
        'write attention.route_by = "auto" or attention.layout = "striped"',
    )


def _check_travel(attention: Attention, cp: int, dtype: str) -> None:
    """What travels between ranks, and in which dtype: only where something does."""
    for name, default in (("backward_circulates", "auto"), ("gradient_dtype", "float32")):
        value = getattr(attention, name)
        require(
            value == default or cp > 1,
            f'attention.{name} = "{value}" would be ignored with parallelism.cp = 1; '
            f'write attention.{name} = "{default}" or parallelism.cp = 2 or more',
        )
    circulates = attention.backward_circulates
    schedule = attention.schedule
    require(
        circulates == "auto" or schedule not in ("all_gather", "group_cast"),
        f'attention.backward_circulates = "{circulates}" would be ignored with '
        f'attention.schedule = "{schedule}"; write attention.backward_circulates = "auto" or '
        'attention.schedule = "ring"',
    )
    _check_routes(attention, cp)
    for name in ("overlap_stages", "overlap_stages_backward"):
        stages = getattr(attention, name)
        require(
            stages == 0 or schedule == "group_cast",
            f'attention.{name} = {stages} would be ignored with attention.schedule = "{schedule}"; '
            f'write attention.{name} = 0 or attention.schedule = "group_cast"',
        )
        require(
            stages == 0 or cp > 1,
            f"attention.{name} = {stages} would be ignored with parallelism.cp = 1; write "
            f"attention.{name} = 0 or parallelism.cp = 2 or more",
        )
    require(
        dtype != "float64" or attention.gradient_dtype == "float32",
        'attention.gradient_dtype = "bfloat16" would round what training.dtype = "float64" '
        'computes exactly; write attention.gradient_dtype = "float32"',
    )


def check_recompute(config: Config) -> None:
    """Refuses an activation_checkpoint.attention_recompute that is out of range, or that layout or
    mode do not allow."""
    share = config.activation_checkpoint.attention_recompute
    layout = config.attention.layout
    key = f"activation_checkpoint.attention_recompute = {share}"
    require(
        share == -1 or 0 <= share <= 1,
        f"{key} is neither -1 nor in [0, 1]; write -1 or for example 0.5",
    )
    require(
        share == 0 or config.activation_checkpoint.mode != "none",
        f'{key} would be ignored with activation_checkpoint.mode = "none"; write '
        "activation_checkpoint.attention_recompute = 0 or "
        'activation_checkpoint.mode = "full"',
    )
    require(
        share in (0, 1) or layout == "striped" or config.parallelism.cp == 1,
        f'{key} needs attention.layout = "striped", not "{layout}", with parallelism.cp above 1; '
        'write attention.layout = "striped" or activation_checkpoint.attention_recompute = 0 or 1',
    )


def _check_vertical_slash(pattern: VerticalSlash, block_size: int, seq_len: int) -> None:
    table = "attention.vertical_slash"
    require(
        pattern.count_sinks or pattern.budget != "independent",
        f'{table}.count_sinks = false needs another budget than "independent"; write '
        f'{table}.count_sinks = true or {table}.budget = "joint"',
    )
    for value, limit, key, bound in (
        # An unset probe is one block, and the loader pads every sequence to whole blocks: it always
        # fits.
        (pattern.probe, seq_len, f"{table}.probe", "training.seq_len"),
        (pattern.probe, pattern.dense_below, f"{table}.probe", f"{table}.dense_below"),
        (block_size, pattern.dense_below, "attention.block_size", f"{table}.dense_below"),
        (pattern.min_columns, pattern.max_columns, f"{table}.min_columns", f"{table}.max_columns"),
        (
            pattern.min_slashes,
            pattern.max_slashes or math.inf,
            f"{table}.min_slashes",
            f"{table}.max_slashes",
        ),
    ):
        require(
            value <= limit,
            f"{key} = {value} is above {bound} = {limit}; write {key} = {limit} or less, "
            f"or {bound} = {value} or more",
        )


def uses_xattention(attention: Attention) -> bool:
    """Whether xattention's scores choose: as the pattern, or as the index of vertical_slash."""
    if attention.pattern == "vertical_slash":
        return attention.vertical_slash.index == "xattention"
    return attention.pattern == "xattention"


def _check_borrowed_index(pattern: VerticalSlash) -> None:
    for key, default in vars(VerticalSlash()).items():
        value = getattr(pattern, key)
        require(
            key == "index" or value == default,
            f"attention.vertical_slash.{key} = {value} would be ignored with "
            'attention.vertical_slash.index = "xattention"; write '
            f"attention.vertical_slash.{key} = {default} or "
            'attention.vertical_slash.index = "probe"',
        )


def _check_xattention(pattern: XAttention, block_size: int) -> None:
    table = "attention.xattention"
    stride = pattern.stride
    dense_below = pattern.dense_below
    require(
        block_size % stride == 0,
        f"{table}.stride = {stride} does not divide attention.block_size = {block_size}; "
        f"write {table}.stride = {math.gcd(stride, block_size)}",
    )
    require(
        dense_below >= block_size,
        f"{table}.dense_below = {dense_below} is below attention.block_size = "
        f"{block_size}; write {table}.dense_below = {block_size} or more",
    )


def _check_moba(pattern: MoBA, block_size: int) -> None:
    require(
        pattern.chunk_size >= block_size,
        f"attention.moba.chunk_size = {pattern.chunk_size} is below attention.block_size = "
        f"{block_size}; write attention.moba.chunk_size = {block_size} or more",
    )
