"""register(): the one line that gives transformers an attn_implementation of ours."""

import functools

from transformers import AttentionInterface, AttentionMaskInterface

from titan_sparse.integrations.transformers.attention import attention_forward
from titan_sparse.integrations.transformers.mask_function import layer_mask
from titan_sparse.integrations.transformers.settings import AttentionSettings

_ours: set[str] = set()
"""The names that register() has given."""


def register(settings: AttentionSettings | None = None, name: str = "titan_sparse") -> None:
    """From here on, attn_implementation=name computes a decoder's attention by attend().

    settings: pattern, ranks and kernel (default: AttentionSettings()). Called again with the same
    name, the new settings hold, also for models that exist. Several names live beside each other.
    Raises ValueError for settings that are none and for names that transformers has or reads.
    """
    if settings is None:
        settings = AttentionSettings()
    if not isinstance(settings, AttentionSettings):
        raise ValueError(
            f"register({settings!r}) is no settings; write register(AttentionSettings(...))"
        )
    _check_name(name)
    _ours.add(name)
    # Without the second, transformers would build no mask, and padding and packing would be lost.
    AttentionInterface.register(name, functools.partial(attention_forward, settings))
    AttentionMaskInterface.register(name, functools.partial(layer_mask, settings))


def _check_name(name: str) -> None:
    """Raises ValueError for names that mean something else to transformers."""
    taken = set(AttentionInterface().valid_keys()) - _ours
    if name in taken or name == "eager":
        raise ValueError(
            f'register(name="{name}") is transformers\' own; write another, such as "titan_sparse"'
        )
    # Names with these are kernels of FlashAttention, kernels of the hub, or paged variants.
    if not name or any(part in name for part in ("flash", "/", "|", ":", "@")):
        raise ValueError(
            f'register(name="{name}") means a kernel to transformers; write letters and "_", '
            'without "flash"'
        )
