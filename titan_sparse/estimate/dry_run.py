"""train.py --dry-run and --find-max-length: what a step will need, from the configuration alone.

There is no GPU, no data and no process group. memory.py and flops.py do the counting.
"""

import copy
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from titan_sparse.attention import backends
from titan_sparse.attention.backends import cudnn, flash
from titan_sparse.attention.context_parallel.schedule import ALL_GATHER, Moves
from titan_sparse.attention.patterns import Pattern
from titan_sparse.config import Checkpoint, Config, padding_multiple
from titan_sparse.config.reading import KINDS
from titan_sparse.estimate.flops import causal_pairs, flops_per_token, windows_of
from titan_sparse.estimate.memory import (
    GIB,
    LEVERS,
    Step,
    estimate,
    kept_by_block,
    master_bytes,
    peak_gib,
    peak_phase,
    step_of,
)
from titan_sparse.from_config import backend_case, build_pattern, has_slices
from titan_sparse.models.flavours import (
    DecoderConfig,
    TransformersConfig,
    choose_implementation,
    number_of_parameters,
    resolve,
)
from titan_sparse.models.lora_config import adapter_elements, resolve_adapters

OUTSIDE_GIB = 1.5
"""Device memory that PyTorch's allocator does not hand out: CUDA context, libraries and gaps."""
COMMUNICATORS_GIB = 2.0
"""The same for NCCL, with several ranks."""

HOST_RESERVE = 0.1
"""Share of a machine's memory that stays free, for what is not counted."""

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")

RESERVE = 0.03
"""Share of a device's memory that stays free: the estimate is up to so much too low
(docs/training.md)."""

_LONGEST = 2**30
"""Tokens: where the search for the longest sequence ends."""


@dataclass(frozen=True)
class World:
    """Where the run would be. device_memory, host_memory: GiB of one GPU, and of the CPU memory of
    a node; None where they are not known."""

    ranks: int
    ranks_per_node: int
    device_memory: float | None
    host_memory: float | None = None

    @property
    def usable(self) -> float | None:
        """GiB that a step may be estimated to need of PyTorch's allocator."""
        if self.device_memory is None:
            return None
        not_reserved = (1 - RESERVE) * self.device_memory
        return not_reserved - outside_gib(self.ranks)

    @property
    def usable_host(self) -> float | None:
        """GiB of CPU memory that all ranks of a node may be counted to need."""
        if self.host_memory is None:
            return None
        return (1 - HOST_RESERVE) * self.host_memory

    def holds(self, host_gib_of_rank: float) -> bool:
        """Whether a node has the CPU memory for its ranks; also where it is not known."""
        needed = host_gib_of_rank * self.ranks_per_node
        return self.usable_host is None or needed <= self.usable_host


def outside_gib(ranks: int) -> float:
    """GiB of a device's memory that are not PyTorch's to hand out."""
    if ranks > 1:
        return OUTSIDE_GIB + COMMUNICATORS_GIB
    return OUTSIDE_GIB


def world(ranks: int, ranks_per_node: int, device_memory: float, host_memory: float = 0.0) -> World:
    """The world of a run. device_memory, host_memory: GiB; 0 means those of the GPU that is here,
    and of its machine."""
    device: float | None = device_memory or None
    host: float | None = host_memory or None
    if torch.cuda.is_available():
        device = device or torch.cuda.get_device_properties(0).total_memory / GIB
        host = host or host_of_this_machine()
    return World(ranks, ranks_per_node, device, host)


def dry_run(config: Config, where: World) -> tuple[str, bool]:
    """The report, and whether the step fits.

    It counts as fitting where the device's memory is not known.
    """
    model = resolve(**vars(config.model))
    pattern = build_pattern(config.attention)
    step = _step(config, model, pattern, where)
    needed = peak_gib(step)
    fits = where.usable is None or needed <= where.usable
    on_host = host_gib(step, config.checkpoint)
    lines = _shape(config, step, where)
    lines += _of_transformers(config, model)
    lines += _table(step)
    lines += _verdict(needed, where)
    if not fits:
        lines += _what_helps(step, where)
    lines += _host_verdict(on_host, where)
    lines += _flops(config, model, pattern, where)
    return "\n".join(lines), fits and where.holds(sum(on_host.values()))


