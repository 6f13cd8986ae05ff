"""Scripts in processes of their own: JAX is imported once in each, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jinfer.xla.later import is_known

needs_known = pytest.mark.skipif(not is_known(), reason="this jaxlib is not known well enough")


def run(script: str, *arguments: str, **environment: str) -> str:
    """What a script prints, where JAX has no settings but that it is for a CPU."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**kept, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
