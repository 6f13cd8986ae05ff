"""schemathesis sends what the description allows, and what it forbids, to every operation.

`JINFER_SCHEMATHESIS="--max-examples 300"` has more of its options, the last of which count.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from jinfer.server.routes import ENDPOINTS
from tests.server.running import GOLDENS, ROOT
from tests.server.test_run_server import command, free_port, ready
from tests.server.test_soak import SOURCE
from tests.test_classification import with_words

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
# Of models that compute vectors and classes; the first server is one that writes.
VECTORS = (
    "/v1/embeddings",
    "/v1/rerank",
    "/score",
    "/classify",
    "/pooling",
    "/fill-mask",
    "/v2/embed",
)


def checked(url: str, *chosen: str) -> None:
    """Runs it on a server that answers."""
    more = os.environ.get("JINFER_SCHEMATHESIS", "").split()
    asked = [
        *("-m", "schemathesis.cli", "run", f"{url}/openapi.json", *chosen),
        *("--phases", "coverage,fuzzing", "--max-examples", "100"),
        *("--checks", ",".join(CHECKS)),
        *("--continue-on-failure", "--request-timeout", "120", "--no-color", *more),
    ]
    hooks = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.server.schemathesis_hooks"}
    run = [sys.executable, *asked]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, env=hooks)
    print(done.stdout[-2000:])
    assert done.returncode == 0, done.stdout[-20_000:]


def words(option: str, paths: Sequence[str]) -> list[str]:
    """An option for each path."""
    return [word for path in paths for word in (option, path.replace(":path", ""))]


@pytest.mark.soak
def test_the_description_is_kept_to(tmp_path: Path) -> None:
    """Every operation, with all optional features of a server."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "guest.toml").write_text(Path(SOURCE).read_text())
    port = free_port()
    given = (f"smol={SOURCE}", "--port", str(port), "-c", "64", "--log-level", "error")
    names = ("--files-dir", "--responses-dir", "--slot-save-path", "--models-dir")
    folders = [word for name in names for word in (name, str(tmp_path / name.split("-")[2]))]
    allowed = ("--allow-inspection", "--runtime-adapters", "--request-chat-templates")
    engine = (
        "--set",
        "engine.kv_tokens=2048",
        "--set",
        "engine.max_adapters=2",
        "--cache-ram",
        "1",
    )
    with command(*given, *folders, *allowed, *engine) as process:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            ready(client, process)
        # Other paths of the same routes are left out.
        others = [path for item in ENDPOINTS for path in item.paths[1:]]
        checked(f"http://127.0.0.1:{port}", *words("--exclude-path", others))
        assert process.poll() is None


@pytest.mark.soak
def test_the_description_of_vectors_is_kept_to(tmp_path: Path) -> None:
    """Their routes, with a model that has a head and vectors."""
    shutil.copytree(GOLDENS / "bert_cls", tmp_path / "ranker")
    with_words(tmp_path / "ranker")
    port = free_port()
    given = (f"ranker={tmp_path / 'ranker'}", "--port", str(port), "--log-level", "error")
    with command(*given, "--set", "dtype=float32") as process:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            ready(client, process)
        checked(f"http://127.0.0.1:{port}", *words("--include-path", VECTORS))
