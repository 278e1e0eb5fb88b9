"""torchtitan's own program on the CPU, where nothing else runs it. Prints each step as JSON."""

import json
import sys
import types

import torch


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


def main(words: list[str]) -> int:
    use_cpu()
    import torchtitan.train
    from torchtitan.components.metrics import LoggerContainer, MetricsProcessor
    from torchtitan import trainer

    trainer.time.sleep = lambda _: None
    log = MetricsProcessor.log

    def printed(self, step, loss, max_loss, grad_norm, extra_metrics=None):
        log(self, step, loss, max_loss, grad_norm, extra_metrics)
        found = {"step": step, "loss": loss, "grad_norm": grad_norm, **extra_metrics}
        print("STEP", json.dumps(found), flush=True)

    MetricsProcessor.log = printed
    sys.argv = ["torchtitan.train", *words]
    torchtitan.train.main()
    return 0
