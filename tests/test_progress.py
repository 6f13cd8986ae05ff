"""Progress of long tasks on a terminal, in a notebook and in the log."""

import io
import logging
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from tqdm import tqdm

from jinfer import progress


class Screen(io.StringIO):
    """A terminal's side of standard error."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Tasks are shown and logged at once."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "_DELAY", 0.01)
    return monkeypatch


def terminal(patch: pytest.MonkeyPatch) -> Screen:
    """Make standard error a terminal. Not in a fixture: pytest replaces the stream after it."""
    screen = Screen()
    patch.setattr(sys, "stderr", screen)
    return screen


def until(screen: Screen, pattern: str) -> None:
    """Wait until something is on the screen."""
    end = time.monotonic() + 20
    while not re.search(pattern, screen.getvalue()):
        assert time.monotonic() < end, repr(screen.getvalue())
        time.sleep(0.01)


def last_line(screen: Screen) -> str:
    """The text that the cursor's line shows in the end."""
    return screen.getvalue().rpartition("\n")[2].rstrip("\r").rpartition("\r")[2].strip()


def test_task_without_steps_shows_its_time(patch: pytest.MonkeyPatch) -> None:
    screen = terminal(patch)
    with progress.task("compiling for 64 tokens, once"):
        until(screen, r"compiling for 64 tokens, once 00:0\d")
    assert last_line(screen) == ""


def test_steps_have_a_bar(patch: pytest.MonkeyPatch) -> None:
    screen = terminal(patch)
    with progress.task("loading", 4e6, unit="B") as task:
        task.update(1e6)
        until(screen, r"loading: +25%\|.*\| 1.00M/4.00M \[")
        task.say("reading")
        task.total = 2e6
        until(screen, r"reading: +50%\|.*\| 1.00M/2.00M \[")
    with progress.task("quantizing", 250.0, unit="%") as task:
        task.update(100)
        until(screen, r"quantizing 40%\|")
    with progress.task("reading the prompt", 8, unit="token", measure=lambda: 4):
        until(screen, r"reading the prompt: +50%\|.*\| 4/8 \[.* token")
    assert [*progress.track("abc", "reading", unit="file")] == ["a", "b", "c"]
    assert last_line(screen) == ""


def test_nested_tasks_are_both_shown(patch: pytest.MonkeyPatch) -> None:
    screen = terminal(patch)
    with progress.task("opening m"):
        until(screen, "opening m")
        with progress.task("loading"):
            until(screen, "loading")
        screen.truncate(0)
        until(screen, "opening m")
    assert last_line(screen) == ""


def test_no_bar_is_drawn_over_an_unfinished_answer(
    patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = terminal(patch)
    with progress.task("compiling"):
        until(screen, "compiling")
        progress.write("The sky", line_open=True)
        assert last_line(screen) == ""
        size = len(screen.getvalue())
        time.sleep(0.3)
        assert len(screen.getvalue()) == size
        progress.write(" is\n")
        screen.truncate(0)
        until(screen, "compiling")
    assert last_line(screen) == ""
    assert capsys.readouterr().out == "The sky is\n"


def test_task_that_ends_in_an_unfinished_answer_writes_nothing(patch: pytest.MonkeyPatch) -> None:
    screen = terminal(patch)
    try:
        with progress.task("compiling"):
            until(screen, "compiling")
            progress.write("", line_open=True)
            size = len(screen.getvalue())
        assert len(screen.getvalue()) == size
    finally:
        progress.write("")


def test_lines_are_written_above_the_bars(patch: pytest.MonkeyPatch) -> None:
    screen = terminal(patch)
    patch.setattr(logging, "lastResort", None)
    progress.take_warnings()
    with progress.task("loading"):
        until(screen, "loading")
        progress.line("jinfer: a line")
        assert re.search(r"\r *\rjinfer: a line\n", screen.getvalue())
        assert logging.lastResort is not None
        logging.lastResort.handle(logging.makeLogRecord({"msg": "a warning", "levelno": 30}))
        assert "a warning\n" in screen.getvalue()


def test_short_task_is_not_shown(patch: pytest.MonkeyPatch) -> None:
    screen = terminal(patch)
    patch.setattr(progress, "_DELAY", 60.0)
    with progress.task("blinking"):
        time.sleep(0.15)
    assert screen.getvalue() == ""


@pytest.mark.parametrize("why", ["no terminal", "TERM", "shown", "show"])
def test_nothing_is_shown_where_nobody_watches(why: str, patch: pytest.MonkeyPatch) -> None:
    screen = terminal(patch)
    if why == "no terminal":
        patch.setattr(screen, "isatty", lambda: False)
    if why == "TERM":
        patch.setenv("TERM", "dumb")
    if why == "show":
        patch.setattr(progress, "_shown", False)
    with progress.task("working", shown=False if why == "shown" else None):
        time.sleep(0.15)
    assert screen.getvalue() == ""


def test_log_has_begin_and_end(patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jinfer"), progress.task("loading", shown=False):
        end = time.monotonic() + 20
        while not caplog.records:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert [record.getMessage() for record in caplog.records] == ["loading", "loading: done"]
    assert vars(caplog.records[1])["seconds"] >= 0


def test_notebook(patch: pytest.MonkeyPatch) -> None:
    screen = terminal(patch)
    kernel = SimpleNamespace(kernel=None)
    patch.setitem(
        sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel, version_info=(9, 0))
    )
    with progress.task("loading", 10, unit="file") as task:
        task.update(3)
        until(screen, r"loading: +30%")
    with progress.task("compiling"):
        until(screen, r"compiling 00:0")


def test_bars_of_other_programs_stay(patch: pytest.MonkeyPatch) -> None:
    """Such as those of downloads: tqdm gives each bar a line."""
    screen = terminal(patch)
    with tqdm(total=3, desc="download") as bar, progress.task("opening"):
        until(screen, r"\n\r?opening")
        bar.update()
        bar.refresh()
        until(screen, r"download: +33%")


def test_program_that_prints(patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The bar is erased before a printed line, and drawn again."""
    screen = terminal(patch)
    patch.setattr(sys, "stdout", screen)
    with progress.throughout("jinfer bench"):
        until(screen, "jinfer bench")
        print("a row")
        assert re.search(r"\r *\ra row\n", screen.getvalue())
        screen.truncate(0)
        until(screen, "jinfer bench")


def test_no_thread_and_no_bar_is_left(patch: pytest.MonkeyPatch) -> None:
    before = {*threading.enumerate()}
    screen = terminal(patch)
    with progress.task("working"):
        until(screen, "working")
    left = {*threading.enumerate()} - before
    assert not [thread for thread in left if type(thread) is threading.Thread]
    assert progress._bars == {}