def find_max_length(config: Config, where: World) -> tuple[str, bool]:
    """A line with the longest training.seq_len that fits, and whether there is one.

    Raises ValueError where the device's memory is not known.
    """
    if where.usable is None:
        raise ValueError(
            "--find-max-length: no GPU is here whose memory could be looked up; "
            "write --device-memory GIB"
        )
    model = resolve(**vars(config.model))
    pattern = build_pattern(config.attention)
    multiple = padding_multiple(config)

    def step_of_length(multiples: int) -> Step:
        longer = copy.deepcopy(config)
        longer.training.seq_len = multiples * multiple
        return _step(longer, model, pattern, where)

    def fits(step: Step) -> bool:
        on_host = sum(host_gib(step, config.checkpoint).values())
        return peak_gib(step) <= where.usable and where.holds(on_host)

    # Bisection: `low` fits (0 tokens do), and nothing above `high` does.
    low = 0
    high = _LONGEST // multiple
    while low < high:
        middle = (low + high + 1) // 2
        if fits(step_of_length(middle)):
            low = middle
        else:
            high = middle - 1

    room = f"{where.usable:.1f} GiB that PyTorch may have of {where.device_memory:.1f}"
    step = step_of_length(max(low, 1))
    host_line = "".join(
        f"; {line}" for line in _host_verdict(host_gib(step, config.checkpoint), where)
    )
    needed = peak_gib(step)
    if low == 0:
        against = "more than" if needed > where.usable else "within"
        line = (
            f"nothing fits: {multiple:,} tokens need {needed:.1f} GiB a rank, "
            f"{against} the {room}{host_line}"
        )
        return line, False
    line = (
        f"training.seq_len = {low * multiple} is the longest multiple of {multiple} "
        f"that fits on {_ranks(where)}: {needed:.1f} GiB a rank, within the {room}{host_line}"
    )
    return line, True


def _step(config: Config, model: DecoderConfig, pattern: Pattern, where: World) -> Step:
    backend = _backend(config, model)
    return step_of(
        config,
        model,
        pattern,
        backend,
        world_size=where.ranks,
        local_world_size=where.ranks_per_node,
    )


def _backend(config: Config, model: DecoderConfig) -> str:
    """The backend of attention, with "auto" resolved.

    Where no GPU is there to ask, it is what "auto" means on one with FlashAttention-4, because that
    needs more memory.
    """
    name = config.attention.backend
    if name != "auto":
        return name
    if config.training.device == "cpu":
        return "eager"
    dtype = getattr(torch, config.training.dtype)
    if torch.cuda.is_available():
        case = backend_case(config.attention, "cuda", dtype, model.head_dim)
        return backends.choose(**case)
    if dtype == torch.float64:
        return "eager"
    block_size = config.attention.block_size
    if dtype != torch.bfloat16 or has_slices(config.attention):
        return "triton"
    if model.head_dim in flash.HEAD_DIMS and block_size == 128:
        return "flex"
    cudnn_can = model.head_dim in cudnn.HEAD_DIMS and block_size in cudnn.BLOCK_SIZES
    if cudnn_can and config.attention.pattern == "dense":
        return "cudnn"
    return "triton"


def _shape(config: Config, step: Step, where: World) -> list[str]:
    """What is trained, and how."""
    name = config.model.initial_hf or config.model.flavour
    parameters = number_of_parameters(step.model) / 1e6
    seq_len = config.training.seq_len
    compiled = "compiled" if step.compiled else "not compiled"
    trained = ""
    if step.adapters:
        millions = adapter_elements(step.model, step.adapters) / 1e6
        trained = f" and {millions:,.1f} M of adapters of rank {step.adapters.rank}"
    model_line = (
        f"{name}, {parameters:,.1f} M parameters{trained}, {_ranks(where)}, "
        f"parameters over {step.shards}"
    )
    step_line = (
        f"{step.sequences} x {seq_len:,} tokens (padded to {step.seq_len:,}), "
        f"{step.tokens:,} a rank; checkpointing {step.mode}, {compiled}, "
        f"attention by {step.backend}, schedule {step.schedule.name}"
    )
    return [model_line, step_line]


def _of_transformers(config: Config, model: DecoderConfig) -> list[str]:
    """What is special of a model that runs through transformers' own code."""
    if not isinstance(model, TransformersConfig):
        return []
    _, reason = choose_implementation(config.model.initial_hf, config.model.implementation)
    line = f"a {model.model_type} through transformers' own code ({reason})"
    if model.experts:
        active = model.linear_weights + model.vocab_size * model.hidden_size
        line += (
            f", {model.experts_per_token} of {model.experts} experts a token "
            f"({active / 1e6:,.1f} M active parameters)"
        )
    if model.window:
        with_window = sum(window > 0 for window in model.windows)
        line += f", a window of {model.window:,} in {with_window} of {model.layers} layers"
    if model.sinks:
        line += ", learned sinks"
    not_known = (
        "; the memory of its layers is estimated as if they were our own, and was not measured"
    )
    return [line + not_known]


