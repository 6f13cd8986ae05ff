"""`jinfer generate` chat: a conversation in the terminal with a model in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence, Sized
from typing import Any

from jinfer.api.llm import LLM
from jinfer.api.user_errors import USER_ERRORS
from jinfer.cli.terminal import chat_loop, show_answer
from jinfer.cli.terminal.show_answer import print_answer, usage_of
from jinfer.cli.terminal.slash_commands import Content, plural
from jinfer.cli.terminal.text_wrap import WrappingWriter
from jinfer.engine.output.completion import Chunk, Usage
from jinfer.engine.requests import RequestError
from jinfer.sampling.sampling_params import SamplingParams, canonical_names
from jinfer.template.chat_prompt import Message

_SHARE = 4  # one part of the context is reserved for an answer


class LocalChat(chat_loop.ChatSession):
    """A conversation with a model in this process.

    Attributes:
        llm: the model.
    """

    caught = USER_ERRORS

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self.llm = llm
        # The end-of-turn token ends an answer, unless the user has set a limit.
        if "max_tokens" not in canonical_names(llm.session.opened.defaults):
            self.sampling["max_tokens"] = None

    def answer(self, message: Content) -> None:
        """Answer a message."""
        params = self.params()
        question: Message = {"role": "user", "content": message}
        room = self.llm.session.capacity
        encode, messages = (
            self.llm.session.encode_conversation,
            [*self.answered_messages(), question],
        )
        prompt, kept = drop_oldest_turns(encode, messages, room, params.max_tokens)
        if dropped := len(self.answered_messages()) + 1 - len(kept):
            print(f"(the {plural(dropped, 'oldest message')} were dropped: the context is full)")
        most = min(params.max_tokens or room, room - len(prompt))
        chunks: list[Chunk] = []
        waited, screen = self.llm.compile_seconds, WrappingWriter()
        with contextlib.closing(self.llm.stream(prompt, params, max_tokens=most)) as stream:
            interrupted = print_answer(stream, chunks, screen, self.llm, len(prompt))
        self.messages = kept
        if not chunks:
            screen.end(chat_loop.UNANSWERED)
            return
        text = "".join(chunk.text for chunk in chunks)
        self.messages = [*kept, {"role": "assistant", "content": text}]
        screen.end(
            chat_loop.STOPPED if interrupted else _mark(chunks, most == params.max_tokens, most)
        )
        usage = usage_of(self.llm, interrupted)
        chat_loop.print_rates(rates(usage, self.llm.compile_seconds - waited))

    def params(self, **changes: Any) -> SamplingParams:
        """The sampling parameters of the next message. Raises `RequestError`."""
        return chat_loop.check_streamable(
            self.llm.session.sampling(None, {**self.sampling, **changes})
        )

    def stats(self) -> list[str]:
        """Token counts of the conversation and of all answers."""
        stats, usage = self.llm.stats(), self.llm.last_usage
        used = usage.prompt_tokens + usage.completion_tokens if self.messages else 0
        capacity = self.llm.session.capacity
        return [
            f"{plural(len(self.messages), 'message')}, {used} of {capacity} tokens",
            f"so far: {stats.prompt_tokens} tokens of prompts, {stats.cached_tokens} of them "
            f"cached, {stats.new_tokens} of answers; {stats.compilations} programs",
        ]


def drop_oldest_turns[P: Sized](
    encode: Callable[[Sequence[Message]], P],
    messages: Sequence[Message],
    room: int,
    max_tokens: int | None,
) -> tuple[P, list[Message]]:
    """The tokens of a conversation and its messages, shortened to leave room for an answer.

    The oldest turns are dropped first, never the system message or the last question. A few more
    than needed are dropped at once, so that the next prompts hit the prefix cache.

    Args:
        room: tokens of the context.
        max_tokens: tokens of the answer.

    Raises:
        RequestError: the last question alone is too long.
    """
    kept = list(messages)
    reserved = min(max_tokens or room, room // _SHARE)
    while len(prompt := encode(kept)) + reserved > room:
        if not chat_loop.drop_oldest_turn(kept):
            break
    if len(prompt) >= room:
        raise RequestError(
            f"the message takes {len(prompt)} of the {room} tokens that there are; shorten it, or "
            "start with a larger --set engine.context"
        )
    return prompt, kept


def rates(usage: Usage, compiled: float) -> str:
    """One line of token counts and rates of a turn."""
    waited = f"compile {compiled:.2f} s | " if compiled > 0.005 else ""
    return f"{waited}{show_answer.rates(usage)}"


def _mark(chunks: Sequence[Chunk], limited: bool, max_tokens: int) -> str:
    """The mark after an answer that a limit cut."""
    if not chunks or chunks[-1].finish_reason != "length":
        return ""
    if limited:
        return f" [cut off: max_tokens is {max_tokens}; /set max_tokens=none for no limit]"
    return " [cut off: the context is full; go on, and old messages will be dropped]"
