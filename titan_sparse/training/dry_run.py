"""train.py --dry-run and --find-max-length: what a step will need, from the configuration alone.

They need no GPU, no data, and no process group. memory.py and flops.py do the counting.
"""

import bisect
import copy
import dataclasses
import math
import operator
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from titan_sparse.attention import backends
from titan_sparse.attention.context_parallel import schedules
from titan_sparse.config import Checkpoint, Config, padding_multiple
from titan_sparse.estimate.flops import causal_pairs, flops_per_token, windows_of
from titan_sparse.estimate.memory import (
    GIB,
    estimate,
    kept_by_block,
    master_bytes,
    peak_gib,
    peak_phase,
)
from titan_sparse.estimate.step import StepShape
from titan_sparse.models.config import DecoderConfig
from titan_sparse.models.flavours import resolve
from titan_sparse.options.values import show
from titan_sparse.training.attention import (
    backend_case,
    build_pattern,
    selecting_layers,
    why_dense,
)
from titan_sparse.training.model import model_line
from titan_sparse.training.step_graphs import explain
from titan_sparse.training.step_shape import step_of

OUTSIDE_GIB = 1.5
"""Device memory that PyTorch's allocator does not hand out: CUDA context, libraries and gaps."""
COMMUNICATORS_GIB = 2.0
"""The same for NCCL, with several ranks."""
RESERVE = 0.03
"""Share of a device's memory that stays free, because the estimate can be too low by so much
(docs/training.md)."""
HOST_RESERVE = 0.1
"""Share of a machine's memory that stays free, for what is not counted."""

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_LONGEST = 2**30
"""Tokens: where the search for the longest sequence ends."""


@dataclass(frozen=True)
class World:
    """The machine on which the run would be.

    device_memory, host_memory: GiB of one GPU, and of the CPU memory of a node; inf if unknown.
    """

    ranks: int
    ranks_per_node: int
    device_memory: float = math.inf
    host_memory: float = math.inf

    @property
    def outside(self) -> float:
        """GiB that PyTorch's allocator does not hand out."""
        return OUTSIDE_GIB + (COMMUNICATORS_GIB if self.ranks > 1 else 0)

    def fits(self, device_gib: float) -> bool:
        """True if a step that needs so much of PyTorch's allocator fits."""
        return device_gib <= (1 - RESERVE) * self.device_memory - self.outside

    def __str__(self) -> str:
        return "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"


def world(ranks: int, ranks_per_node: int, device_memory: float, host_memory: float = 0.0) -> World:
    """The world of a run.

    device_memory, host_memory: GiB. 0 means those of this machine, if it has a GPU.
    """
    device = host = math.inf
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0).total_memory / GIB
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        # What a container may have of it.
        limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
        host = min(installed, int(limit) if limit != "max" else installed) / GIB
    return World(ranks, ranks_per_node, device_memory or device, host_memory or host)


def dry_run(config: Config, where: World) -> tuple[str, bool]:
    """The report, and whether the step fits. A step fits if the device's memory is unknown.

    Raises ValueError for what a run would refuse: CUDA graphs of a step that cannot be captured.
    """
    step = _step(config, where)
    verdicts, fits = _verdicts(step, config.checkpoint, where)
    lines = [*_shape(config, step, where), *_table(step), "", *verdicts]
    if not where.fits(peak_gib(step)):
        lines.append(_what_helps(step, where))
    return "\n".join([*lines, *_flops(config, step, where)]), fits


