"""docs/serving.md names every route and every field, and a test that there is for each."""

import re
from collections.abc import Iterator

import pytest

from jinfer.server.core.endpoint import EmptyBody
from jinfer.server.core.sampling_fields import SamplingFields
from jinfer.server.routes import ENDPOINTS
from tests.server import peer_tables
from tests.server.running import ROOT

PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
TESTS = "".join(path.read_text() for path in (ROOT / "tests" / "server").glob("test_*.py"))


def section(path: str) -> str:
    """Return the section with a route's fields."""
    for part in re.split(r"^##+ ", PAGE, flags=re.MULTILINE):
        title = part.splitlines()[0]
        if path in title.replace(",", "").split():
            return part
    raise AssertionError(f"no section has {path} in its title")


def rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of each table, but for the heads."""
    for line in text.splitlines():
        if line.startswith(("| `", "| GET", "| POST")):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def test_every_route() -> None:
    listed = {
        name for first, *_ in rows(section("Routes")) for name in re.findall(r"`([^`]+)`", first)
    }
    assert listed == {path.replace(":path", "") for one in ENDPOINTS for path in one.paths}


@pytest.mark.parametrize(
    "endpoint", [one for one in ENDPOINTS if one.request_model is not EmptyBody]
)
def test_every_field(endpoint: object) -> None:
    from jinfer.server.core.endpoint import Endpoint

    assert isinstance(endpoint, Endpoint)
    path = endpoint.paths[0]
    own = {n for first, *_ in rows(section(path)) for n in re.findall(r"`(\w+)`", first)}
    common = {n for first, *_ in rows(section("chosen")) for n in re.findall(r"`(\w+)`", first)}
    fields = set(endpoint.request_model.model_fields)
    if issubclass(endpoint.request_model, SamplingFields):
        assert common == set(SamplingFields.model_fields)
        fields -= common
    assert fields <= own, fields - own


def test_fields_of_other_services() -> None:
    """`python -m tests.server.peer_tables` writes the table anew."""
    assert peer_tables.page(PAGE) == PAGE
    assert len(list(peer_tables.rows())) > 20


def test_every_test_that_is_named() -> None:
    named = [cell[-1] for cell in rows(PAGE) if "test" in cell[-1]]
    for name in re.findall(r"`(test_\w+)`", " ".join(named)):
        assert f"def {name}(" in TESTS, name
    for path in re.findall(r"`(tests/[\w/.]+)`", PAGE):
        assert (ROOT / path).is_file(), path
    tables = list(rows(PAGE.split("## Flags")[0]))
    assert all("test" in row[-1] for row in tables)
