"""A conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinfer.engine.generation import Chunk, Usage
from jinfer.engine.requests import RequestError
from jinfer.errors import USER_ERRORS
from jinfer.llm import LLM
from jinfer.opening.conversation import Message
from jinfer.sampling.names import own_names
from jinfer.sampling.params import SamplingParams
from jinfer.terminal import lines
from jinfer.terminal.answer import print_answer, show, usage_of
from jinfer.terminal.commands import follow

HINT = "/help lists commands, Ctrl-C stops an answer, /exit or Ctrl-D ends"
_WORDS = ("exit", "quit")
_SHARE = 4  # of the context, one part stays free for an answer


class Chat:
    """A conversation, and what its user has set.

    Attributes:
        llm: who answers.
        messages: so far.
        sampling: parameters that differ from the model's.
        file: where it was saved last, or came from.
        ended: whether the user has had enough.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.messages: list[Message] = []
        # An answer ends where the model ends it, unless somebody set a limit.
        limited = "max_tokens" in own_names(llm.frontend.opened.defaults)
        self.sampling: dict[str, Any] = {} if limited else {"max_tokens": None}
        self.file: Path | None = None
        self.ended = False

    def run(self, first: str | None) -> int:
        """Asks and answers until the user ends it."""
        print(HINT, file=sys.stderr)
        with lines.history():
            given = None if first is None else lines.Typed(first, block=True)
            while not self.ended:
                try:
                    typed, given = given or lines.read(), None
                    self.take(typed)
                except EOFError:
                    print()
                    break
                except KeyboardInterrupt:
                    print("  (/exit or Ctrl-D ends)")
        return 0

    def take(self, typed: lines.Typed) -> None:
        """A message or a command; what is wrong with it is one line."""
        text = typed.text if typed.block else typed.text.strip()
        try:
            if not typed.block and text.lower() in _WORDS:
                self.ended = True
            elif not typed.block and text.startswith("/"):
                follow(self, text)
            elif text.strip():
                self.answer(text)
        except USER_ERRORS as error:
            print(f"error: {error}", file=sys.stderr)

    def answer(self, message: str) -> None:
        """Answers one message; what Ctrl-C leaves of an answer stays in the conversation."""
        params = self.params()
        asked: Message = {"role": "user", "content": message}
        room = self.llm.frontend.room
        ids, kept = fitted(self.llm.encode_chat, [*self.messages, asked], room, params.max_tokens)
        if dropped := len(self.messages) + 1 - len(kept):
            print(f"(the {dropped} oldest messages were dropped: the context is full)")
        most = min(params.max_tokens or room, room - len(ids))
        chunks: list[Chunk] = []
        waited = self.llm.compile_seconds
        with contextlib.closing(self.llm.stream(ids, params, max_tokens=most)) as stream:
            interrupted = print_answer(stream, chunks, show, self.llm)
        text = "".join(chunk.text for chunk in chunks)
        self.messages = [*kept, {"role": "assistant", "content": text}]
        print(_mark(chunks, most == params.max_tokens, most))
        usage = usage_of(self.llm, interrupted)
        print(rates(usage, self.llm.compile_seconds - waited), file=sys.stderr)

    def params(self, **changes: Any) -> SamplingParams:
        """What a message is answered with. Raises `RequestError`."""
        params = self.llm.frontend.sampling(None, {**self.sampling, **changes})
        if params.strategy == "beam" or max(params.n, params.best_of or 1) > 1:
            raise RequestError("a chat has one answer at a time: no beam search, no n, no best_of")
        return params


def fitted(
    encode: Callable[[Sequence[Message]], list[int]],
    messages: Sequence[Message],
    room: int,
    most: int | None,
) -> tuple[list[int], list[Message]]:
    """The tokens of a conversation, and what of it was kept so that an answer finds room.

    The oldest turns go first, never the system message or the last question. Some more of them than
    needed go at once, so that the next questions find their beginnings in the cache.

    Args:
        room: tokens of a sequence.
        most: tokens of the answer.

    Raises:
        RequestError: the last question alone is too long.
    """
    kept = list(messages)
    wanted = min(most or room, room // _SHARE)
    first = 1 if kept[0]["role"] == "system" else 0
    while len(ids := encode(kept)) + wanted > room:
        turns = [i for i, m in enumerate(kept) if i > first and m["role"] == "user"]
        if not turns:
            break
        del kept[first : turns[0]]
    if len(ids) >= room:
        raise RequestError(
            f"the message takes {len(ids)} of the {room} tokens that there are; shorten it, or "
            "start with a larger --set engine.context"
        )
    return ids, kept


def rates(usage: Usage, compiled: float) -> str:
    """One line on one turn: tokens, and how many of them per second."""
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    waited = f"compile {compiled:.2f} s | " if compiled > 0.005 else ""
    return (
        f"{waited}prefill {usage.prompt_tokens} tokens{cached}, {usage.prefill_rate:.1f} tokens/s"
        f" | decode {usage.completion_tokens} tokens, {usage.decode_rate:.1f} tokens/s"
    )


def _mark(chunks: Sequence[Chunk], asked: bool, most: int) -> str:
    """What follows an answer: a word where a limit cut it."""
    if not chunks or chunks[-1].finish_reason != "length":
        return ""
    if asked:
        return f" [cut off: max_tokens is {most}; /set max_tokens=none for no limit]"
    return " [cut off: the context is full; go on, and old messages will be dropped]"
