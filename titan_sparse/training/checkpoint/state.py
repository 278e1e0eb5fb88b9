"""What of a run is saved, under the names that it has on disk.

model: as in the model, but for frozen weights. optimizer: optimizer.state.<parameter>.<key>; its
settings (learning rate, betas) are the config's. loader: dataloader.*. progress: train_state.*.
Whatever else has a state is saved under its own name.
"""

from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.optim import Optimizer

from titan_sparse.models.initialization import canonical_name

LOADER = "dataloader"
PROGRESS = "train_state"


class Stateful(Protocol):
    """What can be saved and taken up again. Its state is made of plain values and CPU tensors."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Tensors:
    """The tensors of model and optimizer by name: the very ones, so that reading into them loads them."""

    def __init__(self, model: nn.Module, optimizers: list[Optimizer]):
        self.model = model
        self.optimizers = optimizers
        self.of_model: dict[str, Tensor] = get_model_state_dict(
            model, options=StateDictOptions(ignore_frozen_params=True)
        )
        self.parameter_names = {
            parameter: canonical_name(name) for name, parameter in model.named_parameters()
        }

    def all(self) -> dict[str, Tensor]:
        """Everything that the model and the optimizer have now."""
        tensors = dict(self.of_model)
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                name = self.parameter_names[parameter]
                for key, value in state.items():
                    tensors[f"optimizer.state.{name}.{key}"] = value
        return tensors

    def make_optimizer_state(self) -> None:
        """Let an optimizer that has made no step yet have the tensors that are read into."""
        for optimizer in self.optimizers:
            get_optimizer_state_dict(self.model, optimizer)
