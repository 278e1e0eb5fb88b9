"""What attention reads from torchtitan's batches, and what it reports, without torchtitan's classes.

torchtitan packs documents, and every token brings its position in its document. In the order of the
whole sequence, a document begins where the position is 0. So positions alone say what a token sees.
"""

import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from titan_sparse.attention import ContextParallel
from titan_sparse.attention.context_parallel.group import context_of
from titan_sparse.attention.context_parallel.layouts import block_multiple
from titan_sparse.attention.masks import MaskRanges
from titan_sparse.attention.masks.ranges import once_per_mask
from titan_sparse.attention.observe import Recording, worker_imbalance

_LAYOUTS = {"headtail": "zigzag", None: "contiguous"}


def layout_of(load_balancer: str | None) -> str:
    """Our name for the order in which one of torchtitan's load balancers deals out a sequence.

    Raises ValueError for one that follows from a BlockMask.
    """
    if load_balancer not in _LAYOUTS:
        raise ValueError(
            f'load_balancer = "{load_balancer}" deals out tokens by a BlockMask, which titan_sparse '
            'does not build; write "headtail" or null, also in '
            "--parallelism.context_parallel_load_balancer"
        )
    return _LAYOUTS[load_balancer]


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""From a batch's positions to its mask, which all layers share, by ContextParallel."""


def mask_of_positions(positions: Tensor, cp: str, window: int | None) -> MaskRanges:
    """The mask of the whole sequence. Collective over the context-parallel ranks.

    positions: int [B, S_local], of this rank's tokens in their documents. cp: the key of the
    ContextParallel. window: keys that a query sees, its own included; None for all.
    """
    if torch.compiler.is_compiling():
        # Each compiled layer makes its own mask, as tensors of its graph.
        ranges = _ranges(torch.ops.titan_sparse.document_starts(positions, cp))
        return ranges if window is None else _windowed(ranges, window)
    known = _known.setdefault(positions, {})
    key = (cp, positions._version)
    if key not in known:
        known[key] = _ranges(_find_document_starts(positions, cp))
    if window is None:
        return known[key]
    return once_per_mask(known[key], ("window", window), lambda: _windowed(known[key], window))


def _ranges(starts: Tensor) -> MaskRanges:
    """Causal inside of documents. starts: int32 [B, S], where the document of each token begins."""
    stop = torch.arange(1, starts.shape[1] + 1, dtype=torch.int32, device=starts.device)
    return MaskRanges(starts, stop.expand_as(starts), document_start=starts)


def _windowed(ranges: MaskRanges, window: int) -> MaskRanges:
    return ranges._replace(start=torch.maximum(ranges.start, ranges.stop - window))


_checked: weakref.WeakSet[ContextParallel] = weakref.WeakSet()
"""Those whose order of tokens was compared with torchtitan's."""


def _find_document_starts(positions: Tensor, cp: str) -> Tensor:
    """int32 [B, S]: where the document of each token of the whole sequence begins.

    Raises ValueError for what would give wrong results, or is not known to work.
    """
    if positions.ndim != 2:
        raise ValueError(
            f"positions {list(positions.shape)} are not [batch, tokens]; titan_sparse needs a model "
            "with one position per token"
        )
    _check_step(positions)
    context = context_of(cp)
    whole = positions.int()
    if context.size > 1:
        whole = _in_order(whole, context)
    index = torch.arange(whole.shape[1], dtype=torch.int32, device=whole.device)
    return torch.where(whole == 0, index, 0).cummax(1).values


def _check_step(positions: Tensor) -> None:
    """Raises ValueError for ways to run a step in which attention is not known to work."""
    if positions.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "titan_sparse is not known to work inside torchtitan's CUDA graphs; write "
            "--training.disable_cuda_graphs"
        )
    if torch._functorch.config.activation_memory_budget < 1:
        raise ValueError(
            "memory-budget checkpointing may repeat attention and its transfers in the backward; "
            "write activation_checkpoint:selective"
        )


def _in_order(positions: Tensor, cp: ContextParallel) -> Tensor:
    """The positions of all ranks [B, S] in the order of the sequence, from those of this rank."""
    length = positions.shape[1] * cp.size
    multiple = block_multiple(cp.layout, cp.size) * cp.block_size
    if length % multiple:
        raise ValueError(
            f"training.seq_len = {length} does not divide into blocks of {cp.block_size} tokens over "
            f"{cp.size} ranks; write a multiple of {multiple}, or a smaller block_size"
        )
    whole = cp.unshard(positions, 1)
    next_position = whole[:, 1:]
    continues = next_position == whole[:, :-1] + 1
    is_sequence = (continues | (next_position == 0)).all()
    refusal = (
        'the positions of all ranks do not make a sequence in the order of load_balancer = "'
        f'{_balancer_of(cp.layout)}"; write the same in the options of titan_sparse and in '
        "--parallelism.context_parallel_load_balancer"
    )
    if cp in _checked and whole.is_cuda:
        # The host does not wait.
        torch._assert_async(is_sequence, refusal)
    elif not is_sequence:
        raise ValueError(refusal)
    _checked.add(cp)
    return whole


def _balancer_of(layout: str) -> str | None:
    return next(name for name, ours in _LAYOUTS.items() if ours == layout)


@torch.library.custom_op("titan_sparse::document_starts", mutates_args=())
def _document_starts(positions: Tensor, cp: str) -> Tensor:
    return _find_document_starts(positions, cp)


@_document_starts.register_fake
def _fake_document_starts(positions: Tensor, cp: str) -> Tensor:
    batch, tokens = positions.shape
    return positions.new_empty(batch, tokens * context_of(cp).size, dtype=torch.int32)


def averages(recorded: Recording, device: torch.device) -> dict[str, float]:
    """Means over layers, heads, and all ranks of what was recorded. Collective over all processes.

    density: share of allowed pairs that were computed. recall: share of the attention mass that these
    hold. capped: share of budgets that a cap kept below the recall, where the pattern has budgets.
    imbalance: pairs of the busiest context-parallel rank over their mean, with several ranks.
    Raises ValueError if no attention ran.
    """
    by_layer = {
        "density": recorded.density().mean(1) if recorded.visited else [],
        "recall": [recall.mean() for recall in recorded.recall],
        "capped": [capped.mean() for capped in recorded.capped],
        "imbalance": worker_imbalance(recorded.by_rank().work) if recorded.calls else [],
    }
    sums = torch.zeros(len(by_layer), 2, dtype=torch.float64, device=device)
    for row, values in zip(sums, by_layer.values()):
        for value in values:
            row += torch.stack([value.to(row), row.new_ones(())])
    if dist.is_initialized():
        dist.all_reduce(sums)
    found = {}
    for name, (total, count) in zip(by_layer, sums.tolist()):
        if count:
            found[name] = total / count
    if "density" not in found:
        raise ValueError(
            "titan_sparse computed no attention in this step; add "
            "titan_sparse.integrations.torchtitan.vertical_slash to --override.imports"
        )
    return found