def _ranks(where: World) -> str:
    plural = "s" if where.ranks > 1 else ""
    return f"{where.ranks} rank{plural}"


def _table(step: Step) -> list[str]:
    """GiB: a row for each part, a column for each phase."""
    phases = estimate(step)
    peak = peak_phase(phases)
    lines = ["", "GiB of a rank at the worst moment of each phase:"]
    for number, (phase, parts) in enumerate(phases.items(), 1):
        mark = "  <- the peak" if phase == peak else ""
        total = sum(parts.values())
        lines.append(f"  ({number}) {phase:<28}{total:9.2f}{mark}")

    # Phases are numbered from 1: their names would be too wide for columns.
    header = f"  {'part':<28}"
    for number in range(1, len(phases) + 1):
        column = f"({number})"
        header += f"{column:>9}"
    lines.append(header)

    # Parts in the order in which the phases name them first.
    parts_in_order: dict[str, None] = {}
    for parts in phases.values():
        parts_in_order |= dict.fromkeys(parts)
    for part in parts_in_order:
        sizes = [parts.get(part, 0.0) for parts in phases.values()]
        # What would be printed as 0.00 everywhere is left out.
        if max(sizes) >= 0.005:
            columns = [f"{size:9.2f}" for size in sizes]
            lines.append(f"  {part:<28}" + "".join(columns))
    return lines


def _verdict(needed: float, where: World) -> list[str]:
    """Whether `needed` GiB fit."""
    outside = outside_gib(where.ranks)
    total = (
        f"peak {needed:.2f} GiB, and {outside:.1f} outside of PyTorch's allocator: "
        f"{needed + outside:.2f} GiB"
    )
    if where.device_memory is None:
        return ["", f"{total}; no GPU is here to compare with: write --device-memory GIB"]
    verdict = "fits" if needed <= where.usable else "does NOT fit"
    return ["", f"{total} of {where.device_memory:.1f}, {100 * RESERVE:.0f} % kept free: {verdict}"]


def _host_verdict(parts: dict[str, float], where: World) -> list[str]:
    """A line about CPU memory, if a run needs some. parts: GiB of a rank."""
    if not parts:
        return []
    of_rank = sum(parts.values())
    names = " + ".join(f"{part} {size:.2f}" for part, size in parts.items())
    of_node = of_rank * where.ranks_per_node
    line = f"CPU memory: {of_rank:.2f} GiB a rank ({names}), {of_node:.2f} a node"
    if where.host_memory is None:
        return [f"{line}; to compare it write --host-memory GIB of a node"]
    verdict = "fits" if where.holds(of_rank) else "does NOT fit"
    free = f"{100 * HOST_RESERVE:.0f} % kept free"
    return [f"{line}, of {where.host_memory:.1f}, {free}: {verdict}"]


def _levers(step: Step) -> list[tuple[str, dict]]:
    """What to write, and what it changes, for all that lowers the peak and is not in use yet."""
    levers: list[tuple[str, dict]] = []
    if step.mode != "full":
        levers.append(('activation_checkpoint.mode = "full"', {"mode": "full"}))
    if step.loss_chunk_tokens > 1024:
        levers.append(("training.loss_chunk_tokens = 1024", {"loss_chunk_tokens": 1024}))
    if not step.reshard_after_forward:
        levers.append(("parallelism.reshard_after_forward = true", {"reshard_after_forward": True}))
    if step.backend in ("cudnn", "flex"):
        levers.append(('attention.backend = "triton"', {"backend": "triton"}))
    wanted = {
        "attention_recompute": 1.0,
        "offload": True,
        "mlp_chunk_tokens": 4096,
        "offload_optimizer": True,
    }
    for field, value in wanted.items():
        is_possible = field != "offload_optimizer" or step.adapters is None
        if LEVERS[field] in KINDS and is_possible and not getattr(step, field):
            levers.append((f"{LEVERS[field]} = {str(value).lower()}", {field: value}))
    return levers


