"""The settings of register(), and what the layers of one kind see, resolved to
ranges once a forward.

transformers.masking_utils composes functions of (batch, head, query, key). There are few
parts, known by name, so read_rule() reads the parts: calling such a function for all pairs
would take S x S.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.inputs import ranks_of
from titan_sparse.attention.masks import Mask, MaskRanges, Slices, SlidingWindow
from titan_sparse.attention.masks.ranges import intersect, rows_once
from titan_sparse.attention.patterns import Dense, Pattern


def check_block_size(size: int) -> None:
    """Raises ValueError for blocks that kernels on GPUs do not compute."""
    if type(size) is not int or size < 16 or size.bit_count() != 1:
        raise ValueError(
            f"block_size={size!r} is not a power of two of at least 16; write 64 or 128"
        )


@dataclass(frozen=True)
class AttentionSettings:
    """The settings of attention of one name. The defaults: dense, on one rank, the fastest kernel.

    pattern: of full-attention layers. Layers with a window or chunks compute all of it.
    cp: the ranks that share each sequence. Inputs of the model are then those of shard_batch().
    backend, recomputed: as in attend().
    block_size: tokens, for cp=None only; a power of two, at least 16; default 128.
    """

    pattern: Pattern = field(default_factory=Dense)
    cp: ContextParallel | None = None
    backend: str = "auto"
    block_size: int | None = None
    recomputed: float = 0.0

    def __post_init__(self) -> None:
        # attend() checks the others, but layers with a window hand on no pattern.
        if not isinstance(self.pattern, Pattern):
            raise ValueError(
                f"pattern={self.pattern!r} is not a pattern; write for example "
                "AttentionSettings(VerticalSlash())"
            )
        if self.block_size is not None:
            check_block_size(self.block_size)
        ranks_of(self.cp, self.block_size)

    @property
    def ranks(self) -> int:
        """The number of ranks that share a sequence."""
        return 1 if self.cp is None else self.cp.size


def settings_of(name: object) -> AttentionSettings | None:
    """The settings registered under this name; None for other names."""
    function = AttentionInterface().get(name)
    # register() binds the settings to our attention.
    if isinstance(function, functools.partial) and isinstance(function.args[0], AttentionSettings):
        return function.args[0]
    return None


class MaskRule(NamedTuple):
    """Causal attention, less what these rules hide.

    window: keys that a query sees, its own included; None for all (sliding_window).
    chunk: a query sees keys of its own chunk of that many tokens, counted from the beginning of
    its document; None for all (Llama 4's attention_chunk_size).
    documents: int [B, S], equal for tokens of one document; None where transformers saw one.
    unknown: the name of a part that is none of these, if there is one.
    """

    window: int | None = None
    chunk: int | None = None
    documents: Tensor | None = None
    unknown: str | None = None

    @property
    def is_local(self) -> bool:
        """True if a window or chunks keep queries from far keys."""
        return self.window is not None or self.chunk is not None


BIDIRECTIONAL = "bidirectional attention"
"""The value of MaskRule.unknown for encoders."""

# What makes a mask function -> the field that it sets, and its variable that holds the value.
_FIELDS = {
    "sliding_window_overlay": ("window", "sliding_window"),
    "chunked_overlay": ("chunk", "chunk_size"),
    "packed_sequence_mask_function": ("documents", "packed_sequence_mask"),
}


def read_rule(mask_function: Callable) -> MaskRule:
    """The rule that a mask function of transformers computes."""
    found: dict[str, Any] = {}
    is_causal = _read(mask_function, found)
    if not is_causal and "unknown" not in found:
        found["unknown"] = BIDIRECTIONAL
    return MaskRule(**found)


def _read(function: Callable, found: dict[str, Any]) -> bool:
    """Adds the fields of MaskRule that `function` sets. Returns whether it is causal."""
    name = getattr(function, "__qualname__", repr(function))
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        found["unknown"] = f"the mask function {name} of others"
        return False
    # An inner function is named by the function that made it: "and_masks.<locals>.and_mask".
    name = name.partition(".")[0]
    parts = inspect.getclosurevars(function).nonlocals
    if name == "causal_mask_function":
        return True
    if name == "and_masks":
        causal = [_read(part, found) for part in parts["mask_functions"]]
        return any(causal)
    if name == "remap_positions_for_packed_sequence":
        # Distances inside a document are the same in its own positions.
        return _read(parts["mask_function"], found)
    if name in _FIELDS:
        field, variable = _FIELDS[name]
        if field in found:
            found["unknown"] = f"two mask functions {name}"
        found[field] = parts[variable]
    elif name != "bidirectional_mask_function":
        found["unknown"] = f"the mask function {name}"
    return False


_CHUNKS = (
    "AttentionMask does not know of chunks; write "
    'attention_mask={"full_attention": mask, "chunked_attention": its chunks}'
)


class AttentionMask:
    """A mask of ours, for `attention_mask=` of any model: AttentionMask(Documents([300, 700])).

    Layers with a window see what both the mask and the window allow. A model that takes a dict of
    masks, one for each kind of layer, takes ours in it as they are.
    mask: a Mask, or a MaskRanges for all tokens of the sequence, on any device.
    """

    # What transformers asks of a mask before it hands it on to our mask function.
    ndim = 4
    shape = (1, 1, 0, 0)

    def __init__(self, mask: Mask | MaskRanges):
        if not isinstance(mask, Mask | MaskRanges):
            name = type(mask).__name__
            raise ValueError(
                f"AttentionMask({name}) is not a mask of ours; write AttentionMask(Causal())"
            )
        self.mask = mask

    def contiguous(self) -> "AttentionMask":
        """Itself: generate() with a static cache calls it."""
        return self

    def cumsum(self, dim: int = -1) -> NoReturn:
        """Raises ValueError: transformers counts padding where a layer has chunks (Llama 4)."""
        raise ValueError(_CHUNKS)


# A model hands on our masks as they are, too. Their shape says only that they are not [B, S].
for _kind in (Mask, MaskRanges):
    for _asked in ("ndim", "shape", "cumsum"):
        setattr(_kind, _asked, vars(AttentionMask)[_asked])


@dataclass(eq=False)
class LayerMask(AttentionMask):
    """The mask of the layers of one kind. Made by our mask function, once a forward for each kind.

    padding: bool [B, S], False on padding; None without.
    own: the user's mask, which replaces padding and documents; None without.
    keys: how many keys the layers have. An empty static cache has more than there are tokens.
    last_sees: bool [B, 1, 1, S], the keys of the last query, also where it is padding. None without
    padding.
    """

    rule: MaskRule
    padding: Tensor | None
    own: Mask | MaskRanges | None
    keys: int
    last_sees: Tensor | None = None
    _resolved: tuple[Tensor | None, AttentionSettings, MaskRanges] | None = None

    @torch.compiler.disable
    def ranges(
        self,
        position_ids: Tensor | None,
        q: Tensor,
        settings: AttentionSettings,
        bounds: Tensor | None = None,
    ) -> MaskRanges:
        """The mask of the whole sequence of which q [B, Hq, S_local, D] is this rank's share, as
        ranges_of_tokens() reads position_ids [1 or B, S_local].

        bounds: int [documents + 1], FlashAttention's bounds of documents, which packing collators
        add to position_ids. Raises ValueError where these say something else.
        """
        # All layers of a forward share one tensor of positions, so that this is done once.
        if self._resolved is not None:
            known_positions, known_settings, ranges = self._resolved
            if known_positions is position_ids and known_settings is settings:
                return ranges
        if bounds is not None:
            check_bounds(bounds, position_ids if self.own is None else None)
        if self.own is not None:
            ranges = self._own_ranges(self.own, q, settings.ranks)
        else:
            # With our own context parallelism, masks come whole, as `own`.
            has_others = dist.is_initialized() and dist.get_world_size() > 1
            ranges = ranges_of_tokens(
                position_ids, self.padding, self.rule, q, settings.pattern, has_others
            )
        self._resolved = (position_ids, settings, ranges)
        return ranges

    def _own_ranges(self, own: Mask | MaskRanges, q: Tensor, ranks: int) -> MaskRanges:
        """The user's mask without what the layer's window hides."""
        if self.rule.chunk is not None:
            raise ValueError(_CHUNKS)
        if isinstance(own, MaskRanges):
            ranges = MaskRanges._make(x.to(q.device) if isinstance(x, Tensor) else x for x in own)
        else:
            ranges = rows_once(own, q.shape[2] * ranks, q)
        if self.rule.window is None:
            return ranges
        window = SlidingWindow(self.rule.window).rows(ranges.start.shape[1], q.device)
        both = intersect(ranges, window)
        return both._replace(table=ranges.table, probe_seed=ranges.probe_seed)


def check_bounds(bounds: Tensor, position_ids: Tensor | None) -> None:
    """Raises ValueError unless these documents of FlashAttention, int [documents + 1], begin
    exactly where position_ids [B, S] are 0. The host waits for the device."""
    if position_ids is not None:
        begins = (position_ids.flatten() == 0).nonzero()[:, 0].tolist()
        if bounds[:-1].tolist() == begins:
            return
    raise ValueError(
        "cu_seq_lens_q (documents of FlashAttention) is not computed, and position_ids say something "
        "else; leave it out (return_flash_attn_kwargs=False), and write position_ids that begin at 0 "
        "in each document"
    )


def as_layer_mask(
    mask: AttentionMask | Mask | MaskRanges, keys: int, rule: MaskRule | None = None
) -> LayerMask:
    """The mask in the form that layers read. A mask that a user gave for one kind of layer is
    kept. rule: of these layers, in addition to the mask."""
    if isinstance(mask, LayerMask):
        return mask
    own = mask.mask if isinstance(mask, AttentionMask) else mask
    return LayerMask(rule or MaskRule(), padding=None, own=own, keys=keys)


def has_documents(ranges: MaskRanges) -> bool:
    """True if a sequence may have several documents. Slices do not say. The host waits for the
    device unless there is one document."""
    starts = ranges.document_start
    if starts is None:
        return ranges.slices is not None
    # [Bm, S], -1 on padding
    first = torch.where(starts < 0, starts.shape[1], starts).amin(1)
    return bool((starts.amax(1) > first).any())


def ranges_of_tokens(
    position_ids: Tensor | None,
    padding: Tensor | None,
    rule: MaskRule,
    q: Tensor,
    pattern: Pattern,
    may_be_part: bool = False,
) -> MaskRanges:
    """The mask of q [B, Hq, S, D], whole sequences.

    position_ids: int [1 or B, S]. padding: bool [B, S], False on padding, or None.
    may_be_part: other processes might hold the beginning of these sequences.
    A document begins where positions return to 0 (padding aside), and where transformers found one.
    The host waits for the device once.
    Raises ValueError for positions that begin above 0 where q may be a part.
    """
    batch, _, seq_len, _ = q.shape
    if position_ids is not None and position_ids.shape not in ((1, seq_len), (batch, seq_len)):
        raise ValueError(
            f"position_ids {list(position_ids.shape)} are not [{batch}, {seq_len}]; write positions "
            "of one dimension of text, or attention_mask=AttentionMask(mask)"
        )
    if padding is None:
        real = torch.ones(1, seq_len, dtype=torch.bool, device=q.device)
    else:
        real = padding.to(q.device)
    # bool [1 or B, S]: the first token of each document
    begins = real.cumsum(1) == 1
    if rule.documents is not None:
        begins = begins | (rule.documents.diff(dim=1, prepend=rule.documents[:, :1]) != 0)
    elif position_ids is not None:
        # Positions that are 0 throughout do not separate anything.
        counts = (position_ids * real).amax(1, keepdim=True) > 0
        begins = begins | ((position_ids == 0) & counts)
    begins = begins & real
    real = real.expand_as(begins)
    resumes = real[:, 1:] & ~real[:, :-1] & ~begins[:, 1:]
    # Of all sequences: whether they are one document without padding; whether there is padding
    # between tokens of a document.
    begins_late = resumes.new_zeros(())
    if may_be_part and position_ids is not None:
        begins_late = ((position_ids[:, 0] > 0) & real[:, 0]).any()
    facts = torch.stack([real.all() & ~begins[:, 1:].any(), resumes.any(), begins_late])
    is_plain, has_hole, is_part = facts.tolist()
    if is_part:
        raise ValueError(
            "position_ids do not begin at 0, as where another process holds the beginning of the "
            "sequence; write AttentionSettings(cp=...) to share sequences, or position_ids that begin "
            "at 0"
        )
    if is_plain:
        # One row holds for all sequences.
        begins = begins[:1]
        real = real[:1]
    ranges = _ranges(begins, real, rule, is_plain)
    if not has_hole:
        return ranges
    if not (rule.is_local or pattern.takes_slices):
        raise ValueError(
            f"attention_mask has padding between tokens, which {pattern.name} does not "
            "compute; move the padding to one side, or write register(AttentionSettings())"
        )
    # Linear attention needs the documents too.
    seen = intersect(ranges, _real_keys(real))
    return seen._replace(document_start=ranges.document_start)


def _real_keys(real: Tensor) -> MaskRanges:
    """The mask whose queries all see every key that is not padding. real: bool [B, S]."""
    seq_len = real.shape[1]
    masks = []
    for row in real.cpu().int():
        # [S + 1]: 1 where a run of real tokens begins, -1 behind its last token
        edges = torch.nn.functional.pad(row, (1, 1)).diff()
        begins, ends = ((edges == step).nonzero()[:, 0].tolist() for step in (1, -1))
        count = len(begins)
        masks.append(Slices([(0, seq_len)] * count, list(zip(begins, ends)), ["full"] * count))
    return Slices.batch(masks).rows(seq_len, real.device)


def _ranges(begins: Tensor, real: Tensor, rule: MaskRule, is_plain: bool) -> MaskRanges:
    """The mask of tokens of which some begin documents and some are padding: bool [Bm, S].

    Keys of padding between the tokens of a document are not hidden.
    """
    position = torch.arange(begins.shape[1], dtype=torch.int32, device=begins.device)
    document_start = torch.where(begins, position, 0).cummax(1).values
    start = document_start
    if rule.chunk is not None:
        start = position - (position - document_start) % min(rule.chunk, len(position))
    if rule.window is not None:
        start = torch.maximum(start, position - min(rule.window, len(position)) + 1)
    return MaskRanges(
        # Padding at i sees nothing: i to i. So both vectors never decrease.
        start=torch.where(real, start, position),
        stop=position + real.int(),
        document_start=None if is_plain else torch.where(real, document_start, -1),
        plain=is_plain and not rule.is_local,
    )
