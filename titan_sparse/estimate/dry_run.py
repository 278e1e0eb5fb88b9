"""train.py --dry-run and --find-max-length: what a step will need, worked out from the configuration alone.

No GPU, no data and no process group: titan_sparse/memory.py and titan_sparse/flops.py do the reckoning.
"""

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from titan_sparse.attention import backends
from titan_sparse.attention.backends import flash
from titan_sparse.attention.patterns import Pattern
from titan_sparse.config import padding_multiple
from titan_sparse.config.sections import KINDS
from titan_sparse.estimate.flops import causal_pairs, flops_per_token
from titan_sparse.estimate.memory import GIB, LEVERS, Step, estimate, peak_gib, peak_phase, step_of
from titan_sparse.from_config import build_pattern, has_slices
from titan_sparse.models.flavours import DecoderConfig, number_of_parameters, resolve

if TYPE_CHECKING:
    from titan_sparse.config import Config

OUTSIDE_GIB, COMMUNICATORS_GIB = 1.5, 2.0
"""Device memory that PyTorch's allocator does not hand out: CUDA context, libraries and gaps; NCCL's with several ranks."""

RESERVE = 0.03
"""Share of a device's memory that stays free: the estimate is up to so much too low (docs/memory.md)."""

_LONGEST = 2**30


@dataclass(frozen=True)
class World:
    """Where the run would be. device_memory: GiB of one GPU, None where it is not known."""

    ranks: int
    ranks_per_node: int
    device_memory: float | None

    @property
    def usable(self) -> float | None:
        """GiB that a step may be estimated to need of PyTorch's allocator."""
        return (
            None
            if self.device_memory is None
            else (1 - RESERVE) * self.device_memory - outside_gib(self.ranks)
        )


def outside_gib(ranks: int) -> float:
    """GiB of a device's memory that are not PyTorch's to hand out."""
    return OUTSIDE_GIB + (COMMUNICATORS_GIB if ranks > 1 else 0)


def world(ranks: int, ranks_per_node: int, device_memory: float) -> World:
    """device_memory in GiB; 0: that of the GPU that is here."""
    known = device_memory or (
        torch.cuda.get_device_properties(0).total_memory / GIB
        if torch.cuda.is_available()
        else None
    )
    return World(ranks, ranks_per_node, known)


def dry_run(config: "Config", where: World) -> tuple[str, bool]:
    """The report, and whether the step fits; it counts as fitting where the device's memory is not known."""
    model, pattern = resolve(**vars(config.model)), build_pattern(config.attention)
    step = _step(config, model, pattern, where)
    needed = peak_gib(step)
    fits = where.usable is None or needed <= where.usable
    lines = [*_shape(config, step, where), *_table(step), *_verdict(needed, where)]
    if not fits:
        lines += _what_helps(step, where)
    return "\n".join([*lines, *_flops(config, model, pattern, where)]), fits


def find_max_length(config: "Config", where: World) -> tuple[str, bool]:
    """A line with the longest training.seq_len that fits, and whether there is one. ValueError without device memory."""
    if where.usable is None:
        raise ValueError(
            "--find-max-length: no GPU is here whose memory could be looked up; write --device-memory GIB"
        )
    model, pattern = resolve(**vars(config.model)), build_pattern(config.attention)
    multiple = padding_multiple(config)

    def needed(count: int) -> float:
        longer = copy.deepcopy(config)
        longer.training.seq_len = count * multiple
        return peak_gib(_step(longer, model, pattern, where))

    low, high = 0, _LONGEST // multiple
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= where.usable else (low, middle - 1)
    room = f"{where.usable:.1f} GiB that PyTorch may have of {where.device_memory:.1f}"
    if low == 0:
        return (
            f"nothing fits: {multiple:,} tokens need {needed(1):.1f} GiB a rank, more than the {room}",
            False,
        )
    return (
        f"training.seq_len = {low * multiple} is the longest multiple of {multiple} that fits on {_ranks(where)}: "
        f"{needed(low):.1f} GiB a rank, within the {room}",
        True,
    )


def _step(config: "Config", model: DecoderConfig, pattern: Pattern, where: World) -> Step:
    return step_of(
        config, model, pattern, _backend(config, model), where.ranks, where.ranks_per_node
    )


def _backend(config: "Config", model: DecoderConfig) -> str:
    """Attention's backend; where no GPU is there to ask, what "auto" means on one with FlashAttention-4: it needs more."""
    name, size, dtype = (
        config.attention.backend,
        config.attention.block_size,
        getattr(torch, config.training.dtype),
    )
    slices = has_slices(config.attention)
    if name != "auto" or config.training.device == "cpu":
        return "eager" if name == "auto" else name
    if torch.cuda.is_available():
        return backends.choose(name, "cuda", dtype, model.head_dim, size, slices)
    if dtype == torch.float64:
        return "eager"
    serves_flash = (
        dtype == torch.bfloat16 and model.head_dim in flash.HEAD_DIMS and size == 128 and not slices
    )
    return "flex" if serves_flash else "triton"


# The report --------------------------------------------------------------------------------------------------------------


