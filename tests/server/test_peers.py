"""What llama.cpp's and vLLM's tests ask for: tests/server/peers/README.md has the results."""

from pathlib import Path

import pytest

from tests.server.peers.page import PAGE, SUITES, page
from tests.server.peers.served import all_servers


def test_the_tables() -> None:
    """`python -m tests.server.peers` writes them anew."""
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text
    for suite in SUITES:
        assert suite.holding() >= 0.9 * suite.applying()


@pytest.mark.soak
def test_every_case(tmp_path: Path) -> None:
    """Each is as its table says: what holds does, and what does not still does not."""
    with all_servers(tmp_path) as servers:
        wrong = [line for suite in SUITES for line in suite.run(servers)]
    print(*(f"{one.name}: {one.holding()} of {one.applying()}" for one in SUITES))
    assert wrong == []
