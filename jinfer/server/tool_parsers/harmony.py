"""Harmony tool calls (gpt-oss): messages in channels; a call is a message to a function.

    <|channel|>analysis<|message|>The user wants the weather.<|end|><|start|>assistant
    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

(without the line break). The prompt ends in `<|start|>assistant`.
"""

from __future__ import annotations

import re

from jinfer.server.tool_parsers.call_format import LarkGrammar, ToolCallFormat
from jinfer.server.tool_parsers.incremental_reader import IncrementalReader, Parse
from jinfer.server.tool_parsers.json_calls import Tools, parse_named_call
from jinfer.server.tool_parsers.output_deltas import DeltaCollector

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
_ENDS = (START, END, CALL, RETURN)
_TO = re.compile(r"\bto=(\S+?)(?=\s|<\||$)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


def _read(reader: IncrementalReader, out: DeltaCollector, tools: Tools) -> Parse[None]:
    has_content = later = False
    headed = True  # the prompt has started a message
    while True:
        reader.mark()
        head = (yield from _head(reader)) if headed else None
        if head is None:
            out.reject(reader, certain=later or not reader.rest())
            mark = yield from reader.until(_ENDS, out.content, take=False)
        else:
            if has_content and _kind(head, tools) == "content":
                out.content("\n\n")
            has_content = has_content or _kind(head, tools) == "content"
            mark = yield from _message(reader, out, head, tools)
        if mark is None:
            return
        later = True
        headed = yield from reader.starts(START)
        if not headed:
            reader.take(len(mark))
            reader.mark()
            yield from reader.space()
            headed = yield from reader.starts(START)


def _head(reader: IncrementalReader) -> Parse[str | None]:
    """Parse a message's header; return None without a message."""
    head: list[str] = []
    yield from reader.space()
    role = yield from reader.starts("assistant")
    yield from reader.space()
    first = yield from reader.char()
    if first not in ("<", "t") or not (role or (yield from _begins(reader))):
        return None
    mark = yield from reader.until((MESSAGE, *_ENDS), head.append, take=False)
    if mark != MESSAGE:
        return None
    reader.take(len(MESSAGE))
    return "".join(head)


def _begins(reader: IncrementalReader) -> Parse[bool]:
    """Return whether a channel or a recipient follows."""
    while True:
        rest = reader.rest()
        if rest.startswith((CHANNEL, MESSAGE, "to=")):
            return True
        if reader.ended or not any(mark.startswith(rest) for mark in (CHANNEL, MESSAGE, "to=")):
            for mark in (CHANNEL, MESSAGE, "to="):  # a partial mark at the end is not shown
                yield from reader.starts(mark)
            return False
        yield


def _kind(head: str, tools: Tools) -> str:
    """Return the kind of a message: "reasoning", "content", a tool's name, or "" for neither."""
    to = _TO.search(head)
    if to is not None:
        name = to[1].removeprefix("functions.")
        return name if name in tools else ""
    channel = _CHANNEL.search(head)
    return "reasoning" if channel is not None and channel[1] == "analysis" else "content"


def _message(
    reader: IncrementalReader, out: DeltaCollector, head: str, tools: Tools
) -> Parse[str | None]:
    """Parse a message; return the mark that ends it."""
    kind = _kind(head, tools)
    if kind == "reasoning":
        mark = yield from reader.until(_ENDS, out.reasoning, take=False)
        out.end_reasoning()
        return mark
    if kind != "content":
        yield from reader.space()
        if kind and (yield from parse_named_call(reader, out, kind, tools)):
            reader.mark()
            yield from reader.space()
        else:
            out.reject(reader)
    return (yield from reader.until(_ENDS, out.content, take=False))


def _grammar(lark: LarkGrammar, tools: Tools, template: str, several: bool) -> str:
    # A turn ends with its call, so there is at most one call.
    calls = (
        lark.text(f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}") + f" {args}"
        for name, args in lark.arguments(tools).items()
    )
    return f"{_thought(lark)}? {lark.one_of('call', calls)}"


def _thought(lark: LarkGrammar) -> str:
    thought = f"{lark.text(f'{CHANNEL}analysis{MESSAGE}')} {lark.upto(END)}"
    return lark.rule("thought", f"{thought} {lark.text(f'{START}assistant')}")


def _answer(lark: LarkGrammar, content: str) -> str:
    return f"{_thought(lark)}? {lark.text(f'{CHANNEL}final{MESSAGE}')} {content}"


HARMONY = ToolCallFormat("harmony", _MARKS, _read, _grammar, answer=_answer)
