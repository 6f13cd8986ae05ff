"""JAX imported with less, against what is left of it afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# What a command does, and then what JAX found.
_SCRIPT = """
import sys
from importlib import metadata
found = metadata.distributions
from jinfer.xla.jax_import import import_jax
import_jax()
assert metadata.distributions is found
assert not any(module is None for module in sys.modules.values())
from jax._src import compilation_cache, xla_bridge
print("etils" in sys.modules, "pygments" in sys.modules)
"""


def _run(script: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_what_a_command_has_no_use_for_is_left_out() -> None:
    assert _run(_SCRIPT) == "False False"


@pytest.mark.skipif(find_spec("etils") is None, reason="etils is not installed")
def test_what_is_left_out_can_be_imported_afterwards() -> None:
    assert _run(_SCRIPT + "import etils.epath; print(etils.epath.Path('a'))").endswith("\na")


@pytest.mark.skipif(find_spec("etils") is None, reason="etils is not installed")
def test_a_cache_in_a_bucket_keeps_what_writes_there() -> None:
    assert _run(_SCRIPT, JAX_COMPILATION_CACHE_DIR="gs://bucket/programs").split()[0] == "True"


@pytest.mark.parametrize("installed", [False, True])
def test_installed_packages_are_searched_where_rocm_is_one_of_them(
    tmp_path: Path, installed: bool
) -> None:
    if installed:
        (tmp_path / "jax_rocm7_plugin-0.9.dist-info").mkdir()
    script = """
from importlib import metadata
from jinfer.xla import jax_import
with jax_import._unsearched():
    print(bool(list(metadata.distributions())))
"""
    assert _run(script, PYTHONPATH=os.pathsep.join((str(tmp_path), *sys.path))) == str(installed)


def test_jax_that_is_there_is_left_alone() -> None:
    script = """
import jax, sys
before = dict(sys.modules)
from jinfer.xla.jax_import import import_jax
import_jax()
print({name for name in before if sys.modules.get(name) is not before[name]})
"""
    assert _run(script) == "set()"
