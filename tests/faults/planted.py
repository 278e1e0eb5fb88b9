"""train.py with planted faults: python tests/faults/planted.py FAULTS [words of train.py].

FAULTS is JSON with the fields of Faults. The product has no hooks for this: methods of Trainer are
replaced from outside.
"""

import json
import math
import sys
from dataclasses import dataclass, field


@dataclass
class Faults:
    """What goes wrong inside a job. Steps count from 1."""

    rank: int | None = None
    """where; None: on all ranks"""
    poisoned: list[int] = field(default_factory=list)
    """steps in which one element of the gradients becomes NaN"""
    poisoned_from: int = 0
    """all steps from this one on are poisoned; 0: none"""
    code: str = ""
    """Python that runs before the first micro-batch of step `code_at`"""
    code_at: int = 3


def plant(faults: Faults) -> None:
    import torch
    import torch.distributed as dist

    from titan_sparse.training.trainer import Trainer

    clip = Trainer._clip
    forward_backward = Trainer._forward_backward
    planted = [faults.code] if faults.code else []

    def is_here() -> bool:
        return faults.rank in (None, dist.get_rank())

    def poisoned_clip(self: Trainer) -> torch.Tensor:
        step = self.progress.step + 1
        is_poisoned = step in faults.poisoned or 0 < faults.poisoned_from <= step
        if is_poisoned and is_here():
            shards = [p.grad.to_local() for p in self.model.parameters()]
            next(shard for shard in shards if shard.numel()).view(-1)[-1] = math.nan
        return clip(self)

    def planted_forward_backward(self: Trainer, *args: object) -> torch.Tensor:
        if planted and self.progress.step + 1 == faults.code_at and is_here():
            exec(planted.pop())
        return forward_backward(self, *args)

    Trainer._clip = poisoned_clip
    Trainer._forward_backward = planted_forward_backward


if __name__ == "__main__":
    planned = Faults(**json.loads(sys.argv.pop(1)))
    from titan_sparse.commands import train

    plant(planned)
    sys.exit(train.main())
