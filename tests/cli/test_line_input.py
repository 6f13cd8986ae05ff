"""Messages of several lines, and the history that stays between runs."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from jinfer.cli.terminal import chat_loop
from jinfer.cli.terminal.chat_loop import (
    MAX_BYTES,
    MAX_LINES,
    TypedInput,
    append_history,
    history_file,
    read_message,
)

type Type = Callable[..., None]


@pytest.fixture
def type_(monkeypatch: pytest.MonkeyPatch) -> Type:
    def type_(*typed: str) -> None:
        waiting = iter(typed)

        def answer(prompt: str) -> str:
            line = next(waiting, None)
            if line is None:
                raise EOFError
            return line

        monkeypatch.setattr("builtins.input", answer)

    return type_


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["Hello"], TypedInput("Hello")),
        (["one \\", "two\\", "three"], TypedInput("one \ntwo\nthree")),
        (['"""', "one", "/two", '"""'], TypedInput("one\n/two", block=True)),
        (['"""one', '  two"""'], TypedInput("one\n  two", block=True)),
        (['"""one"""'], TypedInput("one", block=True)),
        (['"""', "", '"""'], TypedInput("", block=True)),
        (['say """ twice'], TypedInput('say """ twice')),
    ],
)
def test_messages(type_: Type, typed: list[str], expected: TypedInput) -> None:
    type_(*typed)
    assert read_message() == expected


def test_the_end_within_a_message(type_: Type) -> None:
    type_('"""', "one")
    with pytest.raises(EOFError):
        read_message()


def test_where_the_history_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(chat_loop.NO_HISTORY, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_file() == tmp_path / "jinfer" / "chat_history"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert history_file() == tmp_path / ".local" / "state" / "jinfer" / "chat_history"
    monkeypatch.setenv(chat_loop.NO_HISTORY, "1")
    assert history_file() is None


def test_a_history_is_bounded_and_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "jinfer" / "chat_history"
    before = os.umask(0o022)
    try:
        append_history(path, ["first", "a\nb"])
        append_history(path, ["second"])
    finally:
        os.umask(before)
    assert path.read_text() == "first\na b\nsecond\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    append_history(path, [str(i) for i in range(2 * MAX_LINES)])
    assert path.read_text().splitlines() == [str(i) for i in range(MAX_LINES, 2 * MAX_LINES)]
    append_history(path, ["x" * (MAX_BYTES // 4)] * 9)
    assert path.stat().st_size <= MAX_BYTES
    assert [p.name for p in path.parent.iterdir()] == ["chat_history"]


def test_a_history_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "jinfer").write_text("a file where the folder would be")
    append_history(tmp_path / "jinfer" / "chat_history", ["line"])
    printed = capsys.readouterr().err
    assert printed.startswith("the history is not kept: ")
    assert printed.count("\n") == 1


def test_tab_completes_commands() -> None:
    known = ("reset", "retry", "save")
    assert [chat_loop.completion("/re", n, known) for n in range(3)] == ["/reset", "/retry", None]
    assert chat_loop.completion("re", 0, known) is None
