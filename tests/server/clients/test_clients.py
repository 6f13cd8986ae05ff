"""Other people's clients against the service, each where its package is installed.

`JINFER_CLIENTS` names the Python of an environment that has them, if not this one.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.server.clients.checks import CLIENTS
from tests.server.running import ROOT
from tests.server.test_run_server import command, free_port, ready

MODEL = "smollm2_135m_instruct"
PYTHON = os.environ.get("JINFER_CLIENTS", sys.executable)

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    given = ("--port", str(port), "--log-level", "error")
    folder = str(tmp_path_factory.mktemp("files"))
    with command(MODEL, *given, "--files-dir", folder) as process:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            ready(client, process)
        yield f"http://127.0.0.1:{port}/v1"


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client(url: str, client: str) -> None:
    asked = [PYTHON, "-m", "tests.server.clients", url, MODEL, client]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=900)
    print(done.stdout)
    if f"{client}: skipped: " in done.stdout:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
