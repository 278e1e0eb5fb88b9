"""Every test begins with dense attention in blocks of BLOCK under the name "titan_sparse"."""

from typing import Any, NamedTuple

import pytest
from torch import Tensor

from tests.integrations.transformers.families import BLOCK
from titan_sparse.integrations.transformers import AttentionSettings, attention, register


class Attended(NamedTuple):
    """A call of attend()."""

    tensors: tuple[Tensor, ...]
    options: dict[str, Any]
    out: Tensor


@pytest.fixture(autouse=True)
def _registered(request: pytest.FixtureRequest) -> None:
    register(AttentionSettings(block_size=getattr(request.module, "DEVICE_BLOCK", BLOCK)))


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[Attended]:
    """The calls of attend() from here on."""
    calls = []
    attend = attention.attend

    def kept(*tensors: Tensor, **options: Any) -> Tensor:
        calls.append(Attended(tensors, options, attend(*tensors, **options)))
        return calls[-1].out

    monkeypatch.setattr(attention, "attend", kept)
    return calls
