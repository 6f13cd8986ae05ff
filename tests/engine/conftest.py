"""The tiny model, open for all tests of a file."""

from collections.abc import Iterator

import pytest

from jinfer import LLM
from tests.engine.tiny import PROMPTS, continued, held, open_model


@pytest.fixture(scope="module")
def llm(shared_programs: None) -> Iterator[LLM]:
    with open_model() as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """Greedy continuations computed from logits, without the decode loop."""
    return [continued(llm, prompt, 10) for prompt in PROMPTS]


@pytest.fixture
def nothing_leaks(llm: LLM) -> Iterator[None]:
    """After every test nobody holds a block."""
    yield
    assert held(llm) == 0
