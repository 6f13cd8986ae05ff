"""The recipe for Ray of docs/deploy.md, as it is printed but for the hosts: two actors on one."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.parallel.distributed.jobs import ROOT, free_port
from tests.parallel.distributed.test_ending import post

PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
GOLDEN = str(ROOT / "tests" / "goldens" / "llama2")


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")
def test_an_actor_on_each_host(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (recipe,) = (block for block in blocks if "import ray\n" in block)
    port = free_port()
    for printed, here in (
        ("STRICT_SPREAD", "PACK"),
        ('"smollm2_135m_instruct"', f'"{GOLDEN}", "--port", "{port}"'),
        ("HOSTS, PORT = 2, 8476", f"HOSTS, PORT = 2, {free_port()}"),
    ):
        assert recipe.count(printed) == 1
        recipe = recipe.replace(printed, here)
    program = tmp_path / "recipe.py"
    program.write_text(recipe)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"}
    with subprocess.Popen([sys.executable, str(program)], cwd=ROOT, env=environment) as process:
        try:
            end, answer = time.monotonic() + 240, None
            while answer is None:
                assert process.poll() is None, "it has ended"
                assert time.monotonic() < end, "it does not answer"
                try:
                    answer = post(port, prompt=[5, 6, 7], max_tokens=4, temperature=0)
                except OSError:
                    time.sleep(0.5)
            assert answer["usage"]["completion_tokens"] == 4  # type: ignore[index]
        finally:
            process.terminate()
