"""Threads of an engine: pools, the end of the interpreter, and processes that were forked.

Once the main thread has returned, Python starts no threads, while those that run are awaited.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from jinfer.engine.requests import EngineError


def start_threads(pool: ThreadPoolExecutor, count: int) -> None:
    """Starts the threads of a new pool now, and waits until they run.

    None is started once the interpreter shuts down; see `submit`.

    Raises:
        RuntimeError: the system cannot start one; the others do not wait for it.
    """
    barrier = threading.Barrier(count + 1)
    try:
        for _ in range(count):
            pool.submit(barrier.wait)
        barrier.wait()
    except RuntimeError as error:
        barrier.abort()
        if not _at_shutdown(error):
            raise


def _at_shutdown(error: RuntimeError) -> bool:
    """Whether a thread could not start as the main thread has returned, by Python's message."""
    return "interpreter shutdown" in str(error)


def submit[**P, T](
    pool: ThreadPoolExecutor, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> Future[T]:
    """Submits work to a pool; does it here where the pool cannot start a thread any more."""
    try:
        return pool.submit(work, *args, **kwargs)
    except RuntimeError as error:
        if not _at_shutdown(error):
            raise
    done = Future[T]()
    try:
        done.set_result(work(*args, **kwargs))
    except Exception as error:
        done.set_exception(error)
    return done


@contextlib.contextmanager
def explain_shutdown() -> Iterator[None]:
    """Raises `EngineError` for what needs a thread that cannot start any more."""
    try:
        yield
    except RuntimeError as error:
        if not _at_shutdown(error):
            raise
        raise EngineError(
            "the main thread has returned, so that no model can be opened any more; open it there, "
            "or let the main thread join the threads that do"
        ) from None


_opened_in: int | None = None  # the process that opened the first model


def note_model_opened() -> None:
    """Records that this process opens a model. Raises as `check_not_forked`."""
    global _opened_in
    if _opened_in is None:
        _opened_in = os.getpid()
    check_not_forked()


def check_not_forked() -> None:
    """Raise `EngineError` in a process that was forked after a model was opened.

    It has neither XLA's threads nor the engine's, so that it would wait for ever.
    """
    if _opened_in is not None and _opened_in != os.getpid():
        raise EngineError(
            "this process was forked from one that had opened a model, whose threads it has not; "
            "start it with multiprocessing.get_context('spawn'), and open the model in it"
        )
