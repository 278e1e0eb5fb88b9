"""What a run tells: a progress line, TensorBoard, and one JSON object a logged step in <output_dir>/metrics.jsonl."""

import json
import logging
import math
import os
import resource
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from titan_sparse.attention.observe import visits as balance
from titan_sparse.attention.observe.statistics import Recording
from titan_sparse.estimate.flops import flops_per_token, peak_flops, utilization
from titan_sparse.models.flavours import DecoderConfig
from titan_sparse.training.heat_maps import contact_sheet, heat_map

if TYPE_CHECKING:
    from titan_sparse.config import Metrics

logger = logging.getLogger("titan_sparse")

THUMBNAIL_CELLS = 48
"""A side of a TensorBoard picture of one head's selection."""


class MetricsLog:
    """Writes the metrics of logged steps; on every rank but the first it only keeps the time.

    steps: of the whole run, for percent and ETA. world_size: devices that share the throughput. float8: whether linear
    layers compute in float8, whose peak is another.
    """

    def __init__(
        self,
        section: "Metrics",
        output_dir: str,
        steps: int,
        model: DecoderConfig,
        device: torch.device,
        world_size: int,
        writes: bool,
        float8: bool = False,
    ):
        self.section, self.steps, self.model, self.device, self.world_size = (
            section,
            steps,
            model,
            device,
            world_size,
        )
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self.peak, self.float8 = peak_flops(name, section.peak_tflops), float8
        self.json = self.board = None
        if writes:
            os.makedirs(output_dir, exist_ok=True)
            self.json = open(os.path.join(output_dir, "metrics.jsonl"), "a", buffering=1)
            self.board = (
                SummaryWriter(os.path.join(output_dir, "tensorboard"))
                if section.tensorboard
                else None
            )
            if self.peak is None and device.type == "cuda":
                logger.warning("mfu is not known: write metrics.peak_tflops for %s", name)
        self.start_interval()

    def start_interval(self) -> None:
        """Begin to count time and tokens anew: after the start, and after pauses that are no training."""
        self.began, self.tokens, self.counted_steps = time.perf_counter(), 0, 0

    def count(self, tokens: int) -> None:
        """A step has consumed `tokens`, over all ranks and each once."""
        self.tokens += tokens
        self.counted_steps += 1

    def should_log(self, step: int) -> bool:
        """Whether `step` (from 1) is one that is logged: every metrics.log_every, the first and the last."""
        return step == 1 or step == self.steps or step % self.section.log_every == 0

    def recall_rows(self, step: int) -> int:
        """Query rows a sequence to measure recall on at a logged step; 0 where it is not measured."""
        every = self.section.recall_every
        return self.section.recall_rows if every and (step == 1 or step % every == 0) else 0

    def thumbnail_cells(self, step: int) -> int:
        """Cells a side of the pictures of what was selected at a logged step; 0 where there are none."""
        every = self.section.pictures_every
        return (
            THUMBNAIL_CELLS
            if self.board is not None and every and (step == 1 or step % every == 0)
            else 0
        )

    def log(
        self,
        step: int,
        tokens_seen: int,
        values: dict[str, float],
        seen: Recording,
        sequence_tokens: float,
    ) -> None:
        """Write a logged step. values: loss, grad_norm, lr. seen: attention recorded on this rank's last micro-batch,
        whose sequences held `sequence_tokens` tokens on average. Collective."""
        sequence_tokens = average_over_ranks(seen, sequence_tokens)
        seconds = time.perf_counter() - self.began
        per_device = self.tokens / seconds / self.world_size
        record = {
            "step": step,
            **values,
            "tokens_seen": tokens_seen,
            "tokens_per_second_per_device": per_device,
            "step_seconds": seconds / max(self.counted_steps, 1),
            **self._speeds(
                per_device,
                float(torch.stack(seen.visited).sum()) / sequence_tokens,
                float(seen.visible) * self.model.layers * self.model.heads / sequence_tokens,
            ),
            "memory_gib": _peak_memory_gib(self.device),
            **attention_averages(seen),
            **context_parallel_averages(seen),
        }
        if self.json is not None:
            self.json.write(json.dumps(json_ready(record)) + "\n")
            self._write_board(step, record, seen)
            logger.info(progress_line(record, self.steps))
        self.start_interval()

    def _speeds(
        self, tokens_per_second: float, visited: float, visible: float
    ) -> dict[str, float | None]:
        """mfu, and apart from it dense_equivalent_tflops. visited, visible: pairs a token, over layers and heads."""
        dense = flops_per_token(self.model, visible) * tokens_per_second / 1e12
        mfu = None
        if self.peak is not None:
            mfu = utilization(self.model, visited, tokens_per_second, self.peak, self.float8)
            if mfu > 1:
                logger.info(
                    "an mfu of %.0f %% is impossible and not written: metrics.peak_tflops = %g is too small for this "
                    "device",
                    100 * mfu,
                    self.peak / 1e12,
                )
                mfu = None
        return {"mfu": mfu, "dense_equivalent_tflops": dense}

    def _write_board(self, step: int, record: dict[str, Any], seen: Recording) -> None:
        if self.board is None:
            return
        for key, value in record.items():
            if key != "step" and value is not None:
                self.board.add_scalar(key, value, step)
        for name, layers in (
            ("density", seen.density()),
            ("recall", seen.recall),
            ("capped", seen.capped),
        ):
            for number, heads in enumerate(layers):
                self.board.add_scalar(f"{name}_by_layer/{number}", heads.mean().item(), step)
        if seen.thumbnails:
            self.board.add_image("density_heat_map", heat_map(seen.density()), step)
            if seen.recall:
                self.board.add_image("recall_heat_map", heat_map(torch.stack(seen.recall)), step)
            self.board.add_image("selection", contact_sheet(torch.stack(seen.thumbnails)), step)

    def close(self) -> None:
        """Flush the files."""
        if self.json is not None:
            self.json.close()
        if self.board is not None:
            self.board.close()


