"""Fork guard: refuses to use an engine in a process forked after a model was opened.

Neither XLA's threads nor the engine's exist in such a process, so that it would wait for ever.
"""

from __future__ import annotations

import os

from jinfer.engine.requests import EngineError

_opened_in: int | None = None  # the process that opened the first model


def note_opened() -> None:
    """Records that this process opens a model. Raises as `check`."""
    global _opened_in
    if _opened_in is None:
        _opened_in = os.getpid()
    check()


def check() -> None:
    """Raises `EngineError` in a process that was forked since a model was opened."""
    if _opened_in is not None and _opened_in != os.getpid():
        raise EngineError(
            "this process was forked from one that had opened a model, whose threads it has not; "
            "start it with multiprocessing.get_context('spawn'), and open the model in it"
        )
