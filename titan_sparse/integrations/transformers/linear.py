"""Linear attention of hybrid models (Gated DeltaNet): packed documents, and one
sequence over several ranks.

The inputs of a model are in attention's layout. Layers of linear attention need contiguous tokens,
so hidden states move before the first and after the last of each run of such layers. Where
documents begin is read from the mask of full attention, once a forward, and handed to layers of
linear attention in place of their padding mask. Without documents and ranks, transformers computes
them by itself.
"""

import functools
import inspect
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask

from titan_sparse.attention.context_parallel.group import one_rank
from titan_sparse.attention.context_parallel.linear_attention import Move
from titan_sparse.attention.linear import Pieces, gated_delta_net, split_documents
from titan_sparse.attention.masks import MaskRanges
from titan_sparse.integrations.transformers.masks import (
    AttentionMask,
    AttentionSettings,
    as_layer_mask,
    has_documents,
    settings_of,
)

_KNOWN = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")


class LinearMask(NamedTuple):
    """The attention_mask of layers of linear attention. move: None if tokens are contiguous."""

    pieces: Pieces
    move: Move | None


def keep_documents_apart(model: nn.Module) -> None:
    """Let the linear attention of `model` know of documents and ranks, with
    every attention of ours.

    A second call changes nothing.
    """
    for decoder in list(model.modules()):
        layers = getattr(decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            continue
        for is_linear, run in itertools.groupby(layers, _has_known_linear_attention):
            of_run = list(run)
            if not is_linear or "forward" in vars(of_run[0].linear_attn):
                continue
            for layer in of_run:
                linear = layer.get_submodule("linear_attn")
                vars(linear)["forward"] = functools.partial(_forward, linear)
            of_run[0].register_forward_pre_hook(_to_contiguous, with_kwargs=True)
            of_run[-1].register_forward_hook(_to_layout, with_kwargs=True)
            if _give_masks not in decoder._forward_pre_hooks.values():
                decoder.register_forward_pre_hook(_give_masks, with_kwargs=True)


def _has_known_linear_attention(layer: nn.Module) -> bool:
    return type(getattr(layer, "linear_attn", None)).__name__ in _KNOWN


def _forward(
    module: nn.Module, hidden_states: Tensor, *args: Any, attention_mask: Any = None, **kwargs: Any
) -> Tensor:
    if isinstance(attention_mask, LinearMask):
        return gated_delta_net(module, hidden_states, attention_mask.pieces)
    # Any other mask is the module's own affair.
    theirs = type(module).forward
    return theirs(module, hidden_states, *args, attention_mask=attention_mask, **kwargs)


def _to_contiguous(
    layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    mask = kwargs["attention_mask"]
    if isinstance(mask, LinearMask) and mask.move is not None:
        # Hidden states come in attention's layout.
        args = (mask.move.to_contiguous(args[0]),)
    return args, kwargs


def _to_layout(
    layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], out: Tensor
) -> Tensor:
    mask = kwargs["attention_mask"]
    if isinstance(mask, LinearMask) and mask.move is not None:
        return mask.move.to_layout(out)
    return out


@torch.compiler.disable
def _give_masks(
    decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[()], dict[str, Any]] | None:
    """Resolve the documents of a forward, and give each kind of layer its mask."""
    settings = settings_of(decoder.config._attn_implementation)
    if settings is None:
        return None
    # Models pass their inputs by name.
    kwargs = dict(zip(inspect.signature(decoder.forward).parameters, args)) | kwargs
    tokens = kwargs.get("inputs_embeds")
    if tokens is None:
        ids = kwargs["input_ids"]
        tokens = torch.empty(*ids.shape, 0, device=ids.device)
    # Its name since transformers 5.24, and before.
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    positions = kwargs.get("position_ids")
    if positions is not None and positions.ndim == 3:
        # Those of pictures have no line of their own for text.
        positions = positions[0] if len(positions) == 4 else None
    given = kwargs.get("attention_mask")
    masks: dict[str, Any] = {"linear_attention": None}
    if isinstance(given, dict):
        masks |= given
    else:
        inputs = (decoder.config, tokens, given, cache, positions)
        masks["full_attention"] = create_causal_mask(*inputs)
        masks["linear_attention"] = create_recurrent_attention_mask(*inputs[:4])
    kwargs["attention_mask"] = masks
    if isinstance(masks["full_attention"], Tensor):
        # Tokens that follow cached ones.
        return (), kwargs
    mask = as_layer_mask(masks["full_attention"], tokens.shape[1])
    ranges = mask.ranges(positions, tokens[:, None], settings)
    if settings.ranks == 1 and not has_documents(ranges):
        return (), kwargs
    if ranges.slices is not None:
        raise ValueError(
            "linear attention does not know the documents of padding between tokens or of Slices; "
            "move the padding to one side, or write AttentionMask(Documents(lengths))"
        )
    if cache is not None or kwargs.get("use_cache"):
        raise ValueError(
            "states of linear attention are not cached beside documents or ranks; "
            "write use_cache=False"
        )
    kwargs["use_cache"] = False
    masks["full_attention"] = AttentionMask(ranges)
    window = decoder.config.linear_conv_kernel_dim
    masks["linear_attention"] = _linear_mask(window, ranges, tokens, settings)
    return (), kwargs


def _linear_mask(
    window: int, ranges: MaskRanges, tokens: Tensor, settings: AttentionSettings
) -> LinearMask:
    """window: tokens of the convolution."""
    batch = len(tokens)
    seq_len = tokens.shape[1] * settings.ranks
    lengths = [[seq_len]] * batch
    if ranges.document_start is not None:
        # Runs of padding count as documents.
        starts = ranges.document_start.expand(batch, -1).cpu()
        lengths = [row.unique_consecutive(return_counts=True)[1].tolist() for row in starts]
    cp = one_rank(16) if settings.cp is None else settings.cp
    pieces = split_documents(lengths, seq_len, window, cp, tokens.device)
    if cp.size == 1 or cp.layout == "contiguous":
        return LinearMask(pieces, None)
    table = cp.block_table(seq_len) if ranges.table is None else ranges.table.cpu()
    return LinearMask(pieces, Move(table, cp.block_size, cp, tokens.device))
