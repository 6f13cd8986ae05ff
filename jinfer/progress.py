"""Progress display: a line on a terminal, a bar in a notebook, records in the log.

A task is shown only if it takes a while, and erased when it ends. Of several tasks the newest is
shown. This module is quick to import.
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
from typing import Any, TextIO, cast

_SHOW_SECONDS, _LOG_SECONDS = 0.3, 1.0  # seconds after which a task is shown, and logged
_UPDATE_SECONDS = {"terminal": 0.1, "notebook": 1.0}  # a notebook saves each update
_BAR, _LEAST = 20, 12  # columns of a bar; columns below which nothing is shown
NO_ROOM = sys.maxsize  # cursor column that means: show nothing on this line
_ERASE = "\x1b[K"
_log = logging.getLogger("jinfer.progress")
_lock = threading.RLock()
_tasks: list[Task] = []
_thread: threading.Thread | None = None
_shown: bool | None = None
_column = 0  # the terminal's cursor column, behind an answer that is being written
_drawn = False
_bar: tuple[Task, Any] | None = None  # a notebook's


@dataclass(eq=False)
class Task:
    """A long-running task, which any thread may update; fields as in `task`."""

    what: str
    total: float | None
    unit: str
    shown: bool | None
    level: int
    measure: Callable[[], float] | None = None
    logged: bool = False
    _done: float = 0.0
    begun: float = field(default_factory=time.monotonic)

    @property
    def done(self) -> float:
        """Steps done so far."""
        return self._done if self.measure is None else self.measure()

    def update(self, count: float = 1) -> None:
        """Adds steps done."""
        with _lock:
            self._done += count

    def say(self, what: str) -> None:
        """Changes the description."""
        self.what = what

    @property
    def is_shown(self) -> bool:
        """Whether the task is shown on a terminal or in a notebook."""
        return watched() if self.shown is None else self.shown

    def line(self, columns: int) -> str:
        """The task's line on a terminal, at most so many columns wide."""
        seconds = time.monotonic() - self.begun
        elapsed = f"{seconds:.0f} s"
        if not self.total:
            return f"{self.what} ... {elapsed}"[:columns]
        done = self.done
        share = min(1.0, done / self.total)
        filled = round(share * _BAR)
        if share > 0.02 and seconds > 2:
            elapsed += f", {seconds * (1 - share) / share:.0f} s left"
        words = f"{self.what} {_steps(done, self.total, self.unit)}"
        bar = f" |{'#' * filled}{'-' * (_BAR - filled)}| "
        text = f"{words}{bar}{elapsed}"
        return text if len(text) <= columns else f"{words} {elapsed}"[:columns]


def _steps(done: float, total: float, unit: str) -> str:
    if unit == "%":
        return f"{min(1.0, done / total):.0%}"
    if unit != "B":
        return f"{done:.0f}/{total:.0f}{unit and f' {unit}s'}"
    scale, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    return f"{done / scale:.1f}/{total / scale:.1f} {name}"


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
    """Shows the progress of the body of a `with`, if it takes long.

    Args:
        what: the description, such as "loading".
        total: number of steps, if there are any.
        unit: unit of the steps; "B" for bytes, "%" to show only a percentage.
        shown: whether to show it; None: as `watched` says; False: only in the log.
        level: level of its log records.
        measure: returns the steps done, called when they are shown; None: `Task.update` counts.
    """
    one = Task(what, total, unit, shown, level, measure)
    _begin(one)
    try:
        yield one
    finally:
        _end(one)


def track[T](
    items: Iterable[T],
    what: str,
    *,
    unit: str = "",
    total: int | None = None,
    shown: bool | None = None,
) -> Iterator[T]:
    """Iterates over items with progress, one step per item."""
    count = len(items) if total is None and isinstance(items, Sized) else total
    with task(what, count, unit=unit, shown=shown) as one:
        for item in items:
            yield item
            one.update()


def show(on: bool | None) -> None:
    """Sets whether this process shows progress; None: on a terminal and in a notebook."""
    global _shown
    _shown = on


def watched() -> bool:
    """Whether progress is shown: by default in a notebook, and if standard error is a terminal."""
    return _where() is not None if _shown is None else _shown


def write(text: str, column: int = 0) -> None:
    """Writes a chunk of an answer to standard output; progress may be shown behind it.

    Args:
        column: the terminal's cursor column afterwards.
    """
    global _column
    with _lock:
        _erase()
        sys.stdout.write(text)
        sys.stdout.flush()
        _column = column


def line(text: str) -> None:
    """Writes a line to standard error, erasing shown progress first."""
    with _lock:
        _erase()
        print(text, file=sys.stderr, flush=True)


