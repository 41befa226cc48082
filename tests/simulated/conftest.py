from collections.abc import Iterator

import pytest
from simulated.device import simulated_device


@pytest.fixture
def device() -> Iterator[str]:
    """The name of a GPU that is simulated."""
    with simulated_device():
        yield "cuda"
