"""JAX that waits: what is there meanwhile, when it comes, and that it is whole then."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jinfer.xla import later
from tests.xla.processes import needs_known, run

WAITING = """
import sys
from jinfer.xla.later import import_jax, is_postponed, once_imported, postpone, was_postponed
assert postpone() and is_postponed()
"""
# Nothing of these uses JAX.
SAID = """
import jax
import jax.numpy as jnp
from jax import Array, lax
"""


@needs_known
@pytest.mark.parametrize(
    "use",
    [
        "jnp.float32",
        "jax.tree",
        "lax.add",
        "jax.__version__",
        "__import__('jax.sharding')",
        "__import__('jax._src.interpreters.pxla')",
        "__import__('jax.numpy.linalg')",
        "__import__('flax.nnx')",
    ],
)
def test_the_first_use_imports_all_of_it(use: str) -> None:
    script = f"""{WAITING}{SAID}
assert "jax._src" not in sys.modules
{use}
assert not is_postponed() and was_postponed()
import jax as again
assert again.numpy.add is jnp.add is jax.numpy.add and lax.add is again.lax.add
assert again.Array is Array and type(jax).__name__ == "module"
from jax._src import core
assert core is sys.modules["jax._src.core"] is jax._src.core
assert jax.sharding.__spec__.name == "jax.sharding" and jax.sharding.__spec__.origin
print(jnp.arange(3) + 1, jax.jit(lambda x: 2 * x)(4))
"""
    assert run(script) == "[1 2 3] 8"


@needs_known
def test_who_looks_through_all_modules_uses_none() -> None:
    script = f"""{WAITING}{SAID}
for module in list(sys.modules.values()):
    for name in ("__file__", "__wrapped__", "__warningregistry__", "__all__"):
        getattr(module, name, None)
import inspect
inspect.getmodule(print)
print(is_postponed())
"""
    assert run(script) == "True"


@needs_known
def test_threads_that_use_it_at_once() -> None:
    script = f"""{WAITING}{SAID}
import threading
seen, told = [], []
once_imported(lambda: told.append(1))
uses = [
    lambda: jnp.zeros(2).shape,
    lambda: __import__("jax.sharding").sharding.Mesh.__name__,
    lambda: import_jax(),
    lambda: jax.tree.leaves([1, 2]),
] * 4
threads = [threading.Thread(target=lambda use=use: seen.append(use())) for use in uses]
[thread.start() for thread in threads]
[thread.join(60) for thread in threads]
print(len(seen), told)
"""
    assert run(script) == "16 [1]"


@needs_known
def test_an_import_that_fails_is_tried_again(tmp_path: Path) -> None:
    script = f"""{WAITING}{SAID}
told = []
once_imported(lambda: told.append(1))
sys.modules["opt_einsum"] = None
try:
    jnp.zeros(2)
except ImportError as error:
    print("opt_einsum" in str(error), is_postponed(), told)
del sys.modules["opt_einsum"]
print(jnp.zeros(2).shape, told)
"""
    assert run(script).splitlines() == ["True True []", "(2,) [1]"]


def test_it_does_not_wait_where_it_is_there_already() -> None:
    script = """
import jax, sys
from jinfer.xla.later import import_jax, is_postponed, once_imported, postpone, was_postponed
before = dict(sys.modules)
print(postpone(), is_postponed(), was_postponed(), sys.modules["jax"] is before["jax"])
once_imported(lambda: print("now"))
import_jax()
"""
    assert run(script).splitlines() == ["False False False True", "now"]


@pytest.mark.parametrize(
    "environment",
    [
        {"JAX_ENABLE_X64": "1"},
        {"JAX_PLATFORMS": "cuda"},
        {"JAX_PLATFORMS": "cuda,cpu"},
        {"JAX_COMPILATION_CACHE_DIR": "/nowhere"},
        {"PJRT_NAMES_AND_LIBRARY_PATHS": "other:/nowhere"},
    ],
)
def test_it_does_not_wait_where_something_else_is_asked(environment: dict[str, str]) -> None:
    script = "from jinfer.xla.later import postpone; print(postpone())"
    assert run(script, **environment) == "False"


def test_it_does_not_wait_in_an_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxlib.version.__version__", "99.0.0")
    monkeypatch.delitem(sys.modules, "jax")
    assert not later.postpone()


@pytest.mark.parametrize("kind", ["package", "entry point"])
def test_plugins_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Those of JAX bring other devices."""
    monkeypatch.setenv("JAX_PLATFORMS", "")
    if kind == "package":
        (tmp_path / "libtpu").mkdir()
        (tmp_path / "libtpu" / "__init__.py").touch()
    else:
        (tmp_path / "other-1.0.dist-info").mkdir()
        text = "[jax_plugins]\nother = jax_other\n"
        (tmp_path / "other-1.0.dist-info" / "entry_points.txt").write_text(text)
    before = later._has_plugins()
    monkeypatch.syspath_prepend(tmp_path)
    assert later._has_plugins()
    if before:
        pytest.skip("there are others")