_BY_LAYER = ("visited", "recall", "capped", "blocks_per_query", "columns", "columns_at_cap")
"""What a Recording holds by layer and head."""


def average_over_ranks(seen: Recording, sequence_tokens: float) -> float:
    """Make a recording the mean over all ranks' data, in place; returns the mean of `sequence_tokens`. Collective."""
    parts = [x for name in _BY_LAYER for x in getattr(seen, name)]
    parts += [seen.visible.view(1), seen.visible.new_tensor([sequence_tokens])]
    means = torch.cat([part.double() for part in parts])
    dist.all_reduce(means)
    means = list((means / dist.get_world_size()).split([len(part) for part in parts]))
    for name in _BY_LAYER:
        layers = len(getattr(seen, name))
        setattr(seen, name, means[:layers])
        means = means[layers:]
    seen.visible = means[0][0]
    return means[1].item()


def attention_averages(seen: Recording) -> dict[str, float]:
    """Over layers and heads: density, blocks_per_query, and where recorded recall, capped (share of budgets kept short by a
    cap), columns (their mean and 95th percentile) and columns_at_cap."""
    averages = {"density": seen.density().mean().item()}
    for name in _BY_LAYER[1:]:
        if layers := getattr(seen, name):
            averages[name] = torch.stack(layers).double().mean().item()
    if seen.columns:
        averages["columns_p95"] = torch.stack(seen.columns).double().quantile(0.95).item()
    return averages


def context_parallel_averages(seen: Recording) -> dict[str, float]:
    """Balance and communication of attention, means over its calls and the context-parallel groups; empty for one rank.

    Degrees as in attention/balance.py, of visited pairs and (..._time) of computing time. exposed_communication_ms: what
    a forward takes beyond its computing; ..._share: of the time of the forward. Collective.
    """
    if not seen.calls:
        return {}
    by_rank = seen.by_rank()
    degrees = (
        balance.worker_imbalance,
        balance.worker_imbalance_per_step,
        balance.step_imbalance,
        balance.lockstep_imbalance,
    )
    values = {
        degree.__name__ + suffix: degree(amount).mean().item()
        for suffix, amount in (("", by_rank.work), ("_time", by_rank.compute))
        for degree in degrees
    }
    values["computation_ratio"] = (
        balance.computation_ratio(by_rank.compute, by_rank.elapsed).mean().item()
    )
    elapsed = by_rank.elapsed.sum(-1).mean().item()
    values["exposed_communication_ms"] = elapsed - by_rank.compute.sum(-1).mean().item()
    values["exposed_communication_share"] = values["exposed_communication_ms"] / elapsed
    amounts = [
        seen.bytes_sent,
        seen.bytes_of_columns,
        seen.bytes_of_selection,
        seen.plain_ring_bytes,
    ]
    sums = torch.tensor([*values.values(), *amounts], dtype=torch.float64).to(seen.work[0].device)
    dist.all_reduce(sums)
    *means, sent, columns, selection, plain = (sums / dist.get_world_size()).tolist()
    return dict(zip(values, means)) | {
        "cp_gib_sent": sent / 2**30,
        "cp_gib_columns": columns / 2**30,
        "cp_gib_selection": selection / 2**30,
        "cp_sent_of_plain_ring": sent / plain,
    }


def progress_line(record: dict[str, Any], steps: int) -> str:
    """One line for people: percent, ETA, loss, gradient norm, learning rate, tokens/s/device, MFU, memory, sparsity."""
    step = record["step"]
    left = time.strftime("%H:%M:%S", time.gmtime((steps - step) * record["step_seconds"]))
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
    parts += [f"{record['memory_gib']:.2f} GiB", f"density {100 * record['density']:.1f} %"]
    if "recall" in record:
        parts.append(f"recall {100 * record['recall']:.1f} %")
    return "  ".join(parts)


def _peak_memory_gib(device: torch.device) -> float:
    """Most memory held since the start: allocated on a GPU, resident in RAM on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def json_ready(value: Any) -> Any:
    """Numbers, tensors of one number, lists and dicts of them. JSON has no NaN or infinity: null stands for them."""
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_ready(item) for item in value]
    value = value.item() if isinstance(value, Tensor) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
