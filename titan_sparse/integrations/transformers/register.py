"""register(): the one line that gives transformers an attn_implementation of ours."""

import functools
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from titan_sparse.integrations.transformers.attention import attention_forward
from titan_sparse.integrations.transformers.mask_function import layer_mask
from titan_sparse.integrations.transformers.refusals import check_class, check_modules, note_mixers
from titan_sparse.integrations.transformers.settings import AttentionSettings


def register(settings: AttentionSettings | None = None, name: str = "titan_sparse") -> None:
    """From here on, attn_implementation=name computes a decoder's attention by attend().

    settings: pattern, ranks and kernel (default: AttentionSettings()). Called again with the same
    name, the new settings hold, also for models that exist. Several names live beside each other.
    Models that would not compute by attend(), or not right, raise ValueError when they are given
    the name. Raises ValueError for settings that are none and for names that transformers has or
    reads.
    """
    if settings is None:
        settings = AttentionSettings()
    if not isinstance(settings, AttentionSettings):
        raise ValueError(
            f"register({settings!r}) is no settings; write register(AttentionSettings(...))"
        )
    _check_name(name)
    _check_models_given_a_name()
    # Without the second, transformers would build no mask, and padding and packing would be lost.
    AttentionInterface.register(name, functools.partial(attention_forward, settings))
    AttentionMaskInterface.register(name, functools.partial(layer_mask, settings))


def settings_of(name: object) -> AttentionSettings | None:
    """What register() was told for this name; None for names that are not ours."""
    function = AttentionInterface().get(name)
    if isinstance(function, functools.partial) and function.func is attention_forward:
        return function.args[0]
    return None


@functools.cache
def _check_models_given_a_name() -> None:
    """Has transformers' models checked where they are given a name of ours.

    transformers accepts any registered name, also for models that die of it or ignore it.
    """
    accept = PreTrainedModel.get_correct_attn_implementation
    finish = PreTrainedModel.post_init
    change = PreTrainedModel.set_attn_implementation

    @functools.wraps(accept)
    def accept_checked(model: PreTrainedModel, name: str | None, *args: Any, **kwargs: Any) -> str:
        # Before the modules are made: some models look up their class by the name.
        if settings_of(name) is not None:
            check_class(model, name)
        return accept(model, name, *args, **kwargs)

    @functools.wraps(finish)
    def finish_checked(model: PreTrainedModel) -> None:
        finish(model)
        settings = settings_of(model.config._attn_implementation)
        if settings is None:
            return
        if model.can_generate():
            check_modules(model, model.config._attn_implementation, settings.ranks)
        else:
            # A part of a model, perhaps one that sees no text.
            note_mixers(model)

    @functools.wraps(change)
    def change_checked(model: PreTrainedModel, name: str | dict, *args: Any, **kwargs: Any) -> None:
        change(model, name, *args, **kwargs)
        if isinstance(name, dict):
            name = model.config.get_text_config(decoder=True)._attn_implementation
        settings = settings_of(name)
        if settings is not None:
            check_modules(model, name, settings.ranks)

    PreTrainedModel.get_correct_attn_implementation = accept_checked
    PreTrainedModel.post_init = finish_checked
    PreTrainedModel.set_attn_implementation = change_checked


def _check_name(name: str) -> None:
    """Raises ValueError for names that mean something else to transformers."""
    is_taken = name in AttentionInterface().valid_keys() and settings_of(name) is None
    if is_taken or name == "eager":
        raise ValueError(
            f'register(name="{name}") is transformers\' own; write another, such as "titan_sparse"'
        )
    # Names with these are kernels of FlashAttention, kernels of the hub, or paged variants.
    if not name or any(part in name for part in ("flash", "/", "|", ":", "@")):
        raise ValueError(
            f'register(name="{name}") means a kernel to transformers; write letters and "_", '
            'without "flash"'
        )
