"""Cost model measurements: a process's cores, and the links between processes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from jinfer.distributed.process_group import ProcessGroup
from jinfer.ops.attention.kv_cache import nbytes
from jinfer.ops.matmul.matmul import linear
from jinfer.parallel.cost_model import Interconnect
from jinfer.parallel.device_groups import DeviceGroup
from jinfer.parallel.sharding_rules import TENSOR_AXIS

_BYTES = 256 << 20  # of all matrices, more than caches hold
_MOST = 64  # of them
_SECONDS = 1.0  # of a measurement of products
_RUNS, _MESSAGES = 15, 200
_LARGE = 64  # times a token's vector: what tells a link's rate from its latency


class MatmulRates:
    """Matmuls with many matrices one after the other, as in a model's layers."""

    def __init__(self, parameter: Any) -> None:
        """Args:
        parameter: an abstract matrix, as it is stored.
        """
        count = min(_MOST, max(2, _BYTES // nbytes(parameter)))
        self._weights = [_random(parameter, seed) for seed in range(count)]
        self._inputs = parameter.shape[-1]
        self.bytes, self.numbers = count * nbytes(parameter), count * math.prod(parameter.shape)
        self._compiled = {1: self._compile(1)}

    def read(self) -> float:
        """Bytes per second read for a single row."""
        return self.bytes / self._seconds(1)

    def flops(self, rows: int) -> float:
        """Operations per second for so many rows."""
        return 2 * rows * self.numbers / self._seconds(rows)

    def _seconds(self, rows: int) -> float:
        compiled = self._compiled.get(rows) or self._compile(rows)
        x = jnp.ones((rows, self._inputs), jnp.float32)
        return median_seconds(lambda: compiled(x, self._weights).block_until_ready(), _SECONDS)

    def before_sums(self, site: DeviceGroup, numbers: int) -> float:
        """Seconds of a matmul followed by an all-reduce of so many numbers."""

        @jax.jit
        @partial(jax.shard_map, mesh=site.mesh, in_specs=P(), out_specs=P(), check_vma=False)
        def added(x: Array, weights: list[Any]) -> Array:
            total = jnp.zeros(numbers or 1, jnp.float32)
            for weight in weights:
                one = linear(x + total[0], weight)[0, 0].astype(jnp.float32) * jnp.float32(0)
                total = jax.lax.psum(total + one, TENSOR_AXIS) if numbers else total + one
            return total

        given = (
            site.replicate(np.ones((1, self._inputs), np.float32)),
            site.replicate_tree(self._weights),
        )
        added(*given).block_until_ready()
        # As many runs in all processes: each waits for the others in every sum.
        runs = [_timed(lambda: added(*given).block_until_ready()) for _ in range(_RUNS)]
        return statistics.median(runs) / len(self._weights)

    def _compile(self, rows: int) -> Any:
        def products(x: Array, weights: list[Any]) -> Array:
            total = jnp.zeros((), jnp.float32)
            for weight in weights:
                # Each waits for the one before, as layers do.
                total = linear(x + total, weight)[0, 0].astype(jnp.float32) * jnp.float32(0)
            return total

        x = jax.ShapeDtypeStruct((rows, self._inputs), jnp.float32)
        return jax.jit(products).lower(x, self._weights).compile()


def _random(parameter: Any, seed: int) -> Any:
    rng = np.random.default_rng(seed)

    def one(leaf: Any) -> Array:
        if np.issubdtype(leaf.dtype, np.integer):
            # Of any format these are codes: pairs of eleven levels are below 121.
            codes = rng.integers(0, 1 << 8, leaf.size * leaf.dtype.itemsize, np.uint8) & 0x3F
            return jnp.asarray(codes.view(leaf.dtype).reshape(leaf.shape))
        return jnp.asarray(rng.standard_normal(leaf.shape, np.float32)).astype(leaf.dtype)

    return jax.tree.map(one, parameter)


def median_seconds(run: Callable[[], Any], seconds: float) -> float:
    """Median duration of a run, repeated as often as the time allows."""
    run()  # so that nothing is done for the first time
    taken, end = list[float](), time.perf_counter() + seconds
    while not taken or time.perf_counter() < end:
        begun = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def sum_link(size: int, products: MatmulRates) -> Interconnect:
    """The all-reduce link among all devices of a job, one per process.

    All-reduces after matmuls, as in a layer, take longer than repeated ones: processes arrive at
    different times, and waiting ones have to wake up.

    Args:
        size: numbers of a token's vector.
        products: the matmuls before each all-reduce.
    """
    site = DeviceGroup(tuple(jax.devices()))
    count = len(site.devices)
    alone, small, large = (products.before_sums(site, n * size) for n in (0, 1, _LARGE))
    # A sum is two messages and 2 (T - 1) / T of the vector.
    found = _link(small - alone, large - alone, 4 * size * 2 * (count - 1) / count)
    return Interconnect(found.rate, found.latency / 2)


def _timed(run: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def pass_link(group: ProcessGroup, size: int) -> Interconnect:
    """The point-to-point link of stages 0 and 1 (pipeline parallelism); called in all processes.

    Args:
        size: numbers of a token's vector.
    """
    with ThreadPoolExecutor(1) as sender:
        small, large = (_passing(group, sender, n, n * size) for n in (1, _LARGE))
    return _link(small, large, 4 * size)


def _passing(group: ProcessGroup, sender: ThreadPoolExecutor, name: int, numbers: int) -> float:
    """Seconds to send a vector from a device of one process to one of the other."""
    x = jax.device_put(np.ones((1, numbers), np.float32), jax.local_devices()[0])

    def send(index: int) -> None:
        group.send(1 - group.rank, result=f"ping {name}", call=-index - 1, value=np.asarray(x))

    begun = 0.0
    for index in range(_MESSAGES):
        if index == _MESSAGES // 4:
            begun = time.perf_counter()
        if group.rank > 1:
            continue
        coming = group.results.expect(-index - 1, f"ping {name}")
        if group.rank == 0:
            sender.submit(send, index).result()
        jax.device_put(coming.result(), jax.local_devices()[0]).block_until_ready()
        if group.rank == 1:
            sender.submit(send, index).result()
    return (time.perf_counter() - begun) / (_MESSAGES - _MESSAGES // 4) / 2


def _link(small: float, large: float, size: float) -> Interconnect:
    """Latency and bandwidth from the times of a message and of one `_LARGE` times its size."""
    rate = (_LARGE - 1) * size / max(large - small, 1e-9)
    return Interconnect(rate, max(small - size / rate, 0.0))
