"""What all conversations in a terminal have in common, whoever answers."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from jinfer.cli.terminal import line_input
from jinfer.cli.terminal.slash_commands import ALIASES, COMMANDS, follow
from jinfer.engine.requests import RequestError
from jinfer.modelspec.spec_errors import SpecError
from jinfer.opening.chat_prompt import Message
from jinfer.sampling.sampling_params import SamplingParams

HINT = "/help lists commands, Ctrl-C stops an answer, /exit or Ctrl-D ends"
STOPPED = " [stopped]"
UNANSWERED = "[stopped: /retry asks again, another message takes its place]"
_WORDS = ("exit", "quit")


class Dialogue(ABC):
    """A conversation, and what its user has set.

    Attributes:
        mistakes: errors of an answer or a command, each of them a line, after which it goes on.
        messages: so far; one of the user's is the last where Ctrl-C came before its answer.
        sampling: parameters that differ from the model's.
        file: where it was saved last, or came from.
        ended: whether the user has had enough.
    """

    mistakes: ClassVar[tuple[type[Exception], ...]] = (RequestError, SpecError)

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.sampling: dict[str, Any] = {}
        self.file: Path | None = None
        self.ended = False

    def run(self, first: str | None) -> int:
        """Asks and answers until the user ends it."""
        print(HINT, file=sys.stderr)
        with line_input.history([*COMMANDS, *ALIASES]):
            given = None if first is None else line_input.Typed(first, block=True)
            while not self.ended:
                try:
                    typed, given = given or line_input.read(), None
                    self.take(typed)
                except EOFError:
                    print()
                    break
                except KeyboardInterrupt:
                    print("  (/exit or Ctrl-D ends)")
        return 0

    def take(self, typed: line_input.Typed) -> None:
        """A message or a command; what is wrong with it is one line."""
        text = typed.text if typed.block else typed.text.strip()
        try:
            if not typed.block and text.lower() in _WORDS:
                self.ended = True
            elif not typed.block and text.startswith("/"):
                follow(self, text)
            elif text.strip():
                self.answer(text)
        except self.mistakes as error:
            print(f"error: {error}", file=sys.stderr)

    def said(self) -> list[Message]:
        """The messages, without one that nobody has answered."""
        last = self.messages[-1:]
        unanswered = bool(last) and last[0]["role"] == "user"
        return self.messages[:-1] if unanswered else list(self.messages)

    @abstractmethod
    def answer(self, message: str) -> None:
        """Answers one message.

        What Ctrl-C leaves of an answer stays in the conversation; where that is nothing, the
        message alone.
        """

    @abstractmethod
    def params(self, **changes: Any) -> SamplingParams:
        """What a message is answered with. Raises `RequestError`."""

    @abstractmethod
    def stats(self) -> list[str]:
        """Lines about what was computed so far."""


def count(number: int, what: str) -> str:
    """`1 message`, `2 messages`."""
    return f"{number} {what}{'s' * (number != 1)}"


def say_rates(line: str) -> None:
    """Tells of an answer, less loudly than the answer."""
    dim = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    faint = dim and "NO_COLOR" not in os.environ
    print(f"\x1b[2m{line}\x1b[0m" if faint else line, file=sys.stderr)


def one_at_a_time(params: SamplingParams) -> SamplingParams:
    """Parameters of one answer that is shown while it comes. Raises `RequestError`."""
    if params.strategy == "beam" or max(params.n, params.best_of or 1) > 1:
        raise RequestError("a chat has one answer at a time: no beam search, no n, no best_of")
    return params
