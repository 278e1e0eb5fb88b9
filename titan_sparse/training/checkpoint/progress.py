"""How far a run has come: what is saved beside model, optimizer and loader."""

from typing import Any

import torch


class Progress:
    """Step and counters of the run, saved with the random-number states. The same on every rank."""

    def __init__(self, device: torch.device):
        self.device = device
        self.step = 0
        self.tokens_seen = 0
        self.skipped_updates = 0
        """updates that the guard left out"""
        self.times_gone_back = 0
        """times that the guard went back to a checkpoint"""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, and the generators' states as tensors on the CPU."""
        state = {
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "skipped_updates": self.skipped_updates,
            "times_gone_back": self.times_gone_back,
            "cpu_generator": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            state["cuda_generator"] = torch.cuda.get_rng_state(self.device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state."""
        self.step = state["step"]
        self.tokens_seen = state["tokens_seen"]
        self.skipped_updates = state["skipped_updates"]
        self.times_gone_back = state["times_gone_back"]
        torch.set_rng_state(state["cpu_generator"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_generator"], self.device)
