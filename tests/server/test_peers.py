"""llama.cpp's and vLLM's own tests: tests/server/peers/README.md lists the results."""

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
    """Each case is as in its table, whether it holds or not."""
    with all_servers(tmp_path) as servers:
        wrong = [line for suite in SUITES for line in suite.run(servers)]
    print(*(f"{item.name}: {item.holding()} of {item.applying()}" for item in SUITES))
    assert wrong == []
