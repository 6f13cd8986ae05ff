"""Mistral tool calls: a JSON list in older models, names and arguments in newer ones.

[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}]
[TOOL_CALLS]weather[ARGS]{"city": "Paris"}
[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}
"""

from __future__ import annotations

import uuid

from jinfer.server.tool_parsers.call_format import ToolCallFormat, calls_rule, json_call_rule
from jinfer.server.tool_parsers.incremental_reader import IncrementalReader, Parse
from jinfer.server.tool_parsers.json_calls import Tools, parse_json_calls, parse_named_call
from jinfer.server.tool_parsers.lark_grammar import LarkGrammar
from jinfer.server.tool_parsers.parsed_deltas import DeltaCollector

CALLS, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _read(reader: IncrementalReader, out: DeltaCollector, tools: Tools) -> Parse[None]:
    while (yield from reader.until((CALLS,), out.content)) is not None:
        reader.mark(CALLS)
        yield from reader.space()
        listed = (yield from reader.char()) in ("[", "{")
        if not (yield from (parse_json_calls if listed else _named)(reader, out, tools)):
            out.reject(reader)


def _named(reader: IncrementalReader, out: DeltaCollector, tools: Tools) -> Parse[bool]:
    """Parses a name and its arguments."""
    name: list[str] = []
    mark = yield from reader.until((ID, ARGS, CALLS, "{"), name.append, take=False)
    if mark == ID:
        mark = yield from reader.until((ARGS, CALLS, "{"), lambda _: None, take=False)
    if mark in (None, CALLS):
        return False
    yield from reader.starts(ARGS)
    yield from reader.space()
    return (yield from parse_named_call(reader, out, "".join(name).strip(), tools))


def _grammar(lark: LarkGrammar, tools: Tools, template: str, several: bool) -> str:
    schemas = lark.arguments(tools).items()
    if ARGS in template:
        calls = (lark.text(f"{CALLS}{name}{ARGS}") + f" {args}" for name, args in schemas)
        return calls_rule(lark, calls, several)
    calls = (json_call_rule(lark, name, "arguments", args) for name, args in schemas)
    return f'{lark.text(f"{CALLS} [")} {calls_rule(lark, calls, several, '", "')} "]"'


def _new_id() -> str:
    """Mistral's templates reject ids of another length."""
    return uuid.uuid4().hex[:9]


MISTRAL = ToolCallFormat("mistral", (CALLS, ID, ARGS), _read, _grammar, _new_id)
