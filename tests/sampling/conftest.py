"""The sampler's custom call, and the operations of XLA that are its reference."""

from collections.abc import Iterator

import pytest

from jinfer.ops import choosing


@pytest.fixture(scope="module", params=["call", "xla"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[str]:
    """What chooses the tokens, for a whole file."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "xla":
            patch.setattr(choosing, "available", lambda: False)
        elif not choosing.available():
            pytest.skip("no custom calls")
        yield request.param
