"""optimizer.offload on the CPU: the same training run, resumed as any other.

What crosses to a GPU: tests/gpu/test_offload.py.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests.distributed import run_processes
from tests.runs import metrics_of, tiny_config, train, weights_of, write_texts
from titan_sparse.training.optimizer import parameter_groups

SETTINGS = {
    "training__steps": 4,
    "training__gradient_accumulation_steps": 2,
    "training__max_norm": 0.1,
    "optimizer__name": "AdamW",
    "optimizer__lr": 1e-2,
    "checkpoint__enable": True,
    "checkpoint__interval": 2,
    "lr_scheduler__total_steps": 4,
    "parallelism__cp": 2,
}


def _lines(config) -> list[list]:
    dist.barrier()
    return [
        [line[key] for key in ("step", "loss", "grad_norm", "lr")] for line in metrics_of(config)
    ]


def _equal_and_resumed(folder: Path) -> None:
    plain = tiny_config(folder, "plain", **SETTINGS)
    wanted = weights_of(train(plain))
    halves = tiny_config(
        folder, "halves", **SETTINGS | {"optimizer__offload": True, "training__steps": 2}
    )
    train(halves)
    halves.training.steps = 4
    trainer = train(halves)  # goes on from the checkpoint of step 2
    groups = [
        s._fsdp_param_group
        for m in trainer.model.modules()
        if isinstance(m, FSDPModule) and (s := m._get_fsdp_state())
    ]
    assert len(groups) == 3 and all(p.offload_to_cpu for group in groups for p in group.fsdp_params)
    assert all(group["fused"] for group in trainer.optimizers.optimizers[0].param_groups)
    got = weights_of(trainer)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        torch.tensor(_lines(halves)), torch.tensor(_lines(plain)), rtol=1e-12, atol=0
    )
    # and the other way: a run without offload goes on from a checkpoint with it
    halves.training.steps, halves.optimizer.offload, halves.lr_scheduler.total_steps = 5, False, 5
    assert train(halves).progress.step == 5


def test_a_run_equals_the_one_without_and_resumes(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(2, _equal_and_resumed, tmp_path)


class Experts(torch.nn.Module):
    """As transformers has them: the biases of all experts are one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(2, 3, 4))
        self.gate_up_proj_bias = torch.nn.Parameter(torch.zeros(2, 4))
        self.router = torch.nn.Linear(3, 2)


def test_biases_of_experts_do_not_decay():
    experts = Experts()
    matrices, vectors = parameter_groups(experts, 0.1)
    assert [len(matrices["params"]), matrices["weight_decay"]] == [2, 0.1]
    assert [len(vectors["params"]), vectors["weight_decay"]] == [2, 0.0]
    assert any(parameter is experts.gate_up_proj_bias for parameter in vectors["params"])
