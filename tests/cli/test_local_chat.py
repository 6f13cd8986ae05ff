"""The chat: limits, dropped turns, commands, and all of it in a terminal."""

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jinfer import LLM, RequestError
from jinfer.cli.terminal.chat_loop import TypedInput
from jinfer.cli.terminal.local_chat import LocalChat, drop_oldest_turns, rates
from jinfer.cli.terminal.slash_commands import COMMANDS
from jinfer.engine.output.completion import Usage
from tests.cli.terminal import Terminal

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens"
SPEC = ROOT / "specs" / "smollm2_135m_instruct.toml"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    keys: dict[str, Any] = {"engine.context": 256}
    with LLM(SPEC, **keys) as llm:
        yield llm


@pytest.fixture
def chat(llm: LLM) -> LocalChat:
    return LocalChat(llm)


def said(chat: LocalChat) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in chat.messages]


def turn(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def encode(messages: Sequence[Any]) -> list[int]:
    """Ten tokens a message."""
    return [0] * 10 * len(messages)


@pytest.mark.parametrize(
    ("count", "room", "most", "dropped"),
    [
        (5, 1000, None, 0),
        (5, 100, None, 0),
        (7, 80, None, 2),  # 20 of 80 stay free
        (7, 80, 5, 0),
        (9, 80, None, 4),
        (7, 30, 5, 6),
    ],
)
def test_old_turns_are_dropped(count: int, room: int, most: int | None, dropped: int) -> None:
    messages = turn(*(str(i) for i in range(count)))
    ids, kept = drop_oldest_turns(encode, messages, room, most)
    assert kept == messages[dropped:]
    assert len(ids) == 10 * len(kept)
    system = {"role": "system", "content": "Be brief."}
    assert drop_oldest_turns(encode, [system, *messages], room + 10, most)[1][0] == system


def test_a_message_that_is_too_long() -> None:
    with pytest.raises(RequestError, match="takes 10 of the 10 tokens that there are; shorten"):
        drop_oldest_turns(encode, turn("a", "b", "c"), 10, None)


def test_an_answer_goes_to_its_end_or_has_a_mark(
    chat: LocalChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.take(TypedInput("Hello"))
    assert "cut off" not in capsys.readouterr().out
    assert chat.params().max_tokens is None
    chat.take(TypedInput("/set max_tokens=3"))
    chat.take(TypedInput("Tell me about rivers."))
    printed = capsys.readouterr().out
    assert "[cut off: max_tokens is 3; /set max_tokens=none for no limit]" in printed
    chat.take(TypedInput("/set max-tokens=none"))
    chat.take(TypedInput("/set ignore_eos=true"))
    chat.take(TypedInput("Write a very long story about a river, in twenty chapters."))
    assert "[cut off: the context is full" in capsys.readouterr().out
    chat.take(TypedInput("/set ignore_eos=false"))
    chat.take(TypedInput("Go on."))
    assert re.search(r"\(the \d oldest messages were dropped: ", capsys.readouterr().out)
    assert said(chat)[-2] == ("user", "Go on.")


def test_a_limit_of_the_models_own_is_kept() -> None:
    keys: dict[str, Any] = {"generation.max_tokens": 7}
    with LLM(SPEC, **keys) as llm:
        assert LocalChat(llm).params().max_tokens == 7


def test_rates_are_of_one_turn(chat: LocalChat, capsys: pytest.CaptureFixture[str]) -> None:
    assert rates(Usage(40, 11, 0.1, 0.5, 30), 0.0) == (
        "prefill 40 tokens (30 cached), 100/s | decode 11, 20.0/s"
    )
    assert rates(Usage(40, 11, 0.1, 0.5), 1.5).startswith("compile 1.50 s | prefill 40 tokens, ")
    chat.take(TypedInput("/set max_tokens=5"))
    for _ in range(2):
        chat.take(TypedInput("Hello"))
        assert "decode 5, " in capsys.readouterr().err


def test_every_mistake_of_the_user_is_one_line(
    chat: LocalChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.take(TypedInput("/set regex=("))
    chat.take(TypedInput("Hello"))  # a `ConstraintError`
    assert capsys.readouterr().err.startswith("error: regex")


def test_commands(chat: LocalChat, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "c.json"

    def take(line: str) -> str:
        chat.take(TypedInput(line))
        printed = capsys.readouterr()
        return printed.out + printed.err

    take("/set max_tokens=4")
    take("/system Be brief.")
    take("Hello")
    assert [role for role, _ in said(chat)] == ["system", "user", "assistant"]
    before = said(chat)
    assert "the same answer comes again" in take("/retry")
    assert said(chat) == before
    take("Another")
    assert "(3 messages are left)" in take("/undo")
    assert said(chat) == before
    assert "(3 messages in" in take(f"/save {file}")
    assert json.loads(file.read_text())[0] == {"role": "system", "content": "Be brief."}
    assert "3 messages" in take("/stats")
    take("/reset")
    assert said(chat) == before[:1]
    take("/system")
    assert said(chat) == []
    assert "there is no question yet" in take("/undo")
    assert "(3 messages)" in take(f"/load {file}")
    assert said(chat) == before
    assert "(3 messages in" in take(f"/save {file}")  # its own file
    assert "max_tokens = 4" in take("/set")
    assert all(f"/{name}" in take("/help") for name in COMMANDS)
    take("/quit")
    assert chat.ended


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/rset", "there is no /rset; did you mean '/reset'? allowed: /exit, /help"),
        ("/etc/passwd is what?", "there is no /etc/passwd; allowed: /exit, /help"),
        ("/undo 2", "/undo takes nothing"),
        ("/save", "/save needs FILE"),
        ("/save {there}", "{there}: there is such a file; give another name"),
        ("/save {there}/x", "{there}/x: Not a directory"),
        ("/load {nowhere}", "{nowhere}: cannot be read: No such file"),
        ("/load {there}", "{there}: is no conversation: "),
        ("/set top_p=2", "top_p must be a number from 0 to 1, not 2"),
        ("/set topp=1", "there is no parameter 'topp'; did you mean 'top_p'?"),
        ("/set top_p", "--set: top_p: is not key=value"),
        ("/set n=2", "a chat has one answer at a time: no beam search, no n, no best_of"),
        ("/set strategy=beam", "a chat has one answer at a time"),
    ],
)
def test_wrong_commands(
    chat: LocalChat, line: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    there, nowhere = tmp_path / "there", tmp_path / "nowhere"
    there.write_text('[{"role": "user"}]')
    sampling = dict(chat.sampling)
    chat.take(TypedInput(line.format(there=there, nowhere=nowhere)))
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: " + message.format(there=there, nowhere=nowhere))
    assert printed.err.count("\n") == 1
    assert (chat.messages, chat.sampling) == ([], sampling)


def test_a_block_is_no_command(chat: LocalChat) -> None:
    chat.take(TypedInput("/set max_tokens=2"))
    chat.take(TypedInput("/exit", block=True))
    assert not chat.ended
    assert said(chat)[0] == ("user", "/exit")


def interrupted(*_: Any, **__: Any) -> Iterator[Any]:
    """An answer whose first token does not come before Ctrl-C."""
    signal.raise_signal(signal.SIGINT)
    yield from ()


def test_ctrl_c_before_the_first_token_keeps_the_question(
    chat: LocalChat,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    chat.take(TypedInput("/set max_tokens=2"))
    monkeypatch.setattr(chat.llm, "stream", interrupted)
    chat.take(TypedInput("Why?"))
    assert said(chat) == [("user", "Why?")]
    assert "[stopped: /retry asks again" in capsys.readouterr().out
    chat.take(TypedInput(f"/save {tmp_path / 'c.json'}"))
    assert "(1 message in " in capsys.readouterr().out
    chat.take(TypedInput("How?"))  # takes its place
    assert said(chat) == [("user", "How?")]
    monkeypatch.undo()
    chat.take(TypedInput("/retry"))
    assert [role for role, _ in said(chat)] == ["user", "assistant"]
    assert said(chat)[0] == ("user", "How?")


def test_ctrl_c_in_an_answer_leaves_a_mark(
    chat: LocalChat, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = chat.llm.stream

    def late(*given: Any, **more: Any) -> Iterator[Any]:
        """After the first token."""
        pieces = stream(*given, **more)
        yield next(pieces)
        signal.raise_signal(signal.SIGINT)
        yield from pieces

    monkeypatch.setattr(chat.llm, "stream", late)
    chat.take(TypedInput("Tell me about rivers."))
    assert " [stopped]\n" in capsys.readouterr().out
    assert [role for role, _ in said(chat)] == ["user", "assistant"]


@pytest.mark.parametrize("word", ["exit", "quit", "Exit", "/exit", "/quit"])
def test_words_that_end(chat: LocalChat, word: str) -> None:
    chat.take(TypedInput(word))
    assert chat.ended


def test_in_a_terminal(tmp_path: Path) -> None:
    """Several lines, Ctrl-C while typing and while answering, a history for the next run."""
    command = (sys.executable, "-m", "jinfer.generate", str(SPEC), "--chat")
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"}
    environment.pop("JINFER_NO_HISTORY", None)
    terminal = Terminal(*command, env=environment)
    terminal.wait_for("> ")
    terminal.type("half a message")
    terminal.wait_for("half a message")
    for attempt in range(10):  # a signal between two keys waits for the next one
        time.sleep(0.3)
        terminal.program.send_signal(signal.SIGINT)
        with contextlib.suppress(AssertionError):
            terminal.wait_for(r"\(/exit or Ctrl-D ends\)\s+> ", 60 if attempt == 9 else 6)
            break
    else:
        raise AssertionError("Ctrl-C was not heard")
    terminal.type('"""\n')
    terminal.wait_for(r"\.\.\. ")
    terminal.type("Hello\n")
    terminal.wait_for(r"\.\.\. ")
    terminal.type('"""\n')
    terminal.wait_for(r"prefill \d+ tokens.*decode \d+,")
    terminal.wait_for("> ")
    terminal.type("exit\n")
    assert terminal.status() == 0
    assert (tmp_path / "jinfer" / "chat_history").read_text().endswith('Hello\n"""\nexit\n')
    terminal = Terminal(*command, env=environment)
    terminal.wait_for("> ")
    terminal.type("\x10")  # Ctrl-P: the line before
    terminal.wait_for("exit")
    terminal.type("\n")
    assert terminal.status() == 0


@pytest.fixture(scope="module")
def vision() -> Iterator[LLM]:
    with LLM(GOLDENS / "vlm_smolvlm", dtype="float32") as llm:
        yield llm


@pytest.fixture
def images(vision: LLM) -> LocalChat:
    chat = LocalChat(vision)
    chat.sampling |= {"max_tokens": 3, "ignore_eos": True, "temperature": 0}
    return chat


def test_an_image_goes_with_the_next_message(
    images: LocalChat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("img0.png", "img1.png"):
        images.take(TypedInput(f"/image {GOLDENS}/vlm_images/{name}"))
    assert capsys.readouterr().out == (
        "(1 image for the next message)\n(2 images for the next message)\n"
    )
    images.take(TypedInput("Which?"))
    images.take(TypedInput("And now?"))
    first, answer, second, _ = images.messages
    kinds = [part["type"] for part in first["content"]]
    assert kinds == ["image_url", "image_url", "text"]
    assert first["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert second["content"] == "And now?"
    assert images.llm.last_usage.prompt_tokens > 40  # the images are still in the conversation
    # Saved, loaded and answered again.
    images.take(TypedInput(f"/save {tmp_path}/kept.json"))
    before = images.messages
    images.take(TypedInput("/reset"))
    images.take(TypedInput(f"/load {tmp_path}/kept.json"))
    assert images.messages == before
    images.take(TypedInput("/undo"))
    images.take(TypedInput("/retry"))
    assert images.messages == [first, answer]
    assert "error" not in capsys.readouterr().err


def test_images_that_cannot_be_read(
    images: LocalChat, chat: LocalChat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, reason in [("none.png", "cannot be read"), (str(tmp_path), "not a regular file")]:
        images.take(TypedInput(f"/image {name}"))
        assert reason in capsys.readouterr().err
        assert images.images == []
    (tmp_path / "a.png").write_bytes(b"garbage")
    for each, reason in [(images, "is not one of PNG"), (chat, "cannot see images")]:
        each.take(TypedInput(f"/image {tmp_path}/a.png"))
        each.take(TypedInput("What is it?"))
        printed = capsys.readouterr().err
        assert reason in printed
        assert printed.count("\n") == 1
        assert each.messages == []
        assert each.images == []  # so that the chat goes on
