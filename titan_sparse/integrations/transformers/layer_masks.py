"""What the layers of one kind are handed as attention_mask, resolved to ranges once a forward."""

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from titan_sparse.attention.masks import Mask, MaskRanges, SlidingWindow
from titan_sparse.integrations.transformers.mask_rules import MaskRule
from titan_sparse.integrations.transformers.positions import ranges_of_tokens
from titan_sparse.integrations.transformers.settings import AttentionSettings


class AttentionMask:
    """A mask of ours, for `attention_mask=` of any model: AttentionMask(Documents([300, 700])).

    Layers with a window see what both the mask and the window allow. A model that takes a dict of
    masks, one for each kind of layer, takes ours in it as they are:
    {"full_attention": mask, "sliding_attention": mask & SlidingWindow(128)}.

    mask: a Mask, or a MaskRanges for all tokens of the sequence, on any device. Under context
    parallelism, as everywhere, its positions are global.
    Raises ValueError for what is neither.
    """

    # What transformers asks of a mask before it hands it on to our mask function.
    ndim = 4
    shape = (1, 1, 0, 0)

    def __init__(self, mask: Mask | MaskRanges):
        if not isinstance(mask, Mask | MaskRanges):
            raise ValueError(
                f"AttentionMask({type(mask).__name__}) is no mask; write one of "
                "titan_sparse.attention.masks, for example Documents([300, 700])"
            )
        self.mask = mask

    def contiguous(self) -> "AttentionMask":
        """Itself: generate() with a static cache calls it."""
        return self


class LayerMask(AttentionMask):
    """What the layers of one kind see. Made by our mask function, once a forward for each kind.

    rule: window, chunks and documents, as transformers says.
    padding: bool [B, S], False on padding; None without.
    own: the user's mask, which replaces padding and documents; None without.
    keys: how many keys the layers have. More than tokens in an empty static cache, whose room
    lies behind them.
    """

    def __init__(
        self,
        rule: MaskRule,
        padding: Tensor | None,
        own: Mask | MaskRanges | None,
        keys: int,
    ):
        self.rule = rule
        self.keys = keys
        self.padding = padding
        self.own = own
        self._resolved: tuple[object, ...] | None = None

    @property
    def is_local(self) -> bool:
        """Whether a window or chunks keep these layers from far keys."""
        return self.rule.window is not None or self.rule.chunk is not None

    @torch.compiler.disable
    def ranges(
        self, position_ids: Tensor | None, q: Tensor, settings: AttentionSettings
    ) -> MaskRanges:
        """The mask of the whole sequence of which q [B, Hq, S_local, D] is this rank's share.

        position_ids: int [1 or B, S_local] of these tokens. Where one does not follow on the one
        before, another document begins. None: documents as `rule` says.
        Collective under context parallelism, in the first layer of each kind.
        """
        # All layers of a forward share one tensor of positions, so that this is done once.
        if self._resolved is not None:
            known_positions, known_settings, ranges = self._resolved
            if known_positions is position_ids and known_settings is settings:
                return ranges
        if self.own is not None:
            ranges = self._own_ranges(q.shape[2] * settings.ranks, q.device)
        else:
            ranges = ranges_of_tokens(position_ids, self.padding, self.rule, q, settings)
        self._resolved = (position_ids, settings, ranges)
        return ranges

    def _own_ranges(self, seq_len: int, device: torch.device) -> MaskRanges:
        """The user's mask, less what the layer's window hides."""
        window = self.rule.window
        own = self.own
        if self.rule.chunk is not None:
            raise ValueError(
                "AttentionMask does not know of chunks; write "
                'attention_mask={"full_attention": mask, "chunked_attention": its chunks}'
            )
        if isinstance(own, MaskRanges):
            ranges = _ranges_on(own, device)
            return ranges if window is None else _windowed(ranges, window)
        if window is not None:
            return (own & SlidingWindow(window)).rows(seq_len, device)
        return _rows(own, seq_len, device)


_known_rows: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""From a Mask to what its rows() last returned: (seq_len, device, ranges). A mask that a user gave
in a dict reaches each layer as it is."""


def _rows(mask: Mask, seq_len: int, device: torch.device) -> MaskRanges:
    """mask.rows(seq_len, device), worked out once while the mask lives."""
    known = _known_rows.get(mask)
    if known is None or known[:2] != (seq_len, device):
        known = (seq_len, device, mask.rows(seq_len, device))
        _known_rows[mask] = known
    return known[2]


def _ranges_on(ranges: MaskRanges, device: torch.device) -> MaskRanges:
    """The same mask on `device`; itself if it is there."""
    if ranges.start.device == device:
        return ranges
    moved = [x.to(device) if isinstance(x, Tensor) else x for x in ranges]
    return MaskRanges(*moved)


def _windowed(ranges: MaskRanges, window: int) -> MaskRanges:
    """What the mask and a window both see.

    Raises ValueError for a mask with slices.
    """
    if ranges.slices is not None:
        raise ValueError(
            "AttentionMask of resolved Slices for a layer with a window; write the mask unresolved, "
            'or attention_mask={"full_attention": mask, "sliding_attention": mask & SlidingWindow(w)}'
        )
    position = torch.arange(
        ranges.start.shape[1], dtype=ranges.start.dtype, device=ranges.start.device
    )
    start = torch.maximum(ranges.start, position - window + 1)
    # A query that the window leaves nothing must not end before it begins.
    stop = torch.maximum(start, torch.minimum(ranges.stop, position + 1))
    return ranges._replace(start=start, stop=stop, causal=True, plain=False)
