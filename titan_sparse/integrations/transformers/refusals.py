"""What attend() does not compute, refused by name before anything is computed."""

from torch import Tensor, nn
from transformers import PreTrainedConfig

from titan_sparse.attention.masks import Mask, MaskRanges
from titan_sparse.integrations.transformers.layer_masks import AttentionMask, LayerMask

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
"""What transformers hands to attention functions by keyword, and cannot be had here."""

BESIDE_CACHE = (
    "masks of ours are for whole sequences, not for tokens that follow cached ones; "
    "write use_cache=False, or a 2D attention_mask"
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
    """The kinds of RoPE of all layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters]
    # Some models have one for each kind of layer.
    kinds += [of_layers for of_layers in parameters.values() if isinstance(of_layers, dict)]
    return {kind["rope_type"] for kind in kinds if "rope_type" in kind}
