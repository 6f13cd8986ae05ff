"""Slash commands of the chat: a table with a function for each."""

from __future__ import annotations

import base64
import json
import mimetypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinfer.api.image_inputs import read_image_file
from jinfer.api.prompt_inputs import parse_messages
from jinfer.engine.requests import RequestError
from jinfer.modelspec.spec_errors import nearest_hint
from jinfer.modelspec.spec_files import parse_override
from jinfer.sampling.sampling_params import SamplingParams, canonical_names
from jinfer.sandbox.safe_files import FileRefusedError, read_regular_file
from jinfer.template.chat_prompt import Message

MAX_BYTES = 16 << 20  # of a saved conversation

type Content = str | list[Message]  # of a message: a text, or parts with images


class Chat(ABC):
    """A conversation and its settings.

    Attributes:
        messages: the conversation; the last one is the user's if Ctrl-C came before its answer.
        images: images for the next message, as parts.
        sampling: sampling parameters that differ from the model's defaults.
        file: the file that it was last saved to or loaded from.
        ended: whether the user has ended the chat.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.images: list[Message] = []
        self.sampling: dict[str, Any] = {}
        self.file: Path | None = None
        self.ended = False

    @abstractmethod
    def answer(self, message: Content) -> None:
        """Answer a message.

        After Ctrl-C the partial answer stays in the conversation; if it is empty, the message stays
        unanswered.
        """

    @abstractmethod
    def params(self, **changes: Any) -> SamplingParams:
        """The sampling parameters of the next message. Raises `RequestError`."""

    @abstractmethod
    def stats(self) -> list[str]:
        """Lines of statistics."""


@dataclass(frozen=True)
class SlashCommand:
    """A slash command.

    Attributes:
        run: receives the chat and the text after the command.
        takes: its argument for the help, in brackets if optional; "": none.
        help: what it does.
    """

    run: Callable[[Chat, str], None]
    takes: str
    help: str


def run_command(chat: Chat, line: str) -> None:
    """Run a line that begins with /. Raises `RequestError`."""
    name, _, rest = line.removeprefix("/").partition(" ")
    rest = rest.strip()
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        listing = nearest_hint(f"/{name}", (f"/{known}" for known in COMMANDS))
        raise RequestError(
            f'there is no /{name}; {listing}; a message that begins with / goes between """'
        )
    if rest and not command.takes:
        raise RequestError(f"/{name} takes nothing")
    if not rest and command.takes and not command.takes.startswith("["):
        raise RequestError(f"/{name} needs {command.takes}")
    command.run(chat, rest)


def _help(chat: Chat, rest: str) -> None:
    for name, command in COMMANDS.items():
        print(f"  {f'/{name} {command.takes}':22} {command.help}")
    print('  a line that ends in \\ goes on in the next one; """ begins and ends several lines')


def _exit(chat: Chat, rest: str) -> None:
    chat.ended = True


def _reset(chat: Chat, rest: str) -> None:
    chat.messages = [m for m in chat.messages[:1] if m["role"] == "system"]
    print("(forgotten, but for the system message)" if chat.messages else "(forgotten)")


def _undo(chat: Chat, rest: str) -> None:
    _remove_last_question(chat)
    left = len(chat.messages)
    print(f"({left} {'message is' if left == 1 else 'messages are'} left)")


def _retry(chat: Chat, rest: str) -> None:
    params, before = chat.params(), chat.messages
    question = _remove_last_question(chat)
    if not params.draws or params.seed is not None:
        print("(the same answer comes again: /set temperature=0.8, or /set seed=none)")
    try:
        chat.answer(question)
    except BaseException:
        chat.messages = before
        raise


def _remove_last_question(chat: Chat) -> Content:
    """Removes and returns the last question, with its answer."""
    for place in reversed(range(len(chat.messages))):
        if chat.messages[place]["role"] == "user":
            question: Content = chat.messages[place]["content"]
            chat.messages = chat.messages[:place]
            return question
    raise RequestError("there is no question yet")


def _system(chat: Chat, text: str) -> None:
    others = [m for m in chat.messages if m["role"] != "system"]
    chat.messages = [*([{"role": "system", "content": text}] if text else []), *others]
    print("(from now on)" if text else "(none but the model's own)")


def _image(chat: Chat, name: str) -> None:
    chat.images.append(image_part(name))
    print(f"({plural(len(chat.images), 'image')} for the next message)")


def image_part(name: str) -> Message:
    """An image file as a part of a message, as requests have it. Raises `RequestError`."""
    data = base64.b64encode(read_image_file(Path(name))).decode()
    kind = mimetypes.guess_type(name)[0] or "image/png"
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def _save(chat: Chat, name: str) -> None:
    path = Path(name).expanduser()
    if path.exists() and path != chat.file:
        raise RequestError(f"{name}: there is such a file; give another name")
    try:
        text = json.dumps(chat.messages, ensure_ascii=False, indent=1)
        path.write_text(text + "\n", encoding="utf-8", errors="replace")
    except OSError as error:
        raise RequestError(f"{name}: {error.strerror}") from None
    chat.file = path
    print(f"({plural(len(chat.messages), 'message')} in {name})")


def _load(chat: Chat, name: str) -> None:
    path = Path(name).expanduser()
    try:
        found = json.loads(read_regular_file(path, MAX_BYTES))
        chat.messages = parse_messages(found if isinstance(found, list) else None)
    except FileRefusedError as error:
        raise RequestError(f"{name}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name}: is no conversation: {error}") from None
    chat.file = path
    print(f"({plural(len(chat.messages), 'message')})")


def plural(number: int, what: str) -> str:
    """`1 message`, `2 messages`."""
    return f"{number} {what}{'s' * (number != 1)}"


def _set(chat: Chat, setting: str) -> None:
    if not setting:
        print(*(f"{k} = {v!r}" for k, v in chat.sampling.items()), sep="\n")
        return
    ((name, value),) = parse_override(setting).items()
    new = canonical_names({name.replace("-", "_"): None if value in ("none", "null") else value})
    chat.params(**new)
    chat.sampling |= new


def _stats(chat: Chat, rest: str) -> None:
    print(*chat.stats(), sep="\n")


COMMANDS: Mapping[str, SlashCommand] = {
    "help": SlashCommand(_help, "", "this list"),
    "exit": SlashCommand(_exit, "", "ends; so do exit, quit and Ctrl-D"),
    "reset": SlashCommand(_reset, "", "forgets the conversation; so does /clear"),
    "retry": SlashCommand(_retry, "", "answers the last message again"),
    "undo": SlashCommand(_undo, "", "takes the last message and its answer back"),
    "system": SlashCommand(
        _system, "[TEXT]", "sets the system message; without TEXT there is none"
    ),
    "image": SlashCommand(_image, "FILE", "adds an image to the next message"),
    "set": SlashCommand(_set, "[KEY=VALUE]", "sets a sampling parameter; alone: shows what is set"),
    "save": SlashCommand(_save, "FILE", "writes the conversation as JSON"),
    "load": SlashCommand(_load, "FILE", "goes on with a conversation from a file"),
    "stats": SlashCommand(_stats, "", "tokens so far"),
}
ALIASES: Mapping[str, str] = {"quit": "exit", "clear": "reset", "?": "help"}
