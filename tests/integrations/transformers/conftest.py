"""Every test begins with dense attention in blocks of BLOCK under the name "titan_sparse"."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from tests.integrations.transformers.families import BLOCK
from titan_sparse.integrations.transformers import AttentionSettings, attention, register


@pytest.fixture(autouse=True)
def _registered(request: pytest.FixtureRequest) -> None:
    register(AttentionSettings(block_size=getattr(request.module, "DEVICE_BLOCK", BLOCK)))


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """The calls of attend() from here on: their tensors and options."""
    calls = []
    attend = attention.attend

    def noted(*tensors: Tensor, **options: Any) -> Tensor:
        calls.append(SimpleNamespace(tensors=tensors, options=options))
        return attend(*tensors, **options)

    monkeypatch.setattr(attention, "attend", noted)
    return calls
