"""Llama 3 tool calls: an answer that is a JSON object, or follows a special token.

{"name": "weather", "parameters": {"city": "Paris"}}
<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}; {"name": …}
"""

from __future__ import annotations

from jinfer.server.tool_parsers.call_format import ToolCallFormat, json_call_rule
from jinfer.server.tool_parsers.incremental_reader import IncrementalReader, Parse
from jinfer.server.tool_parsers.json_calls import Tools, parse_json_call
from jinfer.server.tool_parsers.lark_grammar import LarkGrammar
from jinfer.server.tool_parsers.parsed_deltas import DeltaCollector

TAG = "<|python_tag|>"


def _read(reader: IncrementalReader, out: DeltaCollector, tools: Tools) -> Parse[None]:
    reader.mark()
    marked = False
    while True:
        yield from reader.space()
        marked = marked or (yield from reader.starts(TAG))
        yield from reader.space()
        while (yield from parse_json_call(reader, out, tools, certain=marked)):
            reader.mark()
            yield from reader.space()
            yield from reader.starts(";")
            yield from reader.space()
        out.reject(reader, certain=marked)
        if (yield from reader.until((TAG,), out.content)) is None:
            return
        reader.mark(TAG)
        marked = True


def _grammar(lark: LarkGrammar, tools: Tools, template: str, several: bool) -> str:
    # Llama's templates reject several calls in one turn, so an answer has at most one.
    schemas = lark.arguments(tools).items()
    return lark.one_of(
        "call", (json_call_rule(lark, name, "parameters", args) for name, args in schemas)
    )


LLAMA = ToolCallFormat("llama", (TAG,), _read, _grammar)