def _shape(config: "Config", step: Step, where: World) -> list[str]:
    training, name = config.training, config.model.initial_hf or config.model.flavour
    compiled = "compiled" if step.compiled else "not compiled"
    return [
        f"{name}, {number_of_parameters(step.model) / 1e6:,.1f} M parameters, {_ranks(where)}, "
        f"parameters over {step.shards}",
        f"{step.sequences} x {training.seq_len:,} tokens (padded to {step.seq_len:,}), {step.tokens:,} a rank; "
        f"checkpointing {step.mode}, {compiled}, attention by {step.backend}, schedule {step.schedule}",
    ]


def _ranks(where: World) -> str:
    return f"{where.ranks} rank{'s' if where.ranks > 1 else ''}"


def _table(step: Step) -> list[str]:
    """A row a part, a column a phase; GiB."""
    phases = estimate(step)
    peak = peak_phase(phases)
    rows = list(dict.fromkeys(part for parts in phases.values() for part in parts))
    lines = ["", "GiB of a rank at the worst moment of each phase:"]
    for number, (phase, parts) in enumerate(phases.items(), 1):
        lines.append(
            f"  ({number}) {phase:<28}{sum(parts.values()):9.2f}{'  <- the peak' if phase == peak else ''}"
        )
    lines.append(
        f"  {'part':<28}" + "".join(f"{f'({number})':>9}" for number in range(1, len(phases) + 1))
    )
    for part in rows:
        sizes = [parts.get(part, 0.0) for parts in phases.values()]
        if max(sizes) >= 0.005:
            lines.append(f"  {part:<28}" + "".join(f"{size:9.2f}" for size in sizes))
    return lines


def _verdict(needed: float, where: World) -> list[str]:
    outside = outside_gib(where.ranks)
    total = f"peak {needed:.2f} GiB, and {outside:.1f} outside of PyTorch's allocator: {needed + outside:.2f} GiB"
    if where.device_memory is None:
        return ["", f"{total}; no GPU is here to compare with: write --device-memory GIB"]
    verdict = "fits" if needed <= where.usable else "does NOT fit"
    return ["", f"{total} of {where.device_memory:.1f}, {100 * RESERVE:.0f} % kept free: {verdict}"]


def _levers(step: Step) -> Iterator[tuple[str, dict]]:
    """(what to write, what it changes) for all that lowers the peak and is not in use yet."""
    if step.mode != "full":
        yield 'activation_checkpoint.mode = "full"', {"mode": "full"}
    if step.loss_chunk_tokens > 1024:
        yield "training.loss_chunk_tokens = 1024", {"loss_chunk_tokens": 1024}
    if not step.reshard_after_forward:
        yield "parallelism.reshard_after_forward = true", {"reshard_after_forward": True}
    if step.backend == "flex":
        yield 'attention.backend = "triton"', {"backend": "triton"}
    wanted = {
        "attention_recompute": 1.0,
        "offload": True,
        "mlp_chunk_tokens": 4096,
        "offload_optimizer": True,
    }
    for field, value in wanted.items():
        if LEVERS[field] in KINDS and not getattr(step, field):
            yield f"{LEVERS[field]} = {str(value).lower()}", {field: value}


def _what_helps(step: Step, where: World) -> list[str]:
    """Each lever alone, all together, and more ranks a sequence."""
    fits = lambda size: f"{size:.1f} GiB" + (" (fits)" if size <= where.usable else "")
    levers, changed = [], {}
    for text, change in _levers(step):
        levers.append((peak_gib(dataclasses.replace(step, **change)), text))
        changed |= change
    alone = [
        f"{text} {fits(size)}" for size, text in sorted(levers) if size < peak_gib(step) - 0.05
    ]
    together = (
        [f"all of these {fits(peak_gib(dataclasses.replace(step, **changed)))}"]
        if len(alone) > 1
        else []
    )
    schedule = "all_gather" if step.schedule == "local" else step.schedule
    wider = dataclasses.replace(
        step, cp=2 * step.cp, shards=2 * step.shards, schedule=schedule, **changed
    )
    more = f"parallelism.cp = {2 * step.cp} on {2 * where.ranks} ranks{' as well' if alone else ''} {fits(peak_gib(wider))}"
    return ["the peak would be with " + "; ".join([*alone, *together, more])]


def _flops(config: "Config", model: DecoderConfig, pattern: Pattern, where: World) -> list[str]:
    training, attention = config.training, config.attention
    sequences = (
        training.local_batch_size
        * training.gradient_accumulation_steps
        * where.ranks
        // config.parallelism.cp
    )
    tokens, heads = sequences * training.seq_len, model.layers * model.heads
    dense = causal_pairs(training.seq_len, attention.sliding_window, attention.window_sinks)
    least = tokens * flops_per_token(model, 0.0)
    total = lambda pairs: tokens * flops_per_token(model, heads * pairs / training.seq_len)
    lines = [
        "",
        f"a step: {sequences:,} sequences, {tokens:,} tokens, {total(dense) / 1e15:,.2f} PFLOP dense, of which attention "
        f"{100 * (1 - least / total(dense)):.0f} % (recomputation not counted)",
    ]
    if hasattr(pattern, "most_blocks"):
        size = attention.block_size
        columns = pattern.vertical_capacity(training.seq_len, size, False)
        most = training.seq_len * (
            columns + size * pattern.most_blocks(training.seq_len, size, False)
        )
        lines.append(
            f"with {pattern.name} at most {total(min(most, dense)) / 1e15:,.2f} PFLOP, by the caps of its budgets "
            f"(density {100 * min(most / dense, 1):.1f} %)"
        )
    return lines
