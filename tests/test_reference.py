"""Reference pages: docs/reference is what `python -m tools.write_reference` makes of the code."""

from pathlib import Path

import pytest

from jinfer.server.routes import ENDPOINTS
from tools import peer_fields_reference, write_reference

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
PAGES = write_reference.pages()
ELSEWHERE = {"config_keys.md"}  # compared by tests/families/test_second_checkpoints.py


@pytest.mark.parametrize("name", PAGES)
def test_page_is_up_to_date(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert text == PAGES[name], "run: python -m tools.write_reference"


def test_folder_has_generated_pages_only() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*PAGES, *ELSEWHERE}


def test_every_route_is_listed() -> None:
    listed = PAGES["http_api.md"]
    for endpoint in ENDPOINTS:
        for path in endpoint.paths:
            assert f"`{path.replace(':path}', '}')}`" in listed


def test_table_escapes_bars_and_line_ends() -> None:
    made = write_reference.table(("a", "b"), [("x|y", "two\nlines")])
    assert made == "| a | b |\n|---|---|\n| x\\|y | two lines |"


def test_treatment_of_fields() -> None:
    chat = "/v1/chat/completions"
    assert peer_fields_reference.treatment(chat, "temperature") == "followed"
    assert peer_fields_reference.treatment(chat, "store").startswith("ignored: ")
    assert peer_fields_reference.treatment(chat, "no_such_field") == "rejected: not known"
