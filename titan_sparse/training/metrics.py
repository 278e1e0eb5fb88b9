"""The reports of a run at each logged step: a progress line, metrics.jsonl, TensorBoard,
trackers."""

import logging
import math
import os
import resource
import time
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from titan_sparse.attention.observe import Recording, worker_imbalance
from titan_sparse.config import Attention, Config
from titan_sparse.estimate.flops import flops_per_token, peak_flops, utilization
from titan_sparse.evaluation.pictures import heat_map
from titan_sparse.models.config import DecoderConfig, resolve_adapters
from titan_sparse.training.metrics_output import JsonLines, tag

logger = logging.getLogger("titan_sparse")

PACE_INTERVALS = 20
"""Logged intervals that the ETA is a mean over."""


class CapCount:
    """The number of budgets that caps cut in all selections since the last read(). Until then it
    stays on the device."""

    def __init__(self) -> None:
        # [layers, 3] each
        self.forwards: list[Tensor] = []

    def add(self, shares: list[Tensor]) -> None:
        """Add what recorder.counting_caps() has collected in one forward."""
        if shares:
            self.forwards.append(torch.stack(shares))

    def read(self) -> Tensor | None:
        """Shares of heads that the caps of verticals, of slashes, and of both kept below the
        recall: float64 [layers, 3], on the CPU. Means over all forwards since the last call
        and all ranks.

        None for patterns without budgets. Collective; waits for the device.
        """
        if not self.forwards:
            return None
        means = sum(self.forwards) / len(self.forwards)
        self.forwards = []
        return _mean_over_ranks(means).cpu()


def asked_recall(attention: Attention) -> float | None:
    """The recall that selection has to reach. None for patterns without one, and where the numbers
    of verticals and slashes are both fixed."""
    if attention.pattern != "vertical_slash":
        return None
    budgets = attention.vertical_slash
    has_fixed_verticals = budgets.min_verticals == budgets.max_verticals
    # A maximum of 0 is none.
    has_fixed_slashes = 0 < budgets.max_slashes == budgets.min_slashes
    return None if has_fixed_verticals and has_fixed_slashes else budgets.recall


