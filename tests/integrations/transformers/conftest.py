"""Every test begins with dense attention in blocks of BLOCK under the name "titan_sparse"."""

from unittest.mock import Mock

import pytest

from tests.integrations.transformers.families import BLOCK
from titan_sparse.integrations.transformers import AttentionSettings, attention, register


@pytest.fixture(autouse=True)
def _registered(request: pytest.FixtureRequest) -> None:
    register(AttentionSettings(block_size=getattr(request.module, "DEVICE_BLOCK", BLOCK)))


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list:
    """The calls of attend() from here on."""
    attend = Mock(side_effect=attention.attend)
    monkeypatch.setattr(attention, "attend", attend)
    return attend.call_args_list
