"""Chat loop (REPL): what local and remote conversations in a terminal share."""

from __future__ import annotations

import os
import sys
from typing import ClassVar

from jinfer.cli.terminal import line_input
from jinfer.cli.terminal.slash_commands import ALIASES, COMMANDS, Chat, run_command
from jinfer.engine.requests import RequestError
from jinfer.modelspec.spec_errors import SpecError
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.template.chat_prompt import Message

HINT = "/help lists commands, Ctrl-C stops an answer, /exit or Ctrl-D ends"
STOPPED = " [stopped]"
UNANSWERED = "[stopped: /retry asks again, another message takes its place]"
_WORDS = ("exit", "quit")


class ChatSession(Chat):
    """A conversation in a terminal.

    Attributes:
        caught: exceptions that are printed as one line, after which the chat continues.
    """

    caught: ClassVar[tuple[type[Exception], ...]] = (RequestError, SpecError)

    def run(self, first: str | None) -> int:
        """Runs the loop until the user ends it; returns the exit status."""
        print(HINT, file=sys.stderr)
        with line_input.history([*COMMANDS, *ALIASES]):
            given = None if first is None else line_input.TypedInput(first, block=True)
            while not self.ended:
                try:
                    typed, given = given or line_input.read_message(), None
                    self.take(typed)
                except EOFError:
                    print()
                    break
                except KeyboardInterrupt:
                    print("  (/exit or Ctrl-D ends)")
        return 0

    def take(self, typed: line_input.TypedInput) -> None:
        """Handles a message or a command; an error is printed as one line."""
        text = typed.text if typed.block else typed.text.strip()
        try:
            if not typed.block and text.lower() in _WORDS:
                self.ended = True
            elif not typed.block and text.startswith("/"):
                run_command(self, text)
            elif text.strip():
                self.answer(text)
        except self.caught as error:
            print(f"error: {error}", file=sys.stderr)

    def answered_messages(self) -> list[Message]:
        """The messages without a trailing unanswered one."""
        last = self.messages[-1:]
        unanswered = bool(last) and last[0]["role"] == "user"
        return self.messages[:-1] if unanswered else list(self.messages)


def drop_oldest_turn(messages: list[Message]) -> int:
    """Drops the oldest turn, never a system message or the last question; how many messages."""
    first = 1 if messages[0]["role"] == "system" else 0
    later = (i for i, each in enumerate(messages) if i > first and each["role"] == "user")
    end = next(later, first)
    del messages[first:end]
    return end - first


def print_rates(line: str) -> None:
    """Prints a line of statistics, dimmed."""
    dim = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    faint = dim and "NO_COLOR" not in os.environ
    print(f"\x1b[2m{line}\x1b[0m" if faint else line, file=sys.stderr)


def check_streamable(params: SamplingParams) -> SamplingParams:
    """Checks that parameters give a single, streamable answer. Raises `RequestError`."""
    if params.strategy == "beam" or max(params.n, params.best_of or 1) > 1:
        raise RequestError("a chat has one answer at a time: no beam search, no n, no best_of")
    return params
