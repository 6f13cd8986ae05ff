"""Most commands open the same few models."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _shared_programs(shared_programs: None) -> None:
    """Their programs are traced once in a file."""
