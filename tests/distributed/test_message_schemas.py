"""What processes say has a schema; what has not is a line."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pytest

from jinfer.distributed import process_group as groups
from jinfer.distributed.connection import Link
from jinfer.distributed.message_schemas import Hello, message_kind, read_hello, read_welcome
from jinfer.distributed.process_group import ProcessGroup
from jinfer.distributed.wire_format import FrameError
from jinfer.engine.runner.step_key import StepKey

HELLO = {"process": 1, "processes": 2, "jinfer": "1.0", "jax": "0.12", "at": "10.0.0.2:99"}


def test_first_messages() -> None:
    assert read_hello(HELLO) == Hello(1, 2, "1.0", "0.12", "10.0.0.2:99")
    assert read_hello(asdict(Hello(1, 2, "1.0", "0.12"))).at == ""
    told = {"service": "[::1]:99", "before": {"1": "10.0.0.2:98"}}
    assert read_welcome(told).before == {"1": "10.0.0.2:98"}
    assert read_welcome({"refused": "why"}).refused == "why"


@pytest.mark.parametrize(
    "said",
    [
        {"process": 1},
        {},
        [],
        None,
        "hello",
        {**HELLO, "process": True},
        {**HELLO, "process": "1"},
        {**HELLO, "process": -1},
        {**HELLO, "process": 2},
        {**HELLO, "more": 1},
        {**HELLO, "jax": None},
        {**HELLO, "jax": "\x1b[31m"},
        {**HELLO, "jinfer": "1" * 999},
        {**HELLO, "at": "nowhere"},
        {**HELLO, "at": "host:99999"},
        {**HELLO, "at": 5},
    ],
)
def test_a_hello_that_is_none(said: Any) -> None:
    with pytest.raises(FrameError) as error:
        read_hello(said)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    "told",
    [{}, {"service": 1}, {"service": "a:1", "before": {"x": "a:1"}}, {"before": {"1": "a"}}, [1]],
)
def test_a_welcome_that_is_none(told: Any) -> None:
    with pytest.raises(FrameError):
        read_welcome(told)


def test_messages() -> None:
    shape = asdict(StepKey("decode", tokens=2))
    for message, name in (
        ({"result": "out", "call": 1, "value": None}, "result"),
        ({"end": 0, "reason": ""}, "end"),
        ({"beat": 3}, "beat"),
        ({"value": [1]}, "value"),
        ({"announce": shape}, "announce"),
        ({"call": 1, "shape": shape, "given": [], "drop": []}, "call"),
        ({"reset": "cache"}, "reset"),
        ({"release": True}, "release"),
    ):
        assert message_kind(message) == name
    others: list[Any] = [
        {"announce": {"kind": "decode"}},
        {"announce": []},
        {"call": 1, "shape": shape, "given": []},
        {"end": "0", "reason": ""},
        {"result": "out", "call": 1.0, "value": None},
        {"hello": 1},
        {"beat": 1, "end": 0},
        3,
    ]
    for other in others:
        with pytest.raises(FrameError):
            message_kind(other)


@contextmanager
def linked() -> Iterator[tuple[Link, Link]]:
    """The two ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = Link(socket.create_connection(server.getsockname()))
        other = Link(server.accept()[0])
    yield one, other
    one.close()
    other.close()


def test_a_process_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named after some seconds, and no more once it answers again."""
    monkeypatch.setattr(groups, "_BEAT", 0.05)
    monkeypatch.setattr(groups, "SILENT", 0.3)
    with linked() as (one, other):
        group = ProcessGroup(0, 2, {1: one})
        assert group.complaint() == ""
        until(lambda: "process 1 of 2 at 127.0.0.1" in group.complaint())
        assert "has not answered for" in group.complaint()
        until(lambda: "does not answer" in caplog.text)
        beating = threading.Event()

        def beat() -> None:
            while not beating.wait(0.05):
                other.send({"beat": 1})

        thread = threading.Thread(target=beat)
        thread.start()
        until(lambda: group.complaint() == "")
        until(lambda: "answers again" in caplog.text)
        beating.set()
        thread.join()
        assert other.receive().keys() == {"beat"}  # the other hears of this one as well
        left: list[Any] = []
        monkeypatch.setattr(group, "leave", lambda *how: left.append(how))
        group.is_leaving = True  # it ends, and does not wait for the other
        until(lambda: bool(left))
        group.is_leaving = False
        group.abandon()
    assert left[0][0] == groups.LOST
    assert "does not answer; the job ends without it" in left[0][1]


def test_a_message_that_is_none_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a line, after whoever wants to know has been told."""
    found: list[Any] = []
    monkeypatch.setattr(ProcessGroup, "leave", lambda self, *how: found.append(how))
    with linked() as (one, other):
        ProcessGroup(0, 2, {1: one})
        other.send({"what": 1})
        until(lambda: bool(found))
    ((status, reason),) = found
    assert status == groups.LOST
    assert reason.startswith("process 1 of 2 at 127.0.0.1")
    assert reason.endswith("sent what cannot be read: no message has the keys 'what'; the job ends")


def test_a_failure_that_a_lost_process_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum fails at once where its other end is gone: the line names the lost process."""
    found: list[Any] = []
    monkeypatch.setattr(ProcessGroup, "leave", lambda self, *how: found.append(how))
    with linked() as (one, other):
        group = ProcessGroup(0, 2, {1: one})
        failing = threading.Thread(
            target=group.fail, args=(RuntimeError("reset\nby peer"),), daemon=True
        )
        failing.start()
        other.close()
        until(lambda: bool(found))
        time.sleep(0.1)
    ((_, reason),) = found
    assert reason.endswith("was lost; the job ends")


def until(true: Any) -> None:
    """Waits for something."""
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
