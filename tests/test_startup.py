"""Ctrl-C while modules are imported, where Python would drop what it raises."""

import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jinfer import startup
from jinfer.startup import at_usual_priority, interrupts_deferred, interrupts_raised, lower_priority


class Watched:
    """What a weak reference can be made of."""


def press(_: Any) -> None:
    """A weak reference's callback, in which Ctrl-C is pressed."""
    signal.raise_signal(signal.SIGINT)


def drop(action: Callable[[Any], None]) -> None:
    """What is given to a weak reference as its callback is called; Python drops what it raises."""
    watched = Watched()
    reference = weakref.ref(watched, action)
    del watched
    assert reference() is None


@interrupts_raised()
def pressed_in_a_callback() -> None:
    drop(press)


@interrupts_raised()
def pressed_where_all_is_caught() -> None:
    with contextlib.suppress(BaseException):
        press(None)


def test_ctrl_c_in_a_callback_ends_what_was_done_and_prints_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt):
        pressed_in_a_callback()
    assert capsys.readouterr().err == ""
    assert sys.unraisablehook is shown
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_is_raised_even_where_all_exceptions_are_caught() -> None:
    with pytest.raises(KeyboardInterrupt):
        pressed_where_all_is_caught()


@interrupts_raised()
def pressed_where_it_becomes_another_exception() -> None:
    try:
        press(None)
    except KeyboardInterrupt:
        raise ImportError("could not be initialized") from None


@interrupts_raised()
def pressed_in_a_callback_of_what_takes_long() -> None:
    drop(press)
    time.sleep(60)
    pytest.fail("nobody heard it")


@pytest.mark.parametrize(
    "pressed",
    [pressed_where_it_becomes_another_exception, pressed_in_a_callback_of_what_takes_long],
)
def test_ctrl_c_is_raised_at_once(pressed: Callable[[], None]) -> None:
    with pytest.raises(KeyboardInterrupt):
        pressed()


def test_other_errors_are_raised_unchanged() -> None:
    with pytest.raises(ImportError, match="elsewhere"), interrupts_raised():
        raise ImportError("elsewhere")


@pytest.mark.parametrize("inside", [interrupts_deferred, interrupts_raised])
@pytest.mark.parametrize("fails", [False, True])
def test_deferred_ctrl_c(inside: Callable[[], Any], fails: bool) -> None:
    """Also inside of what hears it, and where something fails meanwhile."""
    seen = []

    def work() -> None:
        with inside(), interrupts_deferred():
            press(None)
            seen.append("the rest")
            if fails:
                raise ValueError

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["the rest"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_errors_in_a_callback_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise ValueError("elsewhere")

    seen: list[type] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: seen.append(what.exc_type))
    with interrupts_raised():
        drop(fail)
    assert seen == [ValueError]


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities")


def nice() -> int:
    """Of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_permanent_threads_have_normal_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_starter", None)
    usual, found = nice(), list[int]()

    def started() -> int:
        thread = threading.Thread(target=lambda: found.append(nice()))
        thread.start()
        thread.join()
        return found.pop()

    assert at_usual_priority(started) == usual
    with ThreadPoolExecutor(1, initializer=lower_priority) as pool:
        lower = pool.submit(nice).result()
        assert lower == min(usual + 7, 19)
        assert pool.submit(started).result() == lower
        assert pool.submit(at_usual_priority, started).result() == usual
        with pytest.raises(ZeroDivisionError):
            pool.submit(at_usual_priority, lambda: 1 // 0).result()
    assert nice() == usual
    assert startup._starter is not None
    startup._starter.shutdown()
