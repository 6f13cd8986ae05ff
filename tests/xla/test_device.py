"""Arrays and programs before JAX is imported, and what becomes of them once it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jinfer.engine.runner.aot_serialization import dumped, reader
from jinfer.quant.quantized_tensor import in_large_pages
from jinfer.xla import arrays, device
from jinfer.xla.abstract import Abstract
from tests.xla.processes import needs_known, run

TYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.uint32, np.int8, np.bool_)

ARRAYS = """
import sys
from jinfer.xla.later import is_postponed, postpone
assert postpone()
import ml_dtypes
import numpy as np
from jinfer.xla import arrays, device
def values(kind, shape=(3, 5)):
    return (np.arange(np.prod(shape)).reshape(shape) % 2).astype(kind)
"""


def test_arrays_with_jax() -> None:
    for kind in TYPES:
        values = (np.arange(15).reshape(3, 5) % 2).astype(kind)
        array = device.put({"a": values})["a"]
        assert isinstance(array, jax.Array)
        np.testing.assert_array_equal(np.asarray(array), values)
        assert device.put(array) is array or bool((device.put(array) == array).all())
    assert device.platform() == jax.default_backend()
    assert device.first_device() == jax.local_devices()[0]
    assert device.all_devices() == jax.devices()
    assert device.has_started()
    assert device.process_count() == 1


@needs_known
def test_arrays_before_jax() -> None:
    script = f"""{ARRAYS}
for kind in (np.float32, np.float16, np.int32, np.uint32, np.int8, np.bool_):
    for given in (values(kind), values(kind, ()), values(kind, (0, 4)), values(kind)[:, ::2]):
        array = device.put(given)
        assert (array.shape, array.dtype, array.ndim) == (given.shape, given.dtype, given.ndim)
        assert (array.size, array.nbytes) == (given.size, given.nbytes)
        assert (np.asarray(array) == given).all() and (np.array(array, copy=True) == given).all()
        assert not np.asarray(array).flags.writeable
        assert np.asarray(array, np.float32).dtype == np.float32
        assert device.put(array) is array
assert device.put(np.arange(2.0)).dtype == np.float32 and device.put(3).dtype == np.int32
assert device.has_started() and device.process_count() == 1 and len(device.all_devices()) == 1
assert device.ready((array, 3))[1] == 3
print(is_postponed(), "jax._src" in sys.modules)
"""
    assert run(script) == "True False"


@needs_known
def test_arrays_of_before_are_jax_s_afterwards() -> None:
    script = f"""{ARRAYS}
kinds = (np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.int8, np.bool_)
arrays = [device.put(values(kind)) for kind in kinds]
first = device.first_device()
import jax, jax.numpy as jnp
for kind, array in zip(kinds, arrays):
    assert isinstance(array, jax.Array) and array.dtype == kind and array.shape == (3, 5)
    assert (np.asarray(array) == values(kind)).all()
    assert (np.asarray(array.astype(jnp.float32) + 1) == values(kind).astype(np.float32) + 1).all()
    assert array.devices() == {{first}} and array.sharding == (array + array).sharding
    assert (np.asarray(jax.jit(lambda x: x[1:])(array)) == values(kind)[1:]).all()
    assert jax.device_put(array, first).shape == (3, 5)
    assert not array.weak_type and array.aval == jax.typeof(array)
assert jax.devices() == [first] == device.all_devices()
given = jax.jit(lambda x: x + 1, donate_argnums=0)(arrays[0])
print(arrays[0].is_deleted(), given.sum())
"""
    assert run(script) == "True 22.0"


@needs_known
def test_what_arrays_lack_is_asked_of_jax() -> None:
    for use in ("array + 1", "array.sum()", "array[0]", "array.devices()", "list(array)"):
        script = f"""{ARRAYS}
array = device.put(values(np.float32))
before = is_postponed()
{use}
print(before, is_postponed())
"""
        assert run(script) == "True False", use
    # Of a type that Python's buffers do not know.
    script = f"""{ARRAYS}
array = device.put(values(ml_dtypes.bfloat16))
print((np.asarray(array) == values(ml_dtypes.bfloat16)).all(), is_postponed())
"""
    assert run(script) == "True False"


@needs_known
def test_whether_memory_is_shared() -> None:
    """An address is that of the memory, and what may not be shared is copied."""
    script = f"""{ARRAYS}
from jinfer.quant.quantized_tensor import in_large_pages
for kind in (np.float32, ml_dtypes.bfloat16, np.uint32):
    given = in_large_pages(values(kind))
    array, copied = device.put(given), device.put(given, may_alias=False)
    assert arrays.address(array) == given.ctypes.data != arrays.address(copied)
    assert arrays.address(device.put_beside(given, array)) == given.ctypes.data
print(is_postponed())
"""
    assert run(script) == "True"
    given = in_large_pages(np.ones((4, 16), np.float32))
    assert arrays.address(jax.device_put(given)) == given.ctypes.data


def test_threads_of_xla_are_bounded_before_it_starts() -> None:
    script = f"""{ARRAYS}
from jinfer.ops.thread_limit import bound
assert not device.has_started()
bound(1)
print(device.has_started(), is_postponed())
"""
    assert run(script) == "True True"


def test_programs() -> None:
    """Called as the function is, with NumPy's arrays and JAX's, and told what is wrong."""

    def function(first: tuple[jax.Array, ...], scale: jax.Array, rest: dict[str, jax.Array]):  # type: ignore[no-untyped-def]
        return {"sum": first[1] * scale + rest["a"], "other": (rest["b"] + 1, None)}

    like = (Abstract((3,), np.float32),) * 3, Abstract((), np.float32)
    rest = {"a": Abstract((3,), np.float32), "b": Abstract((2,), np.int32)}
    lowered = jax.jit(function, donate_argnums=2).lower(*like, rest)
    program = reader(lowered.compile())
    assert program.read == (1,)
    ones = jnp.ones(3)
    given = {"a": np.arange(3, dtype=np.float32), "b": np.array([4, 5], np.int32)}
    for scale in (np.float32(2), jnp.float32(2), np.array(2, np.float32)):
        out = program((ones, ones + 1, ones), scale, given)
        np.testing.assert_array_equal(out["sum"], [4, 5, 6])
        np.testing.assert_array_equal(out["other"][0], [5, 6])
        assert out["other"][1] is None
    held = {name: jnp.asarray(values) for name, values in given.items()}
    program((ones, ones, ones), np.float32(1), held)
    assert held["a"].is_deleted()
    assert "HloModule" in program.as_text()
    assert program.memory_analysis().output_size_in_bytes > 0
    fresh = reader(lowered.compile())
    with pytest.raises(TypeError, match=r"\(4,\).*, not \(\(3,\)"):
        fresh((ones, jnp.ones(4), ones), np.float32(1), given)
    with pytest.raises(TypeError, match="3 arrays for 4"):
        fresh((ones, ones, ones), np.float32(1), {"a": given["a"]})
    assert dumped(lowered.compile()) is not None