def _what_helps(step: Step, where: World) -> list[str]:
    """Each lever alone, all together, and more ranks for a sequence."""

    def with_size(text: str, changed: Step) -> str:
        size = peak_gib(changed)
        verdict = ""
        if size <= where.usable:
            verdict = " (fits)"
        return f"{text} {size:.1f} GiB{verdict}"

    now = peak_gib(step)
    alone = []
    all_changes: dict = {}
    for text, change in _levers(step):
        changed = dataclasses.replace(step, **change)
        alone.append((peak_gib(changed), text, changed))
        all_changes |= change
    alone.sort(key=lambda lever: lever[:2])
    # Levers that save next to nothing are not worth a line, but they count in what comes together.
    useful = [with_size(text, changed) for size, text, changed in alone if size < now - 0.05]
    together = []
    if len(useful) > 1:
        together = [with_size("all of these", dataclasses.replace(step, **all_changes))]

    # One rank has nothing to move; two ranks would gather.
    schedule = step.schedule
    if schedule.moves is Moves.NOTHING:
        schedule = ALL_GATHER
    wider = dataclasses.replace(
        step,
        cp=2 * step.cp,
        shards=2 * step.shards,
        schedule=schedule,
        **all_changes,
    )
    as_well = " as well" if useful else ""
    more_ranks = f"parallelism.cp = {wider.cp} on {2 * where.ranks} ranks{as_well}"
    helps = [*useful, *together, with_size(more_ranks, wider)]
    return ["the peak would be with " + "; ".join(helps)]


def _flops(config: Config, model: DecoderConfig, pattern: Pattern, where: World) -> list[str]:
    """FLOPs of a step, dense, and with the pattern at its caps."""
    training = config.training
    attention = config.attention
    seq_len = training.seq_len
    sequences_of_rank = training.local_batch_size * training.gradient_accumulation_steps
    sequences = sequences_of_rank * where.ranks // config.parallelism.cp
    tokens = sequences * seq_len
    adapters = resolve_adapters(model, **vars(config.lora))

    def step_flops(pairs: float) -> float:
        """pairs: visited in one sequence by a head of each layer, summed over layers."""
        pairs_per_token = model.heads * pairs / seq_len
        return tokens * flops_per_token(model, pairs_per_token, adapters)

    # Of the layers that the pattern applies to, and of those with a window of their own.
    dense_pairs = 0.0
    window_pairs = 0.0
    for own, window in zip(windows_of(model), windows_of(model, attention.sliding_window)):
        pairs = causal_pairs(seq_len, window, attention.window_sinks)
        if own:
            window_pairs += pairs
        else:
            dense_pairs += pairs
    dense = step_flops(dense_pairs + window_pairs)
    without_attention = tokens * flops_per_token(model, 0.0, adapters)
    attention_percent = 100 * (1 - without_attention / dense)
    dense_line = (
        f"a step: {sequences:,} sequences, {tokens:,} tokens, {dense / 1e15:,.2f} PFLOP dense, "
        f"of which attention {attention_percent:.0f} % (recomputation not counted)"
    )
    if not hasattr(pattern, "most_blocks"):
        return ["", dense_line]
    block_size = attention.block_size
    verticals = pattern.vertical_capacity(seq_len, block_size, False)
    most_blocks = pattern.most_blocks(seq_len, block_size, False)
    full_layers = windows_of(model).count(0)
    most_pairs = full_layers * seq_len * (verticals + block_size * most_blocks)
    most_flops = step_flops(min(most_pairs, dense_pairs) + window_pairs)
    density_percent = 100 * min(most_pairs / dense_pairs, 1) if dense_pairs else 100.0
    sparse_line = (
        f"with {pattern.name} at most {most_flops / 1e15:,.2f} PFLOP, by the caps of its budgets "
        f"(density {density_percent:.1f} %)"
    )
    return ["", dense_line, sparse_line]


def host_gib(step: Step, checkpoint: Checkpoint) -> dict[str, float]:
    """GiB of CPU memory that a rank takes for what is not on its GPU, by part.

    A part that takes nothing is left out. Python, libraries, the loader and the disk cache come on top.

    Of data-parallel replicas each is counted with a whole save, though they share it out.
    """
    parameters = master_bytes(step)
    states = parameters * step.optimizer_states
    parts: dict[str, float] = {}
    if step.offload_optimizer:
        # Weights, their gradients, and what the optimizer keeps.
        parts["optimizer.offload"] = 2 * parameters + states
    if step.offload:
        # All blocks but the last, whose backward comes at once.
        blocks = step.model.layers - 1
        parts["activation_checkpoint.offload"] = blocks * kept_by_block(step)
    if checkpoint.enable and checkpoint.async_mode != "disabled":
        parts["copy for a save"] = parameters + states
    return {part: size / GIB for part, size in parts.items() if size}


def host_of_this_machine() -> float:
    """GiB: its memory, or what a container may have of it."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if _CGROUP_LIMIT.is_file():
        limit = _CGROUP_LIMIT.read_text().strip()
        if limit.isdecimal():
            size = min(size, int(limit))
    return size / GIB
