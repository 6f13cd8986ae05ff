"""Progress display: tqdm's bars on a terminal and in notebooks, records in the log.

A task is shown only if it takes a while, and its bar disappears when it ends. tqdm is imported when
the first bar is drawn, so this module is quick to import.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any, cast

_DELAY = 1.0  # seconds after which a task is shown and logged
_UPDATE_SECONDS = {"terminal": 0.1, "notebook": 1.0}  # a notebook saves each update
_log = logging.getLogger("jinfer.progress")
_lock = threading.RLock()
_bars: dict[int, Any] = {}  # tqdm's bar of each shown task, by the task's id
_shown: bool | None = None
_line_open = False  # whether a line of an answer is unfinished; no bar is drawn over it


@dataclass(eq=False)
class Task:
    """A long-running task, which any thread may update; fields as in `task`."""

    what: str
    total: float | None
    unit: str
    measure: Callable[[], float] | None = None
    begun: float = field(default_factory=time.monotonic)
    _done: float = 0.0

    @property
    def done(self) -> float:
        """Steps done so far."""
        return self._done if self.measure is None else self.measure()

    def update(self, count: float = 1) -> None:
        """Add steps done."""
        with _lock:
            self._done += count

    def say(self, what: str) -> None:
        """Change the description."""
        self.what = what


@contextmanager
def task(
    what: str,
    total: float | None = None,
    *,
    unit: str = "",
    shown: bool | None = None,
    level: int = logging.INFO,
    measure: Callable[[], float] | None = None,
) -> Iterator[Task]:
    """Show the progress of the body of a `with`, if it takes long.

    Args:
        what: the description, such as "loading".
        total: number of steps, if there are any.
        unit: unit of the steps; "B" for bytes, "%" to show only a percentage.
        shown: whether to show it; None: as `watched` says; False: only in the log.
        level: level of its log records.
        measure: returns the steps done, called when they are shown; None: `Task.update` counts.
    """
    current = Task(what, total, unit, measure)
    visible = watched() if shown is None else shown
    ended = threading.Event()
    thread = threading.Thread(target=_report, args=(current, visible, level, ended), daemon=True)
    started = visible or _log.isEnabledFor(level)
    try:
        if started:
            thread.start()
    except RuntimeError:  # no more threads: nothing is shown
        started = False
    try:
        yield current
    finally:
        ended.set()
        if started:
            thread.join()


def track[T](
    items: Iterable[T],
    what: str,
    *,
    unit: str = "",
    total: int | None = None,
    shown: bool | None = None,
) -> Iterator[T]:
    """Iterate over items with progress, one step per item."""
    count = len(items) if total is None and isinstance(items, Sized) else total
    with task(what, count, unit=unit, shown=shown) as current:
        for item in items:
            yield item
            current.update()


def show(on: bool | None) -> None:
    """Set whether this process shows progress; None: on a terminal and in a notebook."""
    global _shown
    _shown = on


def watched() -> bool:
    """Whether progress is shown: by default in a notebook, and if standard error is a terminal."""
    return _where() is not None if _shown is None else _shown


def write(text: str, *, line_open: bool = False) -> None:
    """Write a piece of an answer to standard output, without bars on the same line.

    Args:
        line_open: the answer goes on in this line.
    """
    global _line_open
    with _lock:
        _close_bars()
        sys.stdout.write(text)
        sys.stdout.flush()
        _line_open = line_open


def line(text: str) -> None:
    """Write a line to standard error, above the bars."""
    with _lock:
        _close_bars()  # the next update draws them again
        print(text, file=sys.stderr, flush=True)


@contextmanager
def throughout(what: str) -> Iterator[None]:
    """Show a program's own task, which may print lines."""
    if not watched():
        yield
        return
    from tqdm.contrib import DummyTqdmFile

    with task(what), redirect_stdout(cast("Any", DummyTqdmFile(sys.stdout))):
        yield


class _ProgressHandler(logging.Handler):
    """Writes log records to standard error, above the bars."""

    def emit(self, record: logging.LogRecord) -> None:
        line(self.format(record))


def take_warnings() -> None:
    """Write warnings of a command, where no other log handler does, by `line`."""
    logging.lastResort = cast("Any", _ProgressHandler(logging.WARNING))


def _report(task: Task, visible: bool, level: int, ended: threading.Event) -> None:
    """Draw and log a task until it has ended; runs in a thread of its own."""
    if ended.wait(_DELAY):
        return
    _log.log(level, "%s", task.what)
    while True:
        with _lock:
            if visible and not _line_open:
                _draw(task)
        if ended.wait(_UPDATE_SECONDS[_where() or "notebook"]):
            break
    with _lock:
        if (bar := _bars.pop(id(task), None)) is not None:
            bar.close()
    seconds = round(time.monotonic() - task.begun, 1)
    _log.log(level, "%s: done", task.what, extra={"seconds": seconds})


def _draw(task: Task) -> None:
    if (bar := _bars.get(id(task))) is None:
        bar = _bars[id(task)] = _new_bar(task)
    bar.total, bar.n, bar.bar_format = task.total, task.done, _format(task)
    bar.set_description_str(task.what, refresh=False)
    bar.refresh()


def _format(task: Task) -> str | None:
    if not task.total:
        return "{desc} {elapsed}"
    return "{desc} {percentage:.0f}%|{bar}| {elapsed}<{remaining}" if task.unit == "%" else None


def _new_bar(task: Task) -> Any:
    import warnings

    with warnings.catch_warnings(action="ignore"):  # about missing widgets
        from tqdm.auto import tqdm

    bar: Any = tqdm(
        desc=task.what,
        total=task.total,
        unit=task.unit if task.unit == "B" else f" {task.unit}",
        unit_scale=task.unit == "B",
        bar_format=_format(task),
        leave=False,
        dynamic_ncols=True,
    )
    bar.start_t -= time.monotonic() - task.begun
    return bar


def _close_bars() -> None:
    while _bars:
        _bars.popitem()[1].close()


def _where() -> str | None:
    """ "notebook", "terminal", or None: neither."""
    ask = getattr(sys.modules.get("IPython"), "get_ipython", None)
    if ask is not None and hasattr(ask(), "kernel"):
        return "notebook"
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return None
    return "terminal"
