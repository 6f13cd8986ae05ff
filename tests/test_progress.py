"""What takes long says so, on a terminal, in a notebook and in the log, and leaves nothing."""

import io
import logging
import re
import sys
import threading
import time
from types import SimpleNamespace
from typing import TextIO

import pytest
from tqdm import tqdm

from jinfer import progress


class Screen(io.StringIO):
    """A terminal's side of standard error."""

    def isatty(self) -> bool:
        return True


class _System:
    """What `progress` has of `sys`."""

    modules = sys.modules

    def __init__(self, stderr: io.StringIO) -> None:
        self.stderr = stderr

    @property
    def stdout(self) -> TextIO:
        return sys.stdout


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Standard error, which is a terminal; tasks are shown, and logged, at once."""
    made = Screen()
    # Not in `sys` itself, where pytest puts its own before the test begins.
    monkeypatch.setattr(progress, "sys", _System(made))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "_SHOW_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0.0)
    return made


def until(screen: Screen, pattern: str) -> None:
    """Waits until something is on the screen."""
    end = time.monotonic() + 20
    while not re.search(pattern, screen.getvalue()):
        assert time.monotonic() < end, repr(screen.getvalue())
        time.sleep(0.01)


def test_a_line_that_is_erased(screen: Screen) -> None:
    with progress.task("compiling for 64 tokens, once"):
        until(screen, r"\rcompiling for 64 tokens, once \.\.\. 0 s\x1b\[K\r")
    assert screen.getvalue().endswith("\r\x1b[K")


def test_steps_have_a_bar(screen: Screen) -> None:
    with progress.task("loading", 4e6, unit="B") as task:
        task.update(1e6)
        until(screen, r"loading 1\.0/4\.0 MB \|#####-{15}\| 0 s")
    assert [*progress.track("abc", "reading", unit="file")] == ["a", "b", "c"]


def test_the_newest_is_shown_and_then_the_one_around_it(screen: Screen) -> None:
    with progress.task("opening m"):
        with progress.task("loading"):
            until(screen, "loading")
        screen.truncate(0)
        until(screen, "opening m")


def test_a_line_is_as_long_as_there_is_room() -> None:
    task = progress.Task("loading", 10, "file", None, logging.INFO)
    assert task.line(80) == "loading 0/10 files |--------------------| 0 s"
    assert task.line(30) == "loading 0/10 files 0 s"
    assert task.line(9) == "loading 0"


def test_behind_the_beginning_of_an_answer(screen: Screen, capsys: pytest.CaptureFixture) -> None:
    """The answer's line stays as it is."""
    try:
        with progress.task("compiling"):
            progress.write("The sky", 7)
            until(screen, r"\x1b7\x1b\[K \[compiling \.\.\. 0 s\]\x1b8")
            progress.write(" is", 10)
            assert "\r\x1b[K" not in screen.getvalue().rpartition("\x1b8")[2]
    finally:
        progress.write("")
    assert capsys.readouterr().out == "The sky is"


def test_nothing_is_shown_of_what_is_short(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SHOW_SECONDS", 60.0)
    with progress.task("blinking"):
        time.sleep(0.15)
    assert screen.getvalue() == ""


@pytest.mark.parametrize("why", ["no terminal", "TERM", "shown", "show"])
def test_where_nobody_watches(why: str, screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "no terminal":
        monkeypatch.setattr(progress, "sys", _System(io.StringIO()))
    if why == "TERM":
        monkeypatch.setenv("TERM", "dumb")
    if why == "show":
        monkeypatch.setattr(progress, "_shown", False)
    with progress.task("working", shown=False if why == "shown" else None):
        time.sleep(0.15)
    assert screen.getvalue() == ""


def test_the_log(caplog: pytest.LogCaptureFixture, screen: Screen) -> None:
    """Its beginning, and how long it took."""
    with caplog.at_level(logging.INFO, "jinfer"), progress.task("loading", shown=False):
        end = time.monotonic() + 20
        while not caplog.records:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert [record.getMessage() for record in caplog.records] == ["loading", "loading: done"]
    assert vars(caplog.records[1])["seconds"] >= 0


def test_a_notebook(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar of tqdm's, which a notebook shows its own way."""
    monkeypatch.setattr(sys, "stderr", screen)
    kernel = SimpleNamespace(kernel=None)
    monkeypatch.setitem(
        sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel, version_info=(9, 0))
    )
    with progress.task("loading", 10, unit="file") as task:
        task.update(3)
        until(screen, r"loading: +30%")
    with progress.task("compiling"):
        until(screen, r"compiling 00:0")


def test_bars_of_others_are_not_spoilt(screen: Screen) -> None:
    with tqdm(total=3, file=io.StringIO()), progress.task("opening"):
        time.sleep(0.25)
    assert screen.getvalue() == ""


def test_a_program_that_prints(screen: Screen, capsys: pytest.CaptureFixture[str]) -> None:
    """The line goes before what is printed, and comes again."""
    with progress.throughout("jinfer bench"):
        until(screen, "jinfer bench")
        print("a row")
        assert screen.getvalue().endswith("\r\x1b[K")
        screen.truncate(0)
        until(screen, "jinfer bench")
    assert capsys.readouterr().out == "a row\n"


def test_no_thread_is_left(screen: Screen) -> None:
    with progress.task("working"):
        until(screen, "working")
    for thread in threading.enumerate():
        if thread.name == "progress":
            thread.join(10)
    assert progress._thread is None
