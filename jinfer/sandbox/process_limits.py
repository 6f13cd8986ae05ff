"""Process limits (`ulimit`, cgroups): checked before XLA would abort the process.

XLA aborts with a C++ stack trace if it cannot get address space or threads. Its needs depend on the
number of processors and hardly on the model, whose weights come on top.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# XLA and its compiler, with a memory pool and stacks for the threads of each processor.
_ADDRESSES, _ADDRESSES_EACH = 1920 << 20, 64 << 20
_THREADS, _THREADS_EACH = 8, 2
_FEW = 4096  # threads; a higher limit need not be checked
_PIDS = ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max")


class ProcessLimitError(RuntimeError):
    """A process limit is too low; the message says which, and how to raise it."""


def check_process_limits() -> None:
    """Check that XLA can start. Raises `ProcessLimitError`."""
    own = getattr(os, "sched_getaffinity", None)
    cores = len(own(0)) if own is not None else os.cpu_count() or 1
    needed = _ADDRESSES + _ADDRESSES_EACH * cores
    allowed = _soft_limit("RLIMIT_AS")
    if allowed is not None and allowed < needed:
        raise ProcessLimitError(
            f"this process may have {allowed / 1e9:.1f} GB of address space (ulimit -v), and a"
            f" model needs {needed / 1e9:.1f} GB besides its weights; raise it, or bound memory"
            " with a container instead"
        )
    threads = _THREADS + _THREADS_EACH * cores
    if min(_thread_limits(), default=_FEW) < _FEW and not _can_start(threads):
        raise ProcessLimitError(
            f"this process cannot start {threads} threads, which a model needs on {cores}"
            " processors; raise ulimit -u, or the container's limit on processes (pids)"
        )


def limit_reason(error: BaseException) -> str | None:
    """A one-line reason if an error is due to such limits, else None."""
    text = str(error)
    if isinstance(error, RuntimeError) and "can't start new thread" in text:
        return f"no thread can be started; {_bound_of_threads()}"
    if isinstance(error, BlockingIOError) and error.errno == errno.EAGAIN:
        return f"no process can be started; {_bound_of_threads()}"
    if isinstance(error, MemoryError) or "annot allocate memory" in text:
        what = f"out of memory{text and f' ({text})'}"
    elif isinstance(error, ImportError) and "failed to map segment" in text:
        what = f"out of address space ({text})"
    else:
        return None
    allowed = _soft_limit("RLIMIT_AS")
    return what if allowed is None else f"{what}; ulimit -v allows {allowed / 1e9:.1f} GB"


def _bound_of_threads() -> str:
    limit = min(_thread_limits(), default=None)
    return f"at most {limit} are allowed" if limit is not None else "the system has no room"


def _soft_limit(name: str) -> int | None:
    """A soft limit of this process; None if it is unlimited or unsupported."""
    if sys.platform != "linux":
        return None
    import resource

    soft = resource.getrlimit(getattr(resource, name))[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _thread_limits() -> Iterator[int]:
    """The limits on threads of the user and the container."""
    if (allowed := _soft_limit("RLIMIT_NPROC")) is not None:
        yield allowed
    for path in _PIDS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            yield int(Path(path).read_text(encoding="ascii"))


def _can_start(count: int) -> bool:
    """Whether that many threads can be started; they end at once."""
    end, started = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(count):
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        return False
    finally:
        end.set()
        for thread in started:
            thread.join()
    return True
