"""Forward and backward of a batch as one CUDA graph.

Python queues a step layer by layer: attention, selection, collectives, and the hooks of FSDP. With
few tokens a GPU this takes longer than the kernels do. A CUDA graph holds all of these kernels, and
the host starts it with one call. A graph computes on the memory that it was captured with. So
whatever changes from step to step has to be a tensor, into which the next batch is copied.
"""

import copy
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from titan_sparse.attention import ContextParallel
from titan_sparse.attention.observe import Recording
from titan_sparse.config import Config, padding_multiple, resolve_cp_intra
from titan_sparse.config.reading import Refusal
from titan_sparse.config.sources import has_chats
from titan_sparse.models.flavours import DecoderConfig
from titan_sparse.training.attention import schedule_named
from titan_sparse.training.optimizer import shard_of

logger = logging.getLogger("titan_sparse")

_RUNS_BEFORE = 2
"""Batches of a shape that the host queues before it is captured. The first one compiles."""
_MOST_GRAPHS = 8
_IMPOSSIBLE = 'compile.cuda_graphs = "on" is impossible: {}; write "auto"'
_MOST_TOKENS = 65536
"""Tokens a GPU up to which "auto" takes graphs. With more of them, kernels take longer than Python
(docs/benchmarks.md), and the graphs' memory could be used better."""


class MicroBatch(NamedTuple):
    """The inputs of a forward and backward, on the device.

    tokens, positions, labels: int64 [b, S_local]. masks: as build_layer_masks() makes them. valid:
    scalar in the loss's dtype, labels that count in the step, over all ranks and micro-batches.
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    masks: Any
    valid: Tensor


class Computed(NamedTuple):
    """The results of a forward and backward, in addition to gradients.

    loss: this rank's share of the mean loss, a scalar. capped: what recorder.counting_caps() has
    collected. recorded: attention, if it was recorded. The next replay of any graph may overwrite
    these tensors.
    """

    loss: Tensor
    capped: list[Tensor]
    recorded: Recording | None


Compute = Callable[[MicroBatch, tuple[int, int] | None], Computed]
"""compute(batch, records): the forward and the backward. Gradients are added to those that
parameters have. records: the arguments of observe.recording(), or None."""


def refusal(
    config: Config, model: DecoderConfig, device_type: str, local_world_size: int | None = None
) -> str | None:
    """The reason why steps cannot be CUDA graphs, a phrase; None if they can.

    local_world_size: ranks of a node; None: those of this launch. What only a run shows is not
    known yet: a host that waits for the GPU inside a forward, as some code of transformers does.
    """
    attention = config.attention
    ranks = config.parallelism.cp
    intra = resolve_cp_intra(config.parallelism, local_world_size)
    nodes = ranks // intra
    schedule = schedule_named(attention, nodes, intra)
    is_ring = schedule in ("ring", "double_ring") and ranks > 1
    is_ring = is_ring or (schedule == "ulysses" and nodes > 1)
    # Whole sequences without padding see the same in every batch.
    has_padding = (
        config.training.seq_len % padding_multiple(config) > 0
        or config.data.sequences == "fixed_and_rest"
        or has_chats(config.data)
    )
    routes_by_index = attention.route_by == "auto" and attention.layout in ("contiguous", "zigzag")
    reasons = {
        f"graphs need a GPU, not a {device_type.upper()}": device_type != "cuda",
        "optimizer.offload = true keeps weights on the CPU": config.optimizer.offload,
        "activation_checkpoint.offload = true moves activations to the CPU": (
            config.activation_checkpoint.offload
        ),
        'attention.schedule = "group_cast" plans each batch on the host': (
            ranks > 1 and schedule == "group_cast"
        ),
        'attention.layout = "balanced" plans each batch on the host': (
            ranks > 1 and attention.layout == "balanced"
        ),
        f'attention.schedule = "{schedule}" plans each batch of documents on the host': (
            is_ring and attention.mask == "documents"
        ),
        f'attention.schedule = "{schedule}" reads on the host what each batch sees within '
        "attention.sliding_window": is_ring and attention.sliding_window > 0,
        f'attention.schedule = "{schedule}" reads on the host the padding of each batch '
        f"(training.seq_len is no multiple of {padding_multiple(config)}, or data gives shorter "
        "sequences)": is_ring and has_padding,
        'attention.backend = "eager" reads its tables on the host': attention.backend == "eager",
        'attention.route_by = "auto" plans each selection on the host': (
            is_ring and routes_by_index and attention.pattern == "vertical_slash"
        ),
        "attention.window_sinks makes tables whose size follows from the batch": (
            attention.window_sinks > 0
        ),
        "kernels of linear attention read the lengths of documents on the host": (
            len(model.linear_layers) > 0
        ),
        "lora.dropout draws random numbers that a recomputation has to draw again": (
            config.lora.dropout > 0
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def explain(
    config: Config, model: DecoderConfig, device_type: str, local_world_size: int | None = None
) -> tuple[bool, str]:
    """The phrase that says if steps become CUDA graphs, and why, for the banner. Arguments as in
    refusal().

    Raises ValueError, naming the key, if compile.cuda_graphs = "on" is impossible.
    """
    setting = config.compile.cuda_graphs
    training = config.training
    reason = refusal(config, model, device_type, local_world_size)
    tokens = training.local_batch_size * training.seq_len // config.parallelism.cp
    if setting == "off":
        reason = 'compile.cuda_graphs = "off"'
    elif setting == "on" and reason is not None:
        raise ValueError(_IMPOSSIBLE.format(reason))
    elif setting == "auto" and reason is None and tokens > _MOST_TOKENS:
        reason = f"{tokens:,} tokens a GPU keep it busy without them"
    if reason is not None:
        return False, f"queued by the host; not CUDA graphs, since {reason}"
    return True, f"forward and backward are CUDA graphs from step {_RUNS_BEFORE + 1} on"


class _Graph(NamedTuple):
    """A captured forward and backward, with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    computed: Computed

    def replay(self, inputs: list[Tensor]) -> Computed:
        for own, new in zip(self.inputs, inputs, strict=True):
            own.copy_(new)
        self.graph.replay()
        loss, capped, recorded = self.computed
        # Whoever reads a recording joins its tensors over ranks, in place.
        return Computed(loss, capped, copy.copy(recorded))


