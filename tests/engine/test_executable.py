"""Executables: called as the function is, with NumPy's arrays and JAX's, and told what is wrong."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest

from jinfer.engine.runner.aot_serialization import dumped, reader
from jinfer.engine.runner.known_jaxlib import KNOWN, is_known


def test_calls() -> None:
    def function(first: tuple[jax.Array, ...], scale: jax.Array, rest: dict[str, jax.Array]):  # type: ignore[no-untyped-def]
        return {"sum": first[1] * scale + rest["a"], "other": (rest["b"] + 1, None)}

    like = (
        (jax.ShapeDtypeStruct((3,), np.float32),) * 3,
        jax.ShapeDtypeStruct((), np.float32),
        {
            "a": jax.ShapeDtypeStruct((3,), np.float32),
            "b": jax.ShapeDtypeStruct((2,), np.int32),
        },
    )
    lowered = jax.jit(function, donate_argnums=2).lower(*like)
    program = reader(lowered.compile())
    assert program.read == (1,)
    ones = jnp.ones(3)
    values = {"a": np.arange(3, dtype=np.float32), "b": np.array([4, 5], np.int32)}
    for scale in (np.float32(2), jnp.float32(2), np.array(2, np.float32)):
        out = program((ones, ones + 1, ones), scale, values)
        np.testing.assert_array_equal(out["sum"], [4, 5, 6])
        np.testing.assert_array_equal(out["other"][0], [5, 6])
        assert out["other"][1] is None
    donated = {name: jnp.asarray(array) for name, array in values.items()}
    program((ones, ones, ones), np.float32(1), donated)
    assert donated["a"].is_deleted()
    assert "HloModule" in program.as_text()
    assert program.memory_analysis().output_size_in_bytes > 0
    fresh = reader(lowered.compile())
    with pytest.raises(TypeError, match=r"\(4,\).*, not \(\(3,\)"):
        fresh((ones, jnp.ones(4), ones), np.float32(1), values)
    with pytest.raises(TypeError, match="3 arrays for 4"):
        fresh((ones, ones, ones), np.float32(1), {"a": values["a"]})
    assert dumped(lowered.compile()) is not None


def test_the_installed_jaxlib_is_known() -> None:
    """If this fails: run the tests of `engine` and `runtime` with it, and add it to `KNOWN`."""
    assert is_known(), f"jaxlib {jaxlib.version.__version__} is not among {KNOWN}"


def test_with_an_unknown_jaxlib_jax_calls_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jinfer.engine.runner.aot_serialization.is_known", lambda: False)
    program = jax.jit(lambda x: x + 1).lower(np.float32(1)).compile()
    assert reader(program) is program
    assert not is_known("99.0.0")
