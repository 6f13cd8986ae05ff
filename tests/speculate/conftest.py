"""Most tests of speculation open the same tiny model, with drafts and without."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _shared_programs(shared_programs: None) -> None:
    """Its programs are traced once in a file."""
