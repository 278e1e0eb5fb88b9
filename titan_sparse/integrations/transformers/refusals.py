"""What attend() does not compute, refused by name before anything is computed."""

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from titan_sparse.attention.masks import Mask, MaskRanges
from titan_sparse.integrations.transformers.linear import keep_documents_apart
from titan_sparse.integrations.transformers.masks import AttentionMask, LayerMask, has_documents
from titan_sparse.token_mixing import calls_interface, chooses_keys, mixers, numbers_tokens

_OTHERS = 'write attn_implementation="eager"'
_REFUSED = {
    "softcap": f"capped scores (softcap) are not computed; {_OTHERS}",
    "position_bias": f"a bias of scores (position_bias) is not computed; {_OTHERS}",
    "alibi": f"a bias of scores (alibi) is not computed; {_OTHERS}",
    "indices": f"a model's own choice of keys (indices) is not computed; {_OTHERS}",
    "block_indices": f"a model's own choice of keys (block_indices) is not computed; {_OTHERS}",
    "sinks": f"sinks that depend on tokens (sinks) are not computed; {_OTHERS}",
    "cache": 'paged caches are not read; write attn_implementation="sdpa" for generate_batch()',
    "output_attentions": f"attention weights never exist; write output_attentions=False, or {_OTHERS}",
    "cu_seq_lens_q": (
        "cu_seq_lens_q is for FlashAttention; leave it out (return_flash_attn_kwargs=False) and "
        "write position_ids that begin at 0 in each document"
    ),
}
"""Keywords of transformers' attention functions that we do not support."""

_ONE_RANK = "write cp_size=1, or AttentionSettings(cp=None)"
_UNKNOWN_TO_RANKS = (
    "is not known to treat each token by itself, and would see the tokens of one rank only; "
    f"{_ONE_RANK}"
)

BESIDE_CACHE = (
    "masks of ours are for whole sequences, not for tokens that follow cached ones; "
    "write use_cache=False, or a 2D attention_mask"
)


def check_class(model: PreTrainedModel, name: str) -> None:
    """Raises ValueError for a decoder whose code never asks for a registered attention function.

    model: without modules yet. name: the attn_implementation that it is given.
    """
    is_text_only = model.config.get_text_config(decoder=True) is model.config
    if model.can_generate() and is_text_only and not model._can_set_attn_implementation():
        raise ValueError(
            f'{type(model).__name__} computes attention by itself and would not use "{name}"; '
            f"{_OTHERS}"
        )


def check_modules(model: PreTrainedModel, name: str, ranks: int) -> None:
    """Raises ValueError for a model that would not use attend(), or would be wrong over `ranks`.

    name: its attn_implementation.
    """
    text = _text_part(model)
    keep_documents_apart(text)
    attention = [module for module in text.modules() if calls_interface(module)]
    mixer = next(mixers(text), None)
    if not attention:
        own = "" if mixer is None else f", having {mixer} instead"
        raise ValueError(
            f'{type(model).__name__} would not use "{name}": none of its modules asks transformers '
            f"for an attention function{own}; {_OTHERS}"
        )
    for module in attention:
        if chooses_keys(module):
            raise ValueError(
                f"{type(module).__name__} makes a mask of its own from what tokens hold, which is "
                f"not computed; {_OTHERS}"
            )
    note_mixers(model)
    if ranks == 1:
        return
    if mixer is not None:
        raise ValueError(f"{mixer} {_UNKNOWN_TO_RANKS}")
    for path, module in text.named_modules():
        if numbers_tokens(module):
            raise ValueError(
                f"{path} ({type(module).__name__}) numbers the tokens of one rank by itself, "
                f"whatever their position_ids; {_ONE_RANK}"
            )


def note_mixers(model: PreTrainedModel) -> None:
    """Mark the model's attention if a module is not known to be token-wise."""
    text = _text_part(model)
    keep_documents_apart(text)
    mixer = next(mixers(text), None)
    for module in text.modules():
        if calls_interface(module):
            module.token_mixer = mixer


