"""The device that a process computes on: JAX's, or a CPU that JAX takes over when it comes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from jaxlib import _jax

from jinfer.xla import trees
from jinfer.xla.arrays import aval, complete, hand_over
from jinfer.xla.later import is_postponed, once_imported

_making = threading.RLock()
_own: list[Any] = []  # the client, where it was made here


def platform() -> str:
    """ "cpu", "gpu" or another, of the first device."""
    if is_postponed():
        return "cpu"
    import jax

    return jax.default_backend()


def process_count() -> int:
    """Processes that share their devices."""
    if is_postponed():
        return 1
    import jax

    return jax.process_count()


def first_device() -> Any:
    """The first device of this process, which starts XLA."""
    with _making:
        if not _own and is_postponed():
            _own.append(_client())
        if _own:
            return _own[0].local_devices()[0]
    import jax

    return jax.local_devices()[0]


def all_devices() -> list[Any]:
    """All devices there are, also other processes'."""
    if is_postponed():
        return [*first_device().client.devices()]
    import jax

    return jax.devices()


def has_started() -> bool:
    """Whether XLA runs, which fixes how many threads it has."""
    if _own or is_postponed():
        return bool(_own)
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def device_list() -> Any:
    """The first device alone, as XLA is told of devices."""
    return _jax.DeviceList((first_device(),))


@cache
def sharding() -> Any:
    """Where arrays are: whole, on the first device."""
    return _jax.SingleDeviceSharding(first_device())


def put(tree: Any, *, may_alias: bool | None = None) -> Any:
    """NumPy's arrays in a tree on the first device, as `jax.device_put`.

    Args:
        may_alias: whether a CPU may take an array over where it is; nobody may write to it then.
    """
    if not is_postponed():
        import jax

        return jax.device_put(tree, may_alias=may_alias)
    return trees.map(lambda one: _put(one, may_alias is not False), tree)


def put_beside(values: np.ndarray, other: Any) -> Any:
    """An array where another is, and bound to that place if the other is."""
    if is_postponed():
        return _put(values, may_alias=True)
    import jax

    (device,) = other.devices()
    return jax.device_put(values, device if other.committed else None)


def ready[T](tree: T) -> T:
    """A tree, as soon as all its arrays are computed."""
    for one in trees.leaves(tree):
        if isinstance(one, _jax.Array):
            one.block_until_ready()
    return tree


def put_like(like: Any, may_alias: bool = False) -> Callable[[Any], Any]:
    """What puts arrays and numbers of NumPy's there that are of an aval's shape and type."""
    where, devices, kinds = sharding(), [first_device()], _jax.HostBufferSemantics
    kind = kinds.ZERO_COPY if may_alias else kinds.IMMUTABLE_ONLY_DURING_CALL
    place = _jax.batched_device_put
    return lambda value: place(like, where, [value], devices, False, False, kind)


def _put(value: Any, may_alias: bool) -> Any:
    if isinstance(value, _jax.Array):
        return value
    value = np.asarray(value)
    if value.dtype.itemsize == 8:  # as JAX has it, with 32 bits
        value = value.astype(f"{value.dtype.kind}4")
    return put_like(aval(value.shape, value.dtype), may_alias)(value)


def _client() -> Any:
    """A CPU, as JAX starts it; JAX will take this one."""
    from jaxlib import xla_client

    complete()
    # Which JAX sets: numbers of 64 bits are refused.
    _jax.jax_jit.set_enable_x64_state(_jax.config.Config("jax_enable_x64", False))
    client = xla_client.make_cpu_client(asynchronous=True)
    gc.callbacks.append(_collect)
    once_imported(lambda: _hand_over(client))
    return client


def _collect(*_: Any) -> None:
    """Lets go of what XLA's threads have left, as JAX does whenever Python looks for garbage."""
    _jax.collect_garbage()


def _hand_over(client: Any) -> None:
    """Makes JAX, imported a moment ago, use what is there."""
    from dataclasses import replace

    from jax._src import xla_bridge

    gc.callbacks.remove(_collect)
    factories = xla_bridge._backend_factories
    factories["cpu"] = replace(factories["cpu"], factory=lambda: client)
    hand_over()
