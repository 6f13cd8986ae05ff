"""GPU profile: time by kernel, from JAX's profiler."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax

# Seconds in all and how often, by kernel.
type Kernels = Mapping[str, tuple[float, float]]

_SHOWN = 16


def kernels_of(call: Callable[[], object], steps: int = 1) -> Kernels:
    """Kernels and copies of a call, divided by its number of steps.

    Args:
        call: waits until the device is done.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        (file,) = Path(folder).rglob("*.xplane.pb")
        found = jax.profiler.ProfileData.from_file(str(file))
        times: dict[str, tuple[float, float]] = {}
        for plane in found.planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    name = re.sub(r"(_\d+|__\d+|\.\d+)+$", "", event.name)
                    seconds, count = times.get(name, (0.0, 0.0))
                    times[name] = seconds + event.duration_ns * 1e-9 / steps, count + 1 / steps
    return times


def lines(kernels: Kernels) -> Iterator[str]:
    """The slowest kernels and their sum, as text."""
    ordered = sorted(kernels.items(), key=lambda one: -one[1][0])
    for name, (seconds, count) in ordered[:_SHOWN]:
        each = seconds / count * 1e6
        yield f"    {seconds * 1e6:9.1f} us {count:7.1f} x {each:8.2f} us  {name[:90]}"
    if ordered:
        total = sum(seconds for seconds, _ in kernels.values())
        number = sum(count for _, count in kernels.values())
        yield f"    {total * 1e6:9.1f} us {number:7.1f} kernels in all"
