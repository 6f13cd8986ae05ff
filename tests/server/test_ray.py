"""The recipe for Ray Serve of docs/deploy.md, as it is printed: two replicas on one machine."""

import asyncio
import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.server.running import ROOT
from tests.server.soak import Soak

PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
# What the recipe's reader has beside it: a program that stays.
_STAYS = "\nimport time\nprint('serving', flush=True)\ntime.sleep(3600)\n"


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[serve]")
def test_two_replicas_answer(tmp_path: Path) -> None:
    (recipe,) = re.findall(r"```python\n(from ray import serve\n.*?)```", PAGE, re.DOTALL)
    assert "num_replicas=2" in recipe
    # As many cores as there are, for both together.
    recipe = recipe.replace('"num_cpus": 4', '"num_cpus": 1')
    program = tmp_path / "recipe.py"
    program.write_text(recipe + _STAYS)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"}
    with subprocess.Popen(
        [sys.executable, str(program)], cwd=ROOT, env=environment, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"serving\n"
            asyncio.run(_played("http://127.0.0.1:8000"))
        finally:
            process.terminate()


async def _played(url: str) -> None:
    seconds = float(os.environ.get("JINFER_RAY_SECONDS", "60"))
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        end, ready = time.monotonic() + 240, 0
        while ready < 20:  # in a row: each is answered by whichever replica
            ready = ready + 1 if (await http.get("/health")).status_code == 200 else 0
            assert time.monotonic() < end, "they are not ready"
            await asyncio.sleep(0.2)
        soak = Soak(url, clients=8, seconds=seconds)
        await soak.run()
        print(dict(soak.codes), f"{soak.whole} whole answers")
        assert soak.wrong == []
        assert soak.whole > 0
        seen: set[str] = set()
        while len(seen) < 2:  # each replica counts for itself
            lines = (await http.get("/metrics")).text.splitlines()
            (count,) = (line for line in lines if line.startswith("jinfer:generation_tokens_total"))
            seen.add(count)
            assert time.monotonic() < end + seconds, "only one replica answers"
