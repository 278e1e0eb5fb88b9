"""train.py with planted faults: python tests/faults/planted.py FAULTS [words of train.py].

FAULTS is JSON with the fields of Faults. The product has no hooks for this: methods of Trainer are
replaced from outside.
"""

import json
import math
import sys
import time
from dataclasses import dataclass, field


@dataclass
class Faults:
    """What goes wrong inside a job. Steps count from 1."""

    rank: int = 0
    """where"""
    poisoned: list[int] = field(default_factory=list)
    """steps in which one element of the gradients becomes NaN"""
    poisoned_from: int = 0
    """all steps from this one on are poisoned; 0: none"""
    stuck_at: int = 0
    """the step whose first micro-batch never ends; 0: none"""


def plant(faults: Faults) -> None:
    import torch
    import torch.distributed as dist

    from titan_sparse.trainer import Trainer

    clip = Trainer._clip
    forward_backward = Trainer._forward_backward

    def poisoned_clip(self: Trainer) -> torch.Tensor:
        step = self.progress.step + 1
        is_poisoned = step in faults.poisoned or 0 < faults.poisoned_from <= step
        if is_poisoned and dist.get_rank() == faults.rank:
            shards = [p.grad.to_local() for p in self.model.parameters()]
            next(shard for shard in shards if shard.numel()).view(-1)[-1] = math.nan
        return clip(self)

    def slow_forward_backward(self: Trainer, *args: object) -> torch.Tensor:
        if self.progress.step + 1 == faults.stuck_at and dist.get_rank() == faults.rank:
            time.sleep(1e6)
        return forward_backward(self, *args)

    if faults.poisoned or faults.poisoned_from:
        Trainer._clip = poisoned_clip
    if faults.stuck_at:
        Trainer._forward_backward = slow_forward_backward


if __name__ == "__main__":
    planned = Faults(**json.loads(sys.argv.pop(1)))
    from titan_sparse import train

    plant(planned)
    sys.exit(train.main())
