"""The sampler's custom call, and the operations of XLA that are its reference."""

from collections.abc import Iterator

import pytest

from jinfer.ops import sampler_calls


@pytest.fixture(scope="module", params=["call", "xla"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[str]:
    """What chooses the tokens, for a whole file."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "xla":
            patch.setattr(sampler_calls, "available", lambda: False)
        elif not sampler_calls.available():
            pytest.skip("no custom calls")
        yield request.param
