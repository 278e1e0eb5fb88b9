"""What the layers of one kind are handed as attention_mask, resolved to ranges once a forward."""

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from titan_sparse.attention.masks import Mask, MaskRanges, SlidingWindow
from titan_sparse.attention.masks.base import intersect
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
    last_sees: bool [B, 1, 1, S], the keys of the last query, also where it is padding. None without
    padding.
    """

    def __init__(
        self,
        rule: MaskRule,
        padding: Tensor | None,
        own: Mask | MaskRanges | None,
        keys: int,
        last_sees: Tensor | None = None,
    ):
        self.rule = rule
        self.keys = keys
        self.padding = padding
        self.own = own
        self.last_sees = last_sees
        self._resolved: tuple[object, ...] | None = None

    @torch.compiler.disable
    def ranges(
        self, position_ids: Tensor | None, q: Tensor, settings: AttentionSettings
    ) -> MaskRanges:
        """The mask of the whole sequence of which q [B, Hq, S_local, D] is this rank's share.

        position_ids: int [1 or B, S_local] of these tokens, or None. Documents begin as in
        ranges_of_tokens().
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
            if window is None:
                return ranges
            seen = intersect(ranges, SlidingWindow(window).rows(ranges.start.shape[1], device))
            return seen._replace(table=ranges.table)
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