class MetricsLog:
    """Writes the metrics of logged steps, on the first rank."""

    def __init__(
        self, config: Config, model: DecoderConfig, device: torch.device, wandb_run: Any = None
    ):
        """wandb_run: as open_wandb() returns it."""
        self.config = config
        self.section = config.metrics
        self.steps = config.training.steps
        self.model = model
        self.adapters = resolve_adapters(model, **vars(config.lora))
        self.device = device
        self.world_size = dist.get_world_size()
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self.peak = peak_flops(name, self.section.peak_tflops)
        self.caps = CapCount()
        self.asked = asked_recall(config.attention)
        self.wandb_run = wandb_run
        self.json: JsonLines | None = None
        self.board: SummaryWriter | None = None
        if dist.get_rank() == 0:
            folder = config.training.output_dir
            os.makedirs(folder, exist_ok=True)
            self.json = JsonLines(os.path.join(folder, "metrics.jsonl"))
            if self.peak is None and device.type == "cuda":
                logger.warning("mfu is not known: write metrics.peak_tflops for %s", name)
        # The first steps of a process compile.
        self.has_logged = False
        # Seconds and steps of the last logged intervals, without the first one.
        self.intervals: deque[tuple[float, int]] = deque(maxlen=PACE_INTERVALS)
        self.save_seconds = 0.0
        self.start_interval()

    def start_interval(self) -> None:
        """Restart the count of time and tokens after the start and after pauses."""
        self.began = time.perf_counter()
        self.tokens = 0
        self.counted_steps = 0
        self.left_out = 0.0

    def go_back(self) -> None:
        """The run goes on from an older checkpoint."""
        if self.board is not None:
            self.board.close()
            self.board = None
        self.start_interval()

    def board_from(self, step: int) -> SummaryWriter | None:
        """TensorBoard, on the first rank. A writer is opened at its first step, so that what an
        earlier one wrote of that step and later ones is no longer shown: the run has left it."""
        if self.board is None and self.json is not None and self.section.tensorboard:
            folder = os.path.join(self.config.training.output_dir, "tensorboard")
            self.board = SummaryWriter(folder, purge_step=step)
        return self.board

    def leave_out(self, seconds: float) -> None:
        """Training has just waited so long for a save: save_seconds says so, no speed does."""
        self.save_seconds += seconds
        self.left_out += seconds

    def count(self, tokens: int) -> None:
        """A step has consumed `tokens`, over all ranks and each once."""
        self.tokens += tokens
        self.counted_steps += 1

    def should_log(self, step: int) -> bool:
        """True if `step` (from 1) is logged: every metrics.log_every, the first and the last."""
        return step in (1, self.steps) or step % self.section.log_every == 0

    def records(self, step: int) -> tuple[int, int]:
        """The arguments of observe.recording() for a logged step, with recall and
        pictures where they are due."""

        def is_due(every: int) -> bool:
            return every > 0 and (step == 1 or step % every == 0)

        rows = self.section.recall_rows if is_due(self.section.recall_every) else 0
        # All ranks ask for them: each may have other heads.
        has_pictures = self.section.tensorboard and is_due(self.section.pictures_every)
        return rows, 48 if has_pictures else 0

    def log(
        self,
        step: int,
        tokens_seen: int,
        values: dict[str, float],
        recorded: Recording,
        sequence_tokens: float,
    ) -> None:
        """recorded: the attention of this rank's last micro-batch, whose sequences held
        `sequence_tokens` tokens on average. Collective."""
        sequence_tokens = average_over_ranks(recorded, sequence_tokens)
        capped = self.caps.read()
        seconds = time.perf_counter() - self.began - self.left_out
        if self.has_logged:
            self.intervals.append((seconds, self.counted_steps))
        per_device = self.tokens / seconds / self.world_size
        # Pairs of tokens, over layers and heads, per token.
        visited = float(torch.stack(recorded.visited).sum()) / sequence_tokens
        visible = float(sum(recorded.visible)) * self.model.heads / sequence_tokens
        record = {
            "step": step,
            "time": time.time(),
            **values,
            "tokens_seen": tokens_seen,
            "tokens_per_second_per_device": per_device,
            "step_seconds": seconds / max(self.counted_steps, 1),
            **self._speeds(per_device, visited, visible),
            "memory_gib": _peak_memory_gib(self.device),
            **attention_averages(recorded),
            **context_parallel_averages(recorded),
        }
        if capped is not None:
            verticals, slashes, both = capped.mean(0).tolist()
            record["capped"] = (verticals + slashes) / 2
            record["verticals_at_cap"] = verticals
            if self.asked is not None:
                # Of two independent budgets each has to reach the recall, so one without its cap is
                # enough.
                is_independent = self.config.attention.vertical_slash.budget == "independent"
                record["heads_capped"] = both if is_independent else verticals + slashes - both
                record["recall_asked"] = self.asked
        if self.save_seconds:
            record["save_seconds"] = self.save_seconds
            self.save_seconds = 0.0
        if self.json is not None:
            self.json.write(json_ready(record))
            if self.wandb_run is not None:
                self.wandb_run.log(record)
            if board := self.board_from(step):
                write_board(board, record, recorded)
            logger.info(progress_line(record, self.steps, self._pace()))
        self.has_logged = True
        self.start_interval()

    def _pace(self) -> float | None:
        """Seconds of a step, a mean over the last logged intervals. Saves and validation are not
        counted. None if only the first interval is known, in which the process compiles."""
        if not self.intervals:
            return None
        seconds, steps = zip(*self.intervals, strict=True)
        return sum(seconds) / sum(steps)

    def _speeds(
        self, tokens_per_second: float, visited: float, visible: float
    ) -> dict[str, float | None]:
        """visited, visible: pairs of tokens that were computed, and that the mask allows, per
        token, over layers and heads."""
        dense = flops_per_token(self.model, visible, self.adapters) * tokens_per_second / 1e12
        speeds = {"mfu": None, "dense_equivalent_tflops": dense}
        if self.peak is None:
            return speeds
        float8 = self.config.float8.enable  # another peak for linear layers
        mfu = utilization(self.model, visited, tokens_per_second, self.peak, float8, self.adapters)
        if mfu <= 1:
            speeds["mfu"] = mfu
        elif self.json is not None:
            logger.warning(
                "an mfu of %.0f %% is impossible and is not logged: metrics.peak_tflops = %g is too "
                "small for this device; write its dense bf16 peak",
                100 * mfu,
                self.peak / 1e12,
            )
        return speeds

    def write_scalars(self, step: int, values: dict[str, float | None]) -> None:
        """Write values by tags of TensorBoard, there and to metrics.trackers."""
        known = {tag: value for tag, value in values.items() if value is not None}
        if self.wandb_run is not None:
            self.wandb_run.log({"step": step, **known})
        if board := self.board_from(step):
            for tag, value in known.items():
                board.add_scalar(tag, value, step)

    def close(self) -> None:
        for writer in filter(None, (self.json, self.board)):
            writer.close()
        if self.wandb_run is not None:
            self.wandb_run.finish()


_BY_LAYER = ("recall", "blocks_per_query", "verticals")
"""Fields of a Recording that hold a tensor [Hq] a layer. Their means have
these names in the log."""


def average_over_ranks(recorded: Recording, sequence_tokens: float) -> float:
    """Make a recording the mean over all ranks' data, in place, and return that
    of `sequence_tokens`."""
    for name in ("visited", "visible", *_BY_LAYER):
        if layers := getattr(recorded, name):
            setattr(recorded, name, list(_mean_over_ranks(torch.stack(layers))))
    return _mean_over_ranks(recorded.visible[0].new_tensor(sequence_tokens)).item()


