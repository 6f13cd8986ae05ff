"""Fixtures: a server with the demonstration model, shared by the tests of a process."""

from collections.abc import Iterator

import openai
import pytest

from jinfer.server.http.server_settings import ServerSettings
from tests.server.running import SMOL, Running, serving


@pytest.fixture(scope="session")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = str(tmp_path_factory.mktemp("files"))
    with serving([SMOL], ServerSettings(warm_up=False, files_dir=folder)) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def _shared_programs(shared_programs: None) -> None:
    """Share compiled programs: the tests open the same few models."""


@pytest.fixture
def client(smol: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{smol.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def strict(smol: Running) -> Iterator[Running]:
    """Make the shared server strict."""
    service = smol.service
    object.__setattr__(service.settings, "strict", True)
    service.models._any_name = False
    yield smol
    object.__setattr__(service.settings, "strict", False)
    service.models._any_name = True


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check after each test that no request holds blocks, runs or waits."""
    yield
    if "smol" in request.fixturenames:
        running: Running = request.getfixturevalue("smol")
        assert running.holds_nothing()
