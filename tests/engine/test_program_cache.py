"""The folder of compiled programs: nobody else's, and without what is damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import warnings
warnings.simplefilter("error")
from jinfer.engine.runner.program_cache import use_persistent_cache
use_persistent_cache()
import jax
print(jax.jit(lambda x: x * 3 + 1)(2))
"""


def run(cache: Path, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**kept, "JINFER_CACHE": str(cache), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )


def entries(cache: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in cache.rglob("*-cache")}


def test_truncated_entry_is_replaced(tmp_path: Path) -> None:
    """JAX alone leaves it, warns, and compiles at each start."""
    assert run(tmp_path).stdout == "7\n"
    good = entries(tmp_path)
    assert good
    for path in good:  # as if the process had been killed while it wrote
        path.write_bytes(path.read_bytes()[:-10])
        path.with_name(path.name.removesuffix("-cache") + "-atime").unlink()
    assert run(tmp_path).stdout == "7\n"
    mended = entries(tmp_path)
    assert mended.keys() == good.keys()
    assert all(len(mended[path]) == len(good[path]) for path in good)
    assert run(tmp_path).stdout == "7\n"
    assert entries(tmp_path) == mended


def test_programs_compiled_apart_are_not_in_jax_s_cache(tmp_path: Path) -> None:
    program = PROGRAM.replace(
        "print(jax.jit(lambda x: x * 3 + 1)(2))",
        "from jinfer.engine.runner.program_cache import compiled_apart\n"
        "print(compiled_apart(jax.jit(lambda x: x * 3 + 1).lower(2))(2))",
    )
    assert run(tmp_path, program).stdout == "7\n"
    assert not entries(tmp_path)


def test_unusable_folder_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(
        tmp_path / "file", PROGRAM.replace("import jax\n", "use_persistent_cache()\nimport jax\n")
    )
    assert done.stdout == "7\n"
    (line,) = done.stderr.splitlines()
    assert "cannot be used: Not a directory, so programs are compiled at each start" in line
    assert "set JINFER_CACHE" in line
