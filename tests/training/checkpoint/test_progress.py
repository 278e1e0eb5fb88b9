"""Counters and generators of a run: from zero, and back from a checkpoint."""

import torch

from titan_sparse.training.checkpoint import Progress

COUNTERS = ("step", "tokens_seen", "skipped_updates", "times_gone_back")


def test_counters_begin_at_zero_and_come_back():
    progress = Progress(torch.device("cpu"))
    state = progress.state_dict()
    assert [state[name] for name in COUNTERS] == [0, 0, 0, 0]
    progress.load_state_dict(state | dict(zip(COUNTERS, (1, 2, 3, 4), strict=True)))
    again = progress.state_dict()
    assert [again[name] for name in COUNTERS] == [1, 2, 3, 4]


def test_the_generator_of_the_cpu_comes_back():
    progress = Progress(torch.device("cpu"))
    state = progress.state_dict()
    wanted = torch.rand(3)
    progress.load_state_dict(state)
    assert torch.equal(torch.rand(3), wanted)


def test_so_does_the_one_of_the_gpu(monkeypatch):
    """Of the run's own GPU. Its generator stands in for the device's."""
    device = torch.device("cuda", 1)
    generators = {device: torch.tensor([7])}
    monkeypatch.setattr(torch.cuda, "get_rng_state", generators.__getitem__)
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: generators.update({device: state})
    )
    progress = Progress(device)
    state = progress.state_dict()
    generators[device] = torch.tensor([8])
    progress.load_state_dict(state)
    assert generators == {device: torch.tensor([7])}