def _mean_over_ranks(values: Tensor) -> Tensor:
    """In float64. Collective; may change `values`."""
    values = values.double()
    dist.all_reduce(values)
    return values / dist.get_world_size()


def attention_averages(recorded: Recording) -> dict[str, float]:
    """Means over layers and heads of what was recorded."""
    averages = {"density": recorded.density().mean().item()}
    for name in _BY_LAYER:
        if layers := getattr(recorded, name):
            averages[name] = torch.stack(layers).double().mean().item()
    if recorded.verticals:
        verticals = torch.stack(recorded.verticals).double()
        averages["verticals_p95"] = verticals.quantile(0.95).item()
    return averages


def context_parallel_averages(recorded: Recording) -> dict[str, float]:
    """Balance and communication of attention, means over its calls and the context-parallel groups.
    Empty for one rank. docs/context_parallel.md explains the fields. Collective."""
    if not recorded.calls:
        return {}
    by_rank = recorded.by_rank()
    elapsed = by_rank.elapsed.mean().item()
    exposed = elapsed - by_rank.compute.mean().item()
    values = {
        "worker_imbalance": worker_imbalance(by_rank.work).mean().item(),
        "worker_imbalance_time": worker_imbalance(by_rank.compute).mean().item(),
        "exposed_communication_ms": exposed,
        "exposed_communication_share": exposed / elapsed,
        "cp_gib_sent": recorded.bytes_sent / 2**30,
        "cp_gib_verticals": recorded.bytes_of_verticals / 2**30,
        "cp_gib_selection": recorded.bytes_of_selection / 2**30,
        "cp_sent_of_plain_ring": recorded.plain_ring_bytes / 2**30,
    }
    of_rank = torch.tensor(list(values.values()), dtype=torch.float64)
    means = dict(zip(values, _mean_over_ranks(of_rank.to(recorded.work[0].device)).tolist()))
    means["cp_sent_of_plain_ring"] = means["cp_gib_sent"] / means["cp_sent_of_plain_ring"]
    return means


def write_board(board: SummaryWriter, record: dict[str, Any], recorded: Recording) -> None:
    """Write a line of metrics.jsonl, means of each layer, and pictures where
    there are thumbnails."""
    step = record["step"]
    for field, value in record.items():
        # TensorBoard itself has step and time of each value.
        if field not in ("step", "time") and value is not None:
            board.add_scalar(tag(field), value, step)
    # [layers, Hq]
    by_layer = {
        "density": (recorded.density(), "share of allowed pairs that are visited"),
        "recall": (recorded.recall, "share of the softmax's mass that is kept"),
    }
    for name, (layers, meaning) in by_layer.items():
        for number, shares in enumerate(layers):
            board.add_scalar(f"attention_{name}_by_layer/{number}", shares.mean().item(), step)
        if recorded.thumbnails and len(layers):
            picture = heat_map(torch.stack(list(layers)), meaning)
            board.add_figure(f"attention/{name}_heat_map", picture, step)
    if recorded.thumbnails:
        meaning = "share of a cell's allowed pairs that is selected"
        ticks = (0, 0.01, 0.1, 0.25, 0.5, 1)
        picture = heat_map(torch.stack(recorded.thumbnails), meaning, ticks)
        board.add_figure("attention/selection", picture, step)


def progress_line(record: dict[str, Any], steps: int, step_seconds: float | None) -> str:
    """One line for people. step_seconds: what a step takes on average; None: not known yet."""
    step = record["step"]
    left = "?"
    if step_seconds is not None:
        left = timedelta(seconds=round((steps - step) * step_seconds))
    parts = [
        f"step {step}/{steps} {100 * step / steps:3.0f} %",
        f"ETA {left}",
        f"loss {record['loss']:.4f}",
        f"grad norm {record['grad_norm']:.3f}",
        f"lr {record['lr']:.2e}",
        f"{record['tokens_per_second_per_device']:,.0f} tokens/s/device",
    ]
    if record["mfu"] is not None:
        parts.append(f"MFU {100 * record['mfu']:.1f} %")
    parts.append(f"{record['memory_gib']:.2f} GiB")
    density = f"density {100 * record['density']:.1f} %"
    if record.get("sparse_tokens", 1.0) < 0.995:
        density += (
            f" (sparse in documents with {100 * record['sparse_tokens']:.0f} % of the tokens)"
        )
    parts.append(density)
    if "recall" in record:
        recall = f"recall {100 * record['recall']:.1f} %"
        if "recall_asked" in record:
            recall += f" (asked {100 * record['recall_asked']:g} %)"
        parts.append(recall)
    if record.get("heads_capped"):
        parts.append(f"capped {100 * record['heads_capped']:.3g} % of heads")
    return "  ".join(parts)


def _peak_memory_gib(device: torch.device) -> float:
    """Most memory held since the start: allocated on a GPU, resident in RAM on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def json_ready(value: Any) -> Any:
    """As json.dumps() takes it: tensors of one number as numbers, null for NaN and infinity."""
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_ready(item) for item in value]
    if isinstance(value, Tensor):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
