"""The command `llm`."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.server.clients.checks import Checks, Server

CHECKS = Checks()


def llm(server: Server, *arguments: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "extra-openai-models.yaml").write_text(
            f"- model_id: own\n  model_name: {server.model}\n  api_base: {server.url}\n"
            "  supports_tools: true\n  supports_schema: true\n  api_key_name: own\n"
        )
        Path(folder, "keys.json").write_text('{"own": "none"}')
        done = subprocess.run(
            [sys.executable, "-m", "llm", *arguments],
            env={**os.environ, "LLM_USER_PATH": folder},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr[-400:]
    return done.stdout


ASKED = ("prompt", "-m", "own", "-o", "temperature", "0", "-o", "max_tokens")


@CHECKS
def answers(server: Server) -> None:
    streamed = llm(server, *ASKED, "20", "Say hello.")
    assert streamed.strip()
    assert llm(server, *ASKED, "20", "--no-stream", "Say hello.") == streamed


@CHECKS
def schema(server: Server) -> None:
    kinds = {"big": {"type": "boolean"}, "height": {"type": "integer", "maximum": 999}}
    expected = {"type": "object", "properties": kinds, "required": [*kinds]}
    asked = json.dumps({**expected, "additionalProperties": False})
    found = llm(server, *ASKED, "60", "--schema", asked, "A city.")
    assert set(json.loads(found)) == {"big", "height"}


@CHECKS
def tools(server: Server) -> None:
    assert llm(server, *ASKED, "40", "-T", "llm_time", "What time is it?").strip()
