"""Copies for a save in the background: the optimizer waits until they are there."""

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from tests.runs import tiny_config, train, write_texts
from tests.training.checkpoint.helpers import Run, same
from titan_sparse.training.checkpoint import read_into
from titan_sparse.training.checkpoint.writer import Staging
from titan_sparse.training.guard import Guard

LONG_ENOUGH_SECONDS = 0.3
"""For something that must not happen: a bug that takes longer would go unnoticed."""


@pytest.fixture
def late_copies(monkeypatch) -> threading.Event:
    """Copies are made when this event comes, or after a while without it."""
    now = threading.Event()
    copy = Staging.copy

    def late(staging: Staging) -> None:
        now.wait(LONG_ENOUGH_SECONDS)
        copy(staging)

    monkeypatch.setattr(Staging, "copy", late)
    return now


def test_an_update_waits_for_the_copies(late_copies):
    source = torch.ones(1000)
    staging = Staging({MetadataIndex("weight"): source}, torch.device("cpu"), pinned=False)
    staging.before_update()  # Nothing is being copied: it does not wait.
    for step in (1, 2):
        source.fill_(step)
        staging.begin()
        copying = threading.Thread(target=staging.copy)
        copying.start()
        staging.before_update()
        # The optimizer's update. Copies that were not there yet would get it.
        source.fill_(-1)
        late_copies.set()
        copying.join()
        late_copies.clear()
        [copy] = staging.copies.values()
        assert (copy == step).all()
    del copy
    staging.close()


def test_a_save_in_a_run_is_of_its_step(tmp_path: Path, monkeypatch, late_copies):
    """The copies of a save come when the next update is done, unless the update waits for them."""
    states: list[dict[str, Tensor]] = []
    begin = Staging.begin
    update = Guard.update

    def noted_begin(staging: Staging) -> None:
        late_copies.clear()
        parts = zip(staging.slots, staging.sources, strict=True)
        states.append({index.fqn: source.clone() for index, source in parts})
        begin(staging)

    def noted_update(guard: Guard, *args) -> None:
        update(guard, *args)
        late_copies.set()

    monkeypatch.setattr(Staging, "begin", noted_begin)
    monkeypatch.setattr(Guard, "update", noted_update)
    write_texts(tmp_path / "texts")
    config = tiny_config(
        tmp_path,
        "run",
        checkpoint__enable=True,
        checkpoint__interval=1,
        checkpoint__keep_latest_k=0,
        checkpoint__async_mode="async",
        training__steps=3,
        optimizer__name="AdamW",
        optimizer__lr=0.01,
    )
    train(config)
    assert len(states) == 3
    for step, wanted in enumerate(states, 1):
        saved = {name: torch.empty_like(state) for name, state in wanted.items()}
        read_into(saved, tmp_path / f"run/checkpoint/step-{step}", alone=True)
        for name, state in wanted.items():
            assert torch.equal(saved[name], state), (step, name)


def test_a_save_is_of_its_step(alone, tmp_path, late_copies):
    """The checkpointer's part: an update waits at before_update()."""
    run = Run(tmp_path, async_mode="async")
    run.step()
    run.checkpointer.prepare()
    wanted = run.state()
    run.checkpointer.save(1)
    run.step()
    late_copies.set()
    run.checkpointer.close()
    again = Run(tmp_path)
    assert again.checkpointer.load() and same(again.state(), wanted)


def index_of(tensors: list[Tensor]) -> dict[MetadataIndex, Tensor]:
    return {MetadataIndex(str(number)): tensor for number, tensor in enumerate(tensors)}


def test_copies_are_like_the_tensors_the_empty_ones_too():
    sources = [torch.arange(6.0).view(2, 3), torch.zeros(0, 3, dtype=torch.bfloat16)]
    sources.append(torch.tensor(5))
    staging = Staging(index_of(sources), torch.device("cpu"), pinned=False)
    staging.begin()
    staging.copy()
    for source, copy in zip(sources, staging.copies.values(), strict=True):
        assert copy.dtype == source.dtype and torch.equal(copy, source)
    del copy
    staging.close()
    assert not staging.copies  # nothing holds the memory


def test_a_rank_without_a_part_copies_nothing():
    staging = Staging({}, torch.device("cpu"), pinned=False)
    staging.begin()
    staging.copy()
    staging.before_update()
    assert staging.copies == {}
    staging.close()
