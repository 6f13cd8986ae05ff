"""Machine information: CPU, memory bandwidth, and load by other processes."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jinfer.cpu import build_library, library_calls
from jinfer.cpu.cores import usable_cores
from jinfer.quant.quantized_tensor import copy_to_huge_pages

# By each thread, many times what caches hold: of twice as much a fifth still came from there.
_READ_BYTES = 256 << 20
_READ_MOST = 4 << 30  # by all together
_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "asimddp")
_QUIET_CORES, _QUIET_STEAL = 0.15, 0.01
_STAT = Path("/proc/stat")


def machine() -> dict[str, Any]:
    """The machine that results were measured on."""
    values = _fields(Path("/proc/cpuinfo"))
    flags = (values.get("flags") or values.get("Features") or "").split()
    return {
        "cpu": values.get("model name") or platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "of": os.cpu_count(),
        "features": [name for name in _FEATURES if name in flags],
        "python": platform.python_version(),
    }


def _fields(path: Path) -> dict[str, str]:
    """Lines of "key : value", the last of each key."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def read_rate(cores: int, repeats: int = 10) -> float:
    """Memory bandwidth in bytes per second with so many threads, the median of some runs.

    Each thread reads an array of its own, in huge pages like weights: one word of each cache line
    if there are custom calls, otherwise all words, which on some processors is slower than memory.
    The fastest way counts. Not the best run, which takes 20 ms: results it is compared with take
    seconds, in which other machines use the same memory.
    """
    nbytes = min(_READ_BYTES, _READ_MOST // cores)
    arrays = [copy_to_huge_pages(np.ones(nbytes // 8, np.int64)) for _ in range(cores)]
    ways: list[Callable[[np.ndarray], Any]] = [np.bitwise_or.reduce]
    if build_library.available():
        ways = [partial(library_calls.read_memory, ahead=ahead) for ahead in library_calls.AHEAD]
    seconds: list[list[float]] = [[] for _ in ways]
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(repeats):
            for way, taken in zip(ways, seconds, strict=True):
                begun = time.perf_counter()
                list(pool.map(way, arrays))
                taken.append(time.perf_counter() - begun)
    return cores * nbytes / min(map(statistics.median, seconds))


@dataclass(frozen=True)
class CPUCounters:
    """CPU time counters since boot, in seconds.

    Attributes:
        clock: when they were read.
        busy: of all processes and processors.
        stolen: time the hypervisor gave to other machines.
        own: of this process and its ended children.
    """

    clock: float
    busy: float
    stolen: float
    own: float


def counters(stat: Path = _STAT) -> CPUCounters | None:
    """Read the counters; None if the system has none."""
    try:
        name, *words = stat.read_text(encoding="utf-8").split("\n", 1)[0].split()
        ticks = [int(word) for word in words]
    except (OSError, ValueError):
        return None
    if name != "cpu" or len(ticks) < 8:
        return None
    user, nice, system, _, _, irq, softirq, stolen = ticks[:8]
    unit = os.sysconf("SC_CLK_TCK")
    own = sum(os.times()[:4])
    return CPUCounters(
        time.monotonic(), (user + nice + system + irq + softirq) / unit, stolen / unit, own
    )


@dataclass(frozen=True)
class OtherLoad:
    """Load by others during a run.

    Attributes:
        cores: average number of cores kept busy by other processes.
        stolen: share of CPU time that went to other machines.
    """

    cores: float
    stolen: float

    @property
    def quiet(self) -> bool:
        """Whether the load was negligible."""
        return self.cores < _QUIET_CORES and self.stolen < _QUIET_STEAL

    def __str__(self) -> str:
        text = (
            f"other processes kept {self.cores:.2f} cores busy, other machines took "
            f"{self.stolen:.1%} of the processors' time"
        )
        return text if self.quiet else f"{text}: trust no figure, and ratios only roughly"


def others(before: CPUCounters | None, after: CPUCounters | None) -> OtherLoad | None:
    """The load by others between two readings; None if unknown."""
    if before is None or after is None or after.clock <= before.clock:
        return None
    seconds = after.clock - before.clock
    busy = after.busy - before.busy - (after.own - before.own)
    stolen = (after.stolen - before.stolen) / seconds / (os.cpu_count() or 1)
    return OtherLoad(max(0.0, busy / seconds), max(0.0, stolen))
