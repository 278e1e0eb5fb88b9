import pytest

from tests.training.checkpoint.helpers import join_alone


@pytest.fixture
def alone() -> None:
    """Saving and loading are collective."""
    join_alone()
