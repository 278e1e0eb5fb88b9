"""A profiler trace of a few steps, for chrome://tracing or Perfetto."""

import contextlib
import os
from contextlib import AbstractContextManager

import torch

from titan_sparse.config import Profiling


def profiler(
    profiling: Profiling, output_dir: str, rank: int
) -> AbstractContextManager[torch.profiler.profile | None]:
    """Profiles what runs inside; None where profiling.enable is false. Call step_done() after each
    step.

    Writes <output_dir>/profile/rank<r>.json after the steps asked for.
    """
    if not profiling.enable:
        return contextlib.nullcontext()

    def write(profile) -> None:
        folder = os.path.join(output_dir, "profile")
        os.makedirs(folder, exist_ok=True)
        profile.export_chrome_trace(os.path.join(folder, f"rank{rank}.json"))

    warmup = min(1, profiling.first_step - 1)
    schedule = torch.profiler.schedule(
        wait=profiling.first_step - 1 - warmup, warmup=warmup, active=profiling.steps, repeat=1
    )
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=activities,
        schedule=schedule,
        on_trace_ready=write,
        with_stack=profiling.with_stack,
    )


def step_done(profile: torch.profiler.profile | None, profiling: Profiling, step: int) -> None:
    """Tell the profiler that `step` (from 1) is done; nothing for None.

    The first traced step waits for what was queued before it, and the last one for its own work, so
    that a trace has the work of its steps and no other.
    """
    if profile is None:
        return
    is_edge = step in (profiling.first_step - 1, profiling.first_step - 1 + profiling.steps)
    if is_edge and torch.cuda.is_available():
        torch.cuda.synchronize()
    profile.step()
