"""Qwen3-Coder tool calls: arguments in tags, typed by the tool's schema.

<tool_call>
<function=weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

from typing import Any

from jinfer.server.tool_parsers import incremental_json
from jinfer.server.tool_parsers.call_format import ToolCallFormat, repeated
from jinfer.server.tool_parsers.incremental_reader import IncrementalReader, Parse, Sink
from jinfer.server.tool_parsers.json_calls import Tools, is_string_schema, parse_json_calls
from jinfer.server.tool_parsers.lark_grammar import LarkGrammar
from jinfer.server.tool_parsers.parsed_deltas import DeltaCollector
from jinfer.server.tool_parsers.xml_tags import XmlTags, parse_tagged_arguments, tagged_call_rule

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
TAGS = XmlTags(
    call=f"{OPEN}\n{FUNCTION}",
    named=">\n",
    end=f"{FUNCTION_END}\n{CLOSE}",
    parameter=PARAMETER,
    as_text=">\n",
    as_json=">\n",
    line="\n",
    parameter_end=PARAMETER_END,
)
_MARKS = (OPEN, CLOSE, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)


def _read(reader: IncrementalReader, out: DeltaCollector, tools: Tools) -> Parse[None]:
    # The model sometimes omits the outer tag.
    while (mark := (yield from reader.until((OPEN, FUNCTION), out.content))) is not None:
        reader.mark(mark)
        yield from reader.space()
        going = mark == FUNCTION or (yield from reader.starts(FUNCTION))
        if not (yield from (_call if going else parse_json_calls)(reader, out, tools)):
            out.reject(reader)
            continue
        yield from reader.space()
        yield from reader.starts(CLOSE)


def _call(reader: IncrementalReader, out: DeltaCollector, tools: Tools) -> Parse[bool]:
    """Parses a name, and parameters up to the function's end."""
    name = yield from _name(reader)
    if name is None or name not in tools:
        return False
    out.begin_call(name)
    return (yield from parse_tagged_arguments(reader, out, tools[name], FUNCTION_END, _key, _value))


def _key(reader: IncrementalReader) -> Parse[str | None]:
    return (yield from _name(reader)) if (yield from reader.starts(PARAMETER)) else None


def _name(reader: IncrementalReader) -> Parse[str | None]:
    """Parses a name up to the end of its tag."""
    parts: list[str] = []
    if (yield from reader.until((">", "<", "\n"), parts.append, take=False)) != ">":
        return None
    reader.take(1)
    return "".join(parts).strip()


def _value(reader: IncrementalReader, out: DeltaCollector, schema: Any) -> Parse[bool]:
    """Parses a value and its closing tag."""
    parts: list[str] = []
    line = _StripLineBreaks(lambda piece: out.arguments(incremental_json.escape_json(piece)))
    text = is_string_schema(schema)
    if text:
        out.arguments('"')
    sink = line.push if text else parts.append
    if (yield from reader.until((PARAMETER_END,), sink, least=1)) is None:
        return False
    out.arguments('"' if text else incremental_json.value_as_json("".join(parts)))
    return True


class _StripLineBreaks:
    """Strips the line breaks around a value."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._kept = ""
        self._begun = False

    def push(self, text: str) -> None:
        """Adds more text."""
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
        text = self._kept + text
        shown = text.removesuffix("\n")
        self._kept = text[len(shown) :]
        self._sink(shown)


def _grammar(lark: LarkGrammar, tools: Tools, template: str, several: bool) -> str:
    return repeated(tagged_call_rule(lark, tools, TAGS), several, r'"\n"')


QWEN_CODER = ToolCallFormat("qwen_coder", _MARKS, _read, _grammar)