def _text_part(model: PreTrainedModel) -> nn.Module:
    is_text_only = model.config.get_text_config(decoder=True) is model.config
    return model if is_text_only else model.get_decoder()


def check_mixing(module: nn.Module, ranges: MaskRanges, ranks: int) -> None:
    """Raises ValueError for documents or ranks beside a module that is not known to be token-wise.

    module: attention that note_mixers() has seen. ranges: its mask. The host waits for the device
    if there is such a module and documents may be several.
    """
    mixer = getattr(module, "token_mixer", None)
    if mixer is None:
        return
    if ranks > 1:
        raise ValueError(f"{mixer} {_UNKNOWN_TO_RANKS}")
    if has_documents(ranges):
        raise ValueError(
            f"{mixer} is not known to treat each token by itself, so that packed documents would "
            "see each other; write packing=False, or a row for each document"
        )


def check_arguments(query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, object]) -> None:
    """Raises ValueError for tensors and keywords that attend() does not compute.

    query: [B, Hq, Sq, D]. key, value: [B, Hkv, Skv, D]. kwargs: what transformers adds.
    """
    for name, refusal in _REFUSED.items():
        given = kwargs.get(name)
        if given is not None and given is not False:
            raise ValueError(refusal)
    # transformers gives the rate in training, and 0 elsewhere.
    dropout = kwargs.get("dropout", 0.0)
    if dropout > 0:
        raise ValueError(
            f"attention dropout of {dropout} is not computed; write config.attention_dropout = 0"
        )
    if value.shape[-1] != key.shape[-1] or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"values of {value.shape[-1]} and keys of {key.shape[-1]} dimensions (latent "
            'attention, MLA) are not computed; write attn_implementation="sdpa"'
        )


def check_mask(module: nn.Module, mask: object, query: Tensor, key: Tensor) -> None:
    """Raises ValueError for a layer's mask that is none of ours, or does not fit what is cached.

    mask: what the layer was handed as attention_mask.
    """
    if isinstance(mask, LayerMask):
        if key.shape[2] != mask.keys:
            # transformers' cache of a window of one token, for one, keeps more than it says.
            raise ValueError(
                f"the cache holds {key.shape[2]} keys where transformers announced {mask.keys}; "
                "write use_cache=False"
            )
        return
    has_more_keys = key.shape[2] != query.shape[2]
    if isinstance(mask, AttentionMask | Mask | MaskRanges):
        if has_more_keys:
            raise ValueError(BESIDE_CACHE)
        return
    if isinstance(mask, Tensor):
        if not has_more_keys:
            raise ValueError(
                f"attention_mask with {mask.ndim} dims is not computed; write "
                "attention_mask=AttentionMask(mask) with a mask of titan_sparse.attention.masks"
            )
        return
    name = type(module).__name__
    if not getattr(module, "is_causal", True):
        raise ValueError(
            f"{name} is bidirectional or cross attention, which is not computed; "
            'write attn_implementation="sdpa" for that part of the model'
        )
    raise ValueError(
        f"{name} got {type(mask).__name__} for a mask; write register(), which registers masks too, "
        "and let the model build them"
    )


def check_rope(config: PreTrainedConfig | None, ranks: int) -> None:
    """Raises ValueError for a rotary embedding that depends on more than one of these ranks has."""
    chosen_by_length = _rope_types(config) & {"dynamic", "longrope"}
    if ranks > 1 and chosen_by_length:
        raise ValueError(
            f'rope_type "{chosen_by_length.pop()}" looks for the last position among one rank\'s '
            'tokens; write rope_type="yarn" or "linear" into config.rope_parameters, or cp_size=1'
        )


def _rope_types(config: PreTrainedConfig) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters]
    # Some models have one for each kind of layer.
    kinds += [of_layers for of_layers in parameters.values() if isinstance(of_layers, dict)]
    return {kind["rope_type"] for kind in kinds if "rope_type" in kind}
