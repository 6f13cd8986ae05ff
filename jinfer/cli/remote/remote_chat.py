"""`jinfer client` chat: a conversation in the terminal with a server."""

from __future__ import annotations

import sys
from typing import Any

from jinfer.api.prompt_inputs import parse_params
from jinfer.cli.remote.chat_request import RemoteAnswer, chat_body, stream_answer
from jinfer.cli.remote.http_client import RemoteError, ServerConnection
from jinfer.cli.terminal import chat_loop
from jinfer.cli.terminal.slash_commands import plural
from jinfer.cli.terminal.text_wrap import WrappingWriter
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.template.chat_prompt import Message


class RemoteChat(chat_loop.ChatSession):
    """A conversation with a model on a server.

    Attributes:
        server: the server.
        model: the name of the model.
        last: the last answer.
    """

    def __init__(self, server: ServerConnection, model: str) -> None:
        super().__init__()
        self.server, self.model = server, model
        self.last = RemoteAnswer()
        self._asked = self._answered = 0

    def answer(self, message: str) -> None:
        """Answers a message; drops the oldest turns if the context is full."""
        kept: list[Message] = [*self.answered_messages(), {"role": "user", "content": message}]
        dropped, screen = 0, WrappingWriter()
        while True:
            try:
                asked = chat_body(kept, self.sampling, self.model)
                self.last = answer = stream_answer(self.server, asked, screen, print_reasoning)
                break
            except RemoteError as error:
                count = chat_loop.drop_oldest_turn(kept) if error.full else 0
                if not count:
                    raise
                dropped += count
        self.messages = kept
        if answer.interrupted and not answer.text:
            screen.end(chat_loop.UNANSWERED)
            return
        self.messages = [*kept, {"role": "assistant", "content": answer.text}]
        cut = " [cut off: a limit of tokens]" if answer.reason == "length" else ""
        screen.end(chat_loop.STOPPED if answer.interrupted else cut)
        if dropped:
            print(f"(the {plural(dropped, 'oldest message')} were dropped: the context is full)")
        chat_loop.print_rates(answer.rates())
        self._asked += answer.usage.get("prompt_tokens") or 0
        self._answered += answer.usage.get("completion_tokens") or 0

    def params(self, **changes: Any) -> SamplingParams:
        """The sampling parameters, as far as they are known locally. Raises `RequestError`."""
        given = {**self.sampling, **changes}
        usual = {"temperature": 1.0}  # OpenAI's default, if neither the user nor the model sets one
        set_ = {name: value for name, value in given.items() if value is not None}
        return chat_loop.check_streamable(parse_params({}, None, usual | set_))

    def stats(self) -> list[str]:
        """Token counts of all answers."""
        return [
            f"{plural(len(self.messages), 'message')} with {self.model} at {self.server.url}",
            f"so far: {self._asked} tokens of prompts, {self._answered} of answers",
        ]


def print_reasoning(text: str) -> None:
    """Prints a piece of reasoning, distinct from the answer."""
    sys.stderr.write(text)
    sys.stderr.flush()
