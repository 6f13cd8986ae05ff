"""Start of a command: help needs no JAX; a second start compiles nothing and answers the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jinfer.cpu import build_library

GOLDENS = Path(__file__).parents[1] / "goldens"

# Runs a command, and prints which of some modules it imported.
COMMAND = """
import contextlib, io, runpy, sys
said = io.StringIO()
with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
    sys.argv[0] = sys.argv.pop(1)
    runpy.run_module(sys.argv[0], run_name="__main__")
print(said.getvalue().replace("\\n", " "))
print(*[name for name in ("numpy", "jax", "flax") if name in sys.modules])
"""
QUICK = {  # to compile
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
}


def command(*words: str, **environment: str) -> tuple[str, list[str], str]:
    """What a command prints, which modules it imported, and what stands on standard error."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *words],
        env={**kept, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    text, imported = done.stdout.splitlines()
    return text, imported.split(), done.stderr


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache folder with nothing but the custom calls in it."""
    folder: Path = tmp_path_factory.mktemp("cache")
    library = build_library.library_path()
    copy = shutil.copytree(library.parent, folder / "libraries" / library.parent.name)
    for path in (copy.parent, copy, copy / library.name):
        path.chmod(0o700)
    return str(folder)


@pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")
@pytest.mark.parametrize("golden", ["llama2", "t5"])
def test_generate(cache: str, golden: str) -> None:
    words = ["jinfer.generate", str(GOLDENS / golden), "--ids", "5 9 2 77", "--max-tokens", "8"]
    words += ["--set", "quantization.kv_cache=q8", "--set", "engine.slots=1", "--json"]
    starts = [command(*words, JINFER_CACHE=cache, **QUICK) for _ in range(2)]
    (first, compiling, _), (second, imported, errors) = starts
    assert "flax" in compiling
    assert "flax" not in imported
    assert errors == ""
    answers = [json.loads(text)["token_ids"] for text in (first, second)]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 8


def test_help_imports_nothing() -> None:
    assert command("jinfer.generate", "--help")[1] == []
