"""Hermes tool calls (Qwen 2.5, Qwen 3, SmolLM and many others).

<tool_call>
{"name": "weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

from jinfer.server.tool_parsers.call_format import Format, json_object, repeated
from jinfer.server.tool_parsers.incremental_reader import Parse, Reader
from jinfer.server.tool_parsers.json_calls import Tools, json_calls
from jinfer.server.tool_parsers.lark_grammar import Lark, parameters
from jinfer.server.tool_parsers.parsed_deltas import Output

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _read(reader: Reader, out: Output, tools: Tools) -> Parse[None]:
    while (yield from reader.until((OPEN,), out.content)) is not None:
        reader.mark(OPEN)
        yield from reader.space()
        if (yield from json_calls(reader, out, tools)):
            yield from reader.space()
            yield from reader.starts(CLOSE)
        else:
            out.rejected(reader)


def _grammar(lark: Lark, tools: Tools, template: str, several: bool) -> str:
    begin, end = lark.text(f"{OPEN}\n"), lark.text(f"\n{CLOSE}")
    calls = (
        f"{begin} {json_object(lark, name, 'arguments', lark.json(parameters(schema)))} {end}"
        for name, schema in tools.items()
    )
    call = lark.one_of("call", calls)
    return repeated(call, r'"\n"') if several else call


HERMES = Format("hermes", (OPEN, CLOSE), _read, _grammar)
