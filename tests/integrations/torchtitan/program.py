"""torchtitan's own program on the CPU, several runs in one process, which is started once."""

import functools
import json
import os
import sys
import traceback
import types
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def use_cpu() -> None:
    """Let torchtitan find a CPU where it takes CUDA for granted."""
    torch._utils._get_available_device_type = lambda: "cpu"
    for name, module in [*sys.modules.items()]:
        if name.startswith("torchtitan.") and hasattr(module, "device_type"):
            module.device_type, module.device_module = "cpu", torch.cpu
    torch.cpu.set_device = lambda _: None
    torch.cpu.current_device = lambda: 0
    torch.cpu.get_device_name = lambda _: "CPU"
    torch.cpu.get_device_properties = lambda _: types.SimpleNamespace(total_memory=1 << 30)
    torch.cpu.memory_stats = lambda _: {}
    torch.cpu.reset_peak_memory_stats = lambda: None
    torch.cpu.empty_cache = lambda: None
    # gloo does not scale what it sums.
    scale = FSDPModule.set_gradient_divide_factor

    def scale_apart(self: FSDPModule, factor: float) -> None:
        scale(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = scale_apart


def main(words: list[str]) -> int:
    """Prints a line of JSON for each run: its name, its logged steps, and the error that ended it.

    words: a folder for all runs, and their command lines by name, as JSON. A run "name#2" goes on
    in the folder of "name".
    """
    use_cpu()
    import torchtitan.train  # noqa: F401

    folder = Path(words[0])
    for name, line in json.loads(words[1]).items():
        sys.stdout.flush()
        # torchtitan keeps meshes of a run, so that each has a process of its own.
        process = os.fork()
        if process == 0:
            # It makes the thread pool anew, which autograd's threads would do at the same time.
            torch.set_num_threads(1)
            print("RUN", json.dumps({"name": name, **run(folder, name, line)}), flush=True)
            os._exit(0)
        os.waitpid(process, 0)
    return 0


def run(folder: Path, name: str, line: str) -> dict[str, object]:
    from torchtitan import train, trainer
    from torchtitan.components.metrics import MetricsProcessor

    trainer.time.sleep = lambda _: None
    # The ranks of each run meet at a store of their own.
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{folder / name}.{ranks}.store", ranks)
    meet = dist.init_process_group
    dist.init_process_group = functools.partial(meet, store=store, rank=rank, world_size=ranks)
    log = MetricsProcessor.log
    train_step = trainer.Trainer.train_step
    steps = []
    norms = {}

    def remembered(self, step, loss, max_loss, grad_norm, extra_metrics=None):
        log(self, step, loss, max_loss, grad_norm, extra_metrics)
        steps.append({"step": step, "loss": loss, "norms": dict(norms), **extra_metrics})

    def with_norms(self, batches):
        trainer.dist_utils.clip_grad_norm_ = lambda *args, **kwargs: (
            norms.update(gradient_norms(self.model_parts)) or clip(*args, **kwargs)
        )
        train_step(self, batches)

    clip = trainer.dist_utils.clip_grad_norm_
    trainer.Trainer.train_step = with_norms
    MetricsProcessor.log = remembered
    own_folder = folder / name.partition("#")[0]
    before, *subcommand = line.split(" / ")
    sys.argv = ["torchtitan.train", *before.split(), "--dump_folder", str(own_folder), *subcommand]
    error = None
    try:
        train.main()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
        traceback.print_exc()
    return {"steps": steps, "error": error}


def gradient_norms(model_parts: list[nn.Module]) -> dict[str, float]:
    """In fp64 and by parameter: torch's fp32 norm of large tensors on a CPU is off by 1e-4."""
    norms = {}
    for part in model_parts:
        for name, parameter in part.named_parameters():
            whole = parameter.grad
            if isinstance(whole, DTensor):
                whole = whole.full_tensor()
            norms[name.replace("_checkpoint_wrapped_module.", "")] = whole.double().norm().item()
    return norms