@contextmanager
def throughout(what: str) -> Iterator[None]:
    """Shows a program's own task while no other is shown; the program may print."""
    with task(what), redirect_stdout(cast("TextIO", _StdoutBesideProgress(sys.stdout))):
        yield


class _StdoutBesideProgress:
    """Standard output on the terminal that progress is shown on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes as a text stream, erasing shown progress first."""
        global _column
        with _lock:
            _erase()
            count = self._stream.write(text)
            if text:
                _column = 0 if text.endswith("\n") else NO_ROOM
            return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _ProgressHandler(logging.Handler):
    """Writes log records to standard error, erasing shown progress first."""

    def emit(self, record: logging.LogRecord) -> None:
        line(self.format(record))


def take_warnings() -> None:
    """Has a command's warnings without another log handler written by `line`."""
    logging.lastResort = cast("Any", _ProgressHandler(logging.WARNING))


def _begin(one: Task) -> None:
    global _thread
    with _lock:
        _tasks.append(one)
        if _thread is None and (one.is_shown or _log.isEnabledFor(one.level)):
            _thread = threading.Thread(target=_watch, name="progress", daemon=True)
            try:
                _thread.start()
            except RuntimeError:  # no more threads: nothing is shown
                _thread = None


def _end(one: Task) -> None:
    with _lock:
        _tasks.remove(one)
        if not _tasks or _bar is not None:
            _erase()
        if one.logged:
            seconds = round(time.monotonic() - one.begun, 1)
            _log.log(one.level, "%s: done", one.what, extra={"seconds": seconds})


def _watch() -> None:
    """The progress thread: shows and logs tasks until there are none."""
    global _thread
    while True:
        where = _where() or "notebook"  # `show(True)` without a terminal: bars
        with _lock:
            if not _tasks:
                _thread = None
                return
            now = time.monotonic()
            for one in _tasks:
                if not one.logged and now - one.begun > _LOG_SECONDS:
                    one.logged = True
                    _log.log(one.level, "%s", one.what)
            shown = [one for one in _tasks if one.is_shown]
            if shown and (_drawn or _bar is not None or now - shown[0].begun > _SHOW_SECONDS):
                (_draw_bar if where == "notebook" else _draw)(shown[-1])
        for _ in range(round(_UPDATE_SECONDS[where] / 0.1)):
            time.sleep(0.1)
            if not _tasks:
                break


def _draw(one: Task) -> None:
    global _drawn
    if _others():
        return
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80  # some say 0
    except (OSError, ValueError, AttributeError):
        columns = 80
    room = columns - _column - 1
    if _column:  # behind the text of an answer, which stays
        text = f"\x1b7{_ERASE} [{one.line(room - 3)}]\x1b8" if room > _LEAST else ""
    else:
        # The cursor returns to the first column, so that other output overwrites the line.
        text = f"\r{one.line(room)}{_ERASE}\r"
    sys.stderr.write(text)
    sys.stderr.flush()
    _drawn = True


def _others() -> bool:
    """Whether a tqdm bar is on the terminal, such as a download's."""
    bars = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    return any(not bar.disable for bar in [*getattr(bars, "_instances", ())])


def _draw_bar(one: Task) -> None:
    global _bar
    if _bar is None or _bar[0] is not one:
        _erase()
        import warnings

        with warnings.catch_warnings(action="ignore"):  # about missing widgets
            from tqdm.auto import tqdm

        form = {} if one.total else {"bar_format": "{desc} {elapsed}"}
        if one.total and one.unit == "%":
            form = {"bar_format": "{desc} {percentage:.0f}%|{bar}| {elapsed}<{remaining}"}
        about = {"desc": one.what, "total": one.total, "unit": one.unit}
        made: Any = tqdm(**about, unit_scale=one.unit == "B", leave=False, **form)
        made.start_t -= time.monotonic() - one.begun
        _bar = one, made
    bar = _bar[1]
    bar.n = one.done
    bar.set_description_str(one.what)


def _erase() -> None:
    global _drawn, _bar
    if _drawn:
        sys.stderr.write(_ERASE if _column else f"\r{_ERASE}")
        sys.stderr.flush()
        _drawn = False
    if _bar is not None:
        _bar[1].close()
        _bar = None


def _where() -> str | None:
    """ "notebook", "terminal", or None: neither."""
    ask = getattr(sys.modules.get("IPython"), "get_ipython", None)
    if ask is not None and hasattr(ask(), "kernel"):
        return "notebook"
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return None
    return "terminal"


def _forked() -> None:
    """Resets the state in a forked child process."""
    global _lock, _thread, _drawn, _bar
    _lock, _thread, _drawn, _bar = threading.RLock(), None, False, None
    _tasks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
