"""`jinfer client` chat: a conversation in the terminal with a server."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinfer.api.prompt_inputs import parse_params
from jinfer.cli.terminal import chat_loop
from jinfer.cli.terminal.http_client import RemoteError, ServerConnection, dicts_in
from jinfer.cli.terminal.slash_commands import Content, plural
from jinfer.cli.terminal.text_wrap import WrappingWriter
from jinfer.engine.requests import RequestError
from jinfer.progress import task
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.template.chat_prompt import Message

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
# Parameters that have other names in the API.
_NAMES = {"include_stop": "include_stop_str_in_output", "skip_special": "skip_special_tokens"}


@dataclass
class RemoteAnswer:
    """An answer that is being received.

    Attributes:
        text: the text so far.
        reason: the finish reason, once there is one.
        usage: token counts from the server; empty if it sends none.
        first_seconds, seconds: seconds to the first piece, and to the end.
        has_reasoning: whether there was reasoning.
        interrupted: whether Ctrl-C stopped it.
    """

    text: str = ""
    reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    first_seconds: float | None = None
    has_reasoning: bool = False
    seconds: float = 0.0
    interrupted: bool = False

    def rates(self) -> str:
        """One line of token counts and rates."""
        parts = []
        if (prompt := self.usage.get("prompt_tokens")) is not None:
            cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            parts.append(f"prompt {prompt} tokens" + (f" ({cached} cached)" if cached else ""))
        if self.first_seconds is not None:
            parts.append(f"first after {self.first_seconds:.2f} s")
            new = self.usage.get("completion_tokens")
            if new and self.seconds > self.first_seconds:
                rate = (new - 1) / (self.seconds - self.first_seconds)
                parts.append(f"answer {new} tokens, {rate:.1f}/s")
        return " | ".join(parts) or f"{self.seconds:.2f} s"


def chat_body(
    messages: Sequence[Message], sampling: Mapping[str, Any], model: str | None
) -> dict[str, Any]:
    """The body of a chat completion request. Raises `RequestError`."""
    named = {} if model is None else {"model": model}
    return {**named, "messages": list(messages), **sampling_fields(sampling)}


def completion_body(text: str, sampling: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The body of a text completion request, without a chat template. Raises `RequestError`."""
    body = {"model": model, "prompt": text, **sampling_fields(sampling)}
    if body.pop("logprobs", None):
        body["logprobs"] = body.pop("top_logprobs")
    return body


def sampling_fields(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters under the API's names, OpenAI's where there is one.

    Raises:
        RequestError: a JSON schema that is not JSON.
    """
    sent: dict[str, Any] = {}
    for name, value in sampling.items():
        if value is not None:
            sent |= _field(name, value)
    return sent


def _field(name: str, value: Any) -> dict[str, Any]:
    match name:
        case "strategy" if value == "greedy":
            return {"temperature": 0}
        case "logprobs":
            return {"logprobs": True, "top_logprobs": value}
        case "logit_bias":
            return {name: {str(id): bias for id, bias in dict(value).items()}}
        case "json_schema":
            return {"response_format": _format(value)}
    return {_NAMES.get(name, name): value}


def _format(schema: Any) -> dict[str, Any]:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise RequestError(f"json_schema: is no JSON: {error}") from None
    if schema is True:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def stream_answer(
    server: ServerConnection,
    body: Mapping[str, Any],
    show: Callable[[str], None],
    think: Callable[[str], None],
) -> RemoteAnswer:
    """Stream an answer. Ctrl-C cancels it, also on the server.

    Args:
        show: prints pieces of the answer.
        think: prints pieces of the reasoning.

    Raises:
        RemoteError: the request failed.
    """
    answer, begun = RemoteAnswer(), time.perf_counter()

    def take(event: Mapping[str, Any]) -> None:
        if isinstance(event.get("usage"), Mapping):
            answer.usage = event["usage"]
        for choice in dicts_in(event.get("choices")):
            answer.reason = choice.get("finish_reason") or answer.reason
            delta = dict(choice.get("delta") or {})
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            text = delta.get("content") or choice.get("text") or ""
            if (thought or text) and answer.first_seconds is None:
                answer.first_seconds = time.perf_counter() - begun
            if thought:
                answer.has_reasoning = True
                think(thought)
            if text:
                if answer.has_reasoning and not answer.text:
                    think("\n")
                answer.text += text
                show(text)

    path = TEXT if "prompt" in body else CHAT
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        with contextlib.closing(server.events(path, streamed)) as events:
            with task(f"waiting for {server.url}"):
                while answer.first_seconds is None and (event := next(events, None)) is not None:
                    take(event)
            for event in events:
                take(event)
    except KeyboardInterrupt:
        answer.interrupted = True
    answer.seconds = time.perf_counter() - begun
    return answer


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

    def answer(self, message: Content) -> None:
        """Answer a message; drop the oldest turns if the context is full."""
        kept: list[Message] = [*self.answered_messages(), {"role": "user", "content": message}]
        dropped, screen = 0, WrappingWriter()
        while True:
            try:
                body = chat_body(kept, self.sampling, self.model)
                self.last = answer = stream_answer(self.server, body, screen, print_reasoning)
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
    """Print a piece of reasoning, distinct from the answer."""
    sys.stderr.write(text)
    sys.stderr.flush()