class StepGraphs:
    """Computes batches, at first queued by the host, then as replays of CUDA graphs.

    Batches of other shapes, recorded ones, and those whose gradients are added to earlier ones have
    graphs of their own. All graphs share one pool of memory, as they run one after the other, and
    one set of gradients, which is never freed.
    """

    def __init__(self, model: nn.Module, cp: ContextParallel, setting: str):
        """setting: compile.cuda_graphs; "off" also where explain() says so."""
        self.model = model
        self.cp = cp
        self.setting = setting
        self.graphs: dict[Hashable, _Graph] = {}
        self.runs: Counter[Hashable] = Counter()
        # Where the newest replay ends.
        self.replayed: torch.cuda.Event | None = None

    def __call__(
        self, compute: Compute, batch: MicroBatch, records: tuple[int, int] | None, adds: bool
    ) -> Computed:
        """The result of compute(batch, records).

        compute: the same function in every call. adds: its gradients are added to those of the
        micro-batches before it in this step.
        """
        tensors, shape = flattened(batch)
        key = (shape, records, adds)
        is_known = self.runs[shape] >= _RUNS_BEFORE and self.runs[key] > 0
        has_room = self.setting != "off" and len(self.graphs) < _MOST_GRAPHS
        if key not in self.graphs and is_known and has_room:
            self.graphs[key] = self._capture(compute, batch, records, adds)
        if key in self.graphs:
            computed = self.graphs[key].replay(tensors)
            self.replayed = torch.cuda.Event()
            self.replayed.record()
            return computed
        if self.graphs and not adds:
            self._zero_gradients()
        if self.setting == "off":
            return compute(batch, records)
        # The first run waits: it compiles, and measures which kernels are the fastest.
        is_first = not self.runs[shape]
        self.runs[shape] += 1
        self.runs[key] += 1
        with _waits_for_the_gpu() as waits:
            computed = compute(batch, records)
        if waits and not is_first:
            reason = f"the host waits for the GPU in {', '.join(dict.fromkeys(waits[:3]))}"
            if self.setting == "on":
                raise Refusal(_IMPOSSIBLE.format(reason))
            logger.warning("no more steps become CUDA graphs, since %s", reason)
            self.setting = "off"
        return computed

    def is_running(self) -> bool:
        """True while the GPU computes the newest replay, and maybe waits for other ranks in it. Any
        thread may ask."""
        try:
            return self.replayed is not None and not self.replayed.query()
        except RuntimeError:  # the GPU has failed, which the main thread says
            return False

    def free(self) -> None:
        """Free the graphs. NCCL ends a process group only when no graph holds its collectives."""
        if self.graphs:
            torch.cuda.synchronize()
        for captured in self.graphs.values():
            captured.graph.reset()
        self.graphs.clear()

    def clear_gradients(self) -> None:
        """After an update. A graph's gradients keep their memory, and each step overwrites them."""
        if not self.graphs:
            self.model.zero_grad()

    def _capture(
        self, compute: Compute, batch: MicroBatch, records: tuple[int, int] | None, adds: bool
    ) -> _Graph:
        # A graph reads memory of its own.
        batch = tree_map_only(Tensor, torch.clone, batch)
        if not self.graphs and not adds:
            self.model.zero_grad()
        zeroes = bool(self.graphs) and not adds
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values())).graph.pool() if self.graphs else None
        try:
            # Other threads, such as NCCL's and the loader's, may call CUDA meanwhile.
            with (
                self.cp.memory_apart(),
                torch.cuda.graph(graph, pool, capture_error_mode="thread_local"),
            ):
                if zeroes:
                    self._zero_gradients()
                computed = compute(batch, records)
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            raise Refusal(
                f"a step cannot be captured as a CUDA graph ({type(error).__name__}: {first_line}); "
                'write compile.cuda_graphs = "off"'
            ) from error
        return _Graph(graph, flattened(batch)[0], computed)

    def _zero_gradients(self) -> None:
        gradients = [x.grad for x in self.model.parameters() if x.grad is not None]
        if gradients:
            torch._foreach_zero_([shard_of(x) for x in gradients])


def flattened(batch: MicroBatch) -> tuple[list[Tensor], Hashable]:
    """The tensors of a batch, in order, and what else a graph of it depends on: their shapes, and
    everything that is not a tensor."""
    leaves = tree_leaves(batch)
    shape = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves)
    return [x for x in leaves if isinstance(x, Tensor)], shape


@contextmanager
def _waits_for_the_gpu() -> Iterator[list[str]]:
    """Collect where the host waits for the GPU inside: files with lines."""
    places: list[str] = []
    with warnings.catch_warnings():
        show = warnings.showwarning

        def collect(message, category, filename, lineno, *rest) -> None:
            if "synchronizing CUDA operation" in str(message):
                places.append(f"{filename}:{lineno}")
            else:
                show(message, category, filename, lineno, *rest)

        warnings.showwarning = collect
        warnings.filterwarnings("always", ".*synchronizing CUDA operation")
        # It says of itself that it is a prototype.
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)
