"""Hermes tool calls (Qwen 2.5, Qwen 3, SmolLM and many others).

<tool_call>
{"name": "weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

from jinfer.server.tool_parsers.call_format import ToolCallFormat, calls_rule, json_call_rule
from jinfer.server.tool_parsers.incremental_reader import IncrementalReader, Parse
from jinfer.server.tool_parsers.json_calls import Tools, parse_json_calls
from jinfer.server.tool_parsers.lark_grammar import LarkGrammar
from jinfer.server.tool_parsers.parsed_deltas import DeltaCollector

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _read(reader: IncrementalReader, out: DeltaCollector, tools: Tools) -> Parse[None]:
    while (yield from reader.until((OPEN,), out.content)) is not None:
        reader.mark(OPEN)
        yield from reader.space()
        if (yield from parse_json_calls(reader, out, tools)):
            yield from reader.space()
            yield from reader.starts(CLOSE)
        else:
            out.reject(reader)


def _grammar(lark: LarkGrammar, tools: Tools, template: str, several: bool) -> str:
    begin, end = lark.text(f"{OPEN}\n"), lark.text(f"\n{CLOSE}")
    calls = (
        f"{begin} {json_call_rule(lark, name, 'arguments', args)} {end}"
        for name, args in lark.arguments(tools).items()
    )
    return calls_rule(lark, calls, several, r'"\n"')


HERMES = ToolCallFormat("hermes", (OPEN, CLOSE), _read, _grammar)