def find_max_length(config: Config, where: World) -> tuple[str, bool]:
    """A line with the longest training.seq_len that fits, and whether there is one.

    Raises ValueError if the device's memory is unknown.
    """
    if math.isinf(where.device_memory):
        raise ValueError("--find-max-length: this machine has no GPU; write --device-memory GIB")
    longer = copy.deepcopy(config)
    multiple = padding_multiple(config)

    def verdicts_on(multiples: int) -> tuple[list[str], bool]:
        longer.training.seq_len = multiples * multiple
        return _verdicts(_step(longer, where), config.checkpoint, where)

    lengths = range(1, _LONGEST // multiple + 1)
    fitting = bisect.bisect_left(lengths, True, key=lambda number: not verdicts_on(number)[1])
    verdicts = "; ".join(verdicts_on(max(fitting, 1))[0])
    if fitting == 0:
        return f"nothing fits: {multiple:,} tokens need {verdicts}", False
    return (
        f"training.seq_len = {fitting * multiple} is the longest multiple of {multiple} "
        f"that fits on {where}: {verdicts}"
    ), True


def _step(config: Config, where: World) -> StepShape:
    model = resolve(**vars(config.model))
    return step_of(config, model, _backend(config, model), where.ranks, where.ranks_per_node)


def _backend(config: Config, model: DecoderConfig) -> str:
    """The backend of attention, with "auto" resolved.

    Without a GPU it is what "auto" means on one with FlashAttention-4, which needs more memory.
    """
    name = config.attention.backend
    if name != "auto":
        return name
    if config.training.device == "cpu":
        return "eager"
    dtype = getattr(torch, config.training.dtype)
    tokens = config.training.seq_len
    case = backend_case(config.attention, "cuda", dtype, model.head_dim, tokens)
    return backends.choose(**case, here=torch.cuda.is_available())


def _shape(config: Config, step: StepShape, where: World) -> list[str]:
    model = step.model
    lines = [
        f"{model_line(config, model, step.adapters)}; {where}, parameters over {step.shards}",
        f"{step.sequences} x {config.training.seq_len:,} tokens (padded to {step.seq_len:,}), "
        f"{step.tokens:,} a rank; checkpointing {step.mode}, "
        f"{'' if step.compiled else 'not '}compiled, "
        f"attention by {step.backend}, schedule {step.schedule.name}",
    ]
    # A machine without a GPU asks about one that has some.
    device_type = "cpu" if config.training.device == "cpu" else "cuda"
    _, queueing = explain(config, model, device_type, where.ranks_per_node)
    lines.append(f"steps: {queueing}")
    if dense := why_dense(config, model):
        lines.append(dense)
    if not model.runs_in_transformers:
        return lines
    line = f"a {model.model_type}"
    if model.experts:
        active = model.weights_per_token() + model.vocab_size * model.hidden_size
        line += (
            f", {model.experts_per_token} of {model.experts} experts a token "
            f"({active / 1e6:,.1f} M active parameters)"
        )
    if model.linear_layers:
        line += f", linear attention in {len(model.linear_layers)} of {model.layers} layers"
    return [
        *lines,
        f"{line}; the memory of its layers is estimated as if they were our own, and was not measured",
    ]


def _table(step: StepShape) -> list[str]:
    """GiB: a row for each part, a column for each phase."""
    phases = estimate(step)
    peak = peak_phase(phases)
    lines = ["", "GiB of a rank at the worst moment of each phase:"]
    # Phases are numbered from 1, because their names would be too wide for columns.
    header = f"  {'part':<28}"
    for number, (phase, parts) in enumerate(phases.items(), 1):
        mark = "  <- the peak" if phase == peak else ""
        lines.append(f"  ({number}) {phase:<28}{sum(parts.values()):9.2f}{mark}")
        header += f"{f'({number})':>9}"
    lines.append(header)
    # Parts in the order in which the phases name them first.
    for part in dict.fromkeys(part for parts in phases.values() for part in parts):
        sizes = [parts.get(part, 0.0) for parts in phases.values()]
        # What would be printed as 0.00 everywhere is left out.
        if max(sizes) >= 0.005:
            lines.append(f"  {part:<28}" + "".join(f"{size:9.2f}" for size in sizes))
    return lines


def _verdicts(step: StepShape, checkpoint: Checkpoint, where: World) -> tuple[list[str], bool]:
    """A line about the GPU's memory, one about CPU memory if a run needs some, and whether both are
    enough."""
    needed = peak_gib(step)
    line = (
        f"peak {needed:.2f} GiB, and {where.outside:.1f} outside of PyTorch's allocator: "
        f"{needed + where.outside:.2f} GiB"
    )
    fits = where.fits(needed)
    lines = [_compared(line, "--device-memory GIB", where.device_memory, RESERVE, fits)]
    # GiB of a rank
    if parts := host_gib(step, checkpoint):
        of_rank = sum(parts.values())
        names = " + ".join(f"{part} {size:.2f}" for part, size in parts.items())
        of_node = of_rank * where.ranks_per_node
        line = f"CPU memory: {of_rank:.2f} GiB a rank ({names}), {of_node:.2f} a node"
        holds = of_node <= (1 - HOST_RESERVE) * where.host_memory
        option = "--host-memory GIB of a node"
        lines.append(_compared(line, option, where.host_memory, HOST_RESERVE, holds))
        fits = fits and holds
    return lines, fits


def _compared(line: str, option: str, memory: float, reserve: float, fits: bool) -> str:
    if math.isinf(memory):
        return f"{line}; to compare it write {option}"
    verdict = "fits" if fits else "does NOT fit"
    return f"{line} of {memory:.1f}, {100 * reserve:.0f} % kept free: {verdict}"


_LEVERS = (
    ("activation_checkpoint.mode", "mode", "full"),
    ("training.loss_chunk_tokens", "loss_chunk_tokens", 1024),
    ("parallelism.reshard_after_forward", "reshard_after_forward", True),
    ("attention.backend", "backend", "triton"),
    ("activation_checkpoint.attention_recompute", "attention_recompute", 1.0),
    ("activation_checkpoint.offload", "offload", True),
    ("training.mlp_chunk_tokens", "mlp_chunk_tokens", 4096),
    ("optimizer.offload", "offload_optimizer", True),
)
"""Keys that may lower the peak, the field of StepShape that each sets, and the value to write."""


def _what_helps(step: StepShape, where: World) -> str:
    """Each lever alone, all together, and more ranks for a sequence."""
    now = peak_gib(step)
    peaks = {}
    improved = step
    for key, name, value in _LEVERS:
        size = peak_gib(dataclasses.replace(step, **{name: value}))
        # Levers that save next to nothing are not worth a line.
        if size < now - 0.05 and not (step.adapters and name == "offload_optimizer"):
            improved = dataclasses.replace(improved, **{name: value})
            peaks[f"{key} = {show(value)}"] = size
    peaks = dict(sorted(peaks.items(), key=operator.itemgetter(1)))
    as_well = " as well" if peaks else ""
    if len(peaks) > 1:
        peaks["all of these"] = peak_gib(improved)
    # One rank has nothing to move; two ranks would gather.
    schedule = (
        schedules.ALL_GATHER if step.schedule.moves is schedules.Moves.NOTHING else step.schedule
    )
    wider = dataclasses.replace(improved, cp=2 * step.cp, shards=2 * step.shards, schedule=schedule)
    peaks[f"parallelism.cp = {wider.cp} on {2 * where.ranks} ranks{as_well}"] = peak_gib(wider)
    texts = [f"{key} {x:.1f} GiB{' (fits)' * where.fits(x)}" for key, x in peaks.items()]
    return "the peak would be with " + "; ".join(texts)


def _flops(config: Config, step: StepShape, where: World) -> list[str]:
    """FLOPs of a step, dense, and with the pattern at its caps."""
    training = config.training
    attention = config.attention
    model = step.model
    seq_len = training.seq_len
    sequences = training.local_batch_size * training.gradient_accumulation_steps
    sequences *= where.ranks // config.parallelism.cp
    tokens = sequences * seq_len

    def petaflop(pairs: float) -> float:
        """pairs: visited in one sequence by a head of each layer, summed over layers."""
        return tokens * flops_per_token(model, model.heads * pairs / seq_len, step.adapters) / 1e15

    windows = windows_of(model, attention.sliding_window)
    pairs = [causal_pairs(seq_len, window, attention.window_sinks) for window in windows]
    for layer in model.linear_layers:
        pairs[layer] = 0.0
    dense = petaflop(sum(pairs))
    lines = [
        "",
        f"a step: {sequences:,} sequences, {tokens:,} tokens, {dense:,.2f} PFLOP dense, of which "
        f"attention {100 * (1 - petaflop(0.0) / dense):.0f} % (recomputation not counted)",
    ]
    pattern = build_pattern(attention)
    if hasattr(pattern, "most_blocks"):
        selecting = selecting_layers(attention, model)
        dense_pairs = sum(pairs[layer] for layer in selecting)
        block_size = attention.block_size
        verticals = pattern.vertical_capacity(seq_len, block_size, False)
        keys = verticals + block_size * pattern.most_blocks(seq_len, block_size, False)
        most_pairs = min(len(selecting) * seq_len * keys, dense_pairs)
        lines.append(
            f"with {pattern.name} at most {petaflop(sum(pairs) - dense_pairs + most_pairs):,.2f} "
            "PFLOP, by the caps of its budgets (density "
            f"{100 * most_pairs / dense_pairs if dense_pairs else 100.0:.1f} %)"
        )
    return lines


def host_gib(step: StepShape, checkpoint: Checkpoint) -> dict[str, float]:
    """GiB of CPU memory that a rank takes for what is not on its GPU, by part, without parts of 0.

    Python, libraries, the loader and the disk cache are not counted. Each data-parallel replica is
    counted with a whole save, though they share it.
    """
    parameters = master_bytes(step)
    states = parameters * step.optimizer_states
    parts: dict[str, float] = {}
    if step.offload_optimizer:
        # Weights, their gradients, and what the optimizer keeps.
        parts["optimizer.offload"] = 2 * parameters + states
    if step.offload:
        # All blocks but the last, whose backward comes at once.
        parts["activation_checkpoint.offload"] = (step.model.layers - 1) * kept_by_block(step)
    if checkpoint.enable and checkpoint.async_mode != "disabled":
        parts["copy for a save"] = parameters + states
    return {part: size / GIB for part, size in parts.items() if size}
