"""Train: torchrun --nproc-per-node 8 -m titan_sparse.train --config X.toml
[--section.key value ...]

--help lists every option. --print-config shows what a run would use, --dry-run what memory and
FLOPs a step needs, --find-max-length the longest sequence that fits; all of them stop then.
titan-sparse train and, in a checkout, train.py are the same program.
"""

import gc
import logging
import os
import sys
import time
import traceback

from titan_sparse.config import (
    Config,
    Flags,
    Refusal,
    check_launch,
    check_start,
    load_and_check,
    to_toml,
    world_from_environment,
    world_of,
)
from titan_sparse.config.start import is_first_rank
from titan_sparse.training.faults.launcher import (
    OtherRankFailed,
    Poisoned,
    end_for_good,
    end_now,
    end_with_launcher,
    hide_warnings_of_imports,
    report_to_launcher,
)


def main(words: list[str] | None = None) -> int:
    """The program; returns its exit status (docs/training.md). words: of the command line;
    None: those of sys.argv."""
    end_with_launcher()
    hide_warnings_of_imports()
    try:
        status = _run(sys.argv[1:] if words is None else words)
        end_for_good()
        return status
    except KeyboardInterrupt:
        end_for_good()
        return 130
    except Exception as error:
        status = report(error)
        if _has_process_group():
            from titan_sparse.training.run_folder import log_error

            log_error(error)
            end_now(status)
        return status


def _run(words: list[str]) -> int:
    set_allocator()
    config, flags = load_and_check(words, *world_from_environment())
    if not flags.starts_nothing:
        check_launch()
        check_start(config)
    if flags.print_config:
        print(to_toml(config))
        return 0

    if flags.dry_run or flags.find_max_length:
        return estimate(config, flags)

    # Imports leave no garbage. Looking for it takes a fifth of the time until the first step.
    gc.disable()
    try:
        # Imported here: a mistake in the config is reported before torch is loaded.
        import torch.distributed as dist

        from titan_sparse.training.trainer import Trainer

        gc.freeze()
    finally:
        gc.enable()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    if is_first_rank():
        logging.getLogger("titan_sparse").setLevel(logging.INFO)
    try:
        Trainer(config).train()
    finally:
        gc.unfreeze()
    dist.destroy_process_group()
    return 0


def report(error: BaseException) -> int:
    """Say what has ended the program, to the user and to torchrun. Returns the exit status.

    One line for what the user has to change and for disks; a traceback for anything unexpected.
    """
    line = " ".join(f"error: {error}".splitlines())
    # Before there is a process group a ValueError is a refusal.
    is_early = isinstance(error, ValueError) and not _has_process_group()
    if isinstance(error, Refusal | Poisoned) or is_early:
        end_for_good()
        _print_once(line)
        return 3 if isinstance(error, Poisoned) else 2
    if isinstance(error, OSError):
        _print_once(line, alike=not _has_process_group())
        return 1
    if isinstance(error, OtherRankFailed):  # that rank, or the watch, has said it
        report_to_launcher(str(error))
        return 1
    trace = "".join(traceback.format_exception(error))
    report_to_launcher(f"{type(error).__name__}: {error}", trace)
    print(trace, file=sys.stderr)
    return 1


def _print_once(line: str, alike: bool = True) -> None:
    """Print a line. alike: the other ranks may have the same one. Then they wait for the first to
    speak, as torchrun ends the others when it is gone.
    """
    report_to_launcher(line)
    if alike and not is_first_rank():
        # Ranks that have met are close together. Those still loading torch are not.
        seconds = 2.0 if _has_process_group() else 5.0
        is_first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"
        time.sleep(seconds if is_first_of_node else 2 * seconds)
    print(line, file=sys.stderr, flush=True)


def _has_process_group() -> bool:
    """True if ranks may be waiting for this one. Does not load torch."""
    if "torch" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_initialized()


def set_allocator() -> None:
    """Let torch's allocator grow its segments, so that blocks of many sizes leave no gaps.

    Call it before torch is loaded. Up to torch 2.11 at least, CUDA does not read
    expandable_segments from the newer PYTORCH_ALLOC_CONF (pytorch issue 183387).
    """
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def estimate(config: Config, flags: Flags) -> int:
    """--dry-run and --find-max-length: print the report. Returns 0 if the step fits, else 1."""
    from titan_sparse.training.dry_run import dry_run, find_max_length, world

    ranks, ranks_per_node = world_of(flags, config.parallelism, *world_from_environment())
    where = world(ranks, ranks_per_node, flags.device_memory, flags.host_memory)
    if flags.dry_run:
        report, fits = dry_run(config, where)
    else:
        report, fits = find_max_length(config, where)
    if is_first_rank():
        print(report)
    return 0 if fits else 1
