"""DSML tool calls (DeepSeek V3.2): tags that say whether a value is a string or JSON.

    <|DSML|function_calls>
    <|DSML|invoke name="weather">
    <|DSML|parameter name="city" string="true">Paris</|DSML|parameter>
    <|DSML|parameter name="days" string="false">3</|DSML|parameter>
    </|DSML|invoke>
    </|DSML|function_calls>

(with full-width bars).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from jinfer.server.tool_parsers import incremental_json
from jinfer.server.tool_parsers.call_format import ToolCallFormat, repeated
from jinfer.server.tool_parsers.incremental_reader import IncrementalReader, Parse
from jinfer.server.tool_parsers.json_calls import Tools, is_string_schema, parse_call_list
from jinfer.server.tool_parsers.lark_grammar import LarkGrammar
from jinfer.server.tool_parsers.parsed_deltas import DeltaCollector
from jinfer.server.tool_parsers.xml_tags import XmlTags, parse_tagged_arguments, tagged_call_rule

MARK = "\uff5cDSML\uff5c"
OPEN, CLOSE = f"<{MARK}function_calls>", f"</{MARK}function_calls>"
INVOKE, INVOKE_END = f'<{MARK}invoke name="', f"</{MARK}invoke>"
PARAMETER, PARAMETER_END = f'<{MARK}parameter name="', f"</{MARK}parameter>"
_TEXT, _OTHER = 'string="true"', 'string="false"'
TAGS = XmlTags(
    call=INVOKE,
    named='">\n',
    end=f"{INVOKE_END}\n",
    parameter=PARAMETER,
    as_text=f'" {_TEXT}>',
    as_json=f'" {_OTHER}>',
    line="",
    parameter_end=PARAMETER_END,
)


def _call(reader: IncrementalReader, out: DeltaCollector, tools: Tools) -> Parse[bool]:
    """Parses a name, and parameters up to the call's end."""
    name = yield from _name(reader)
    if name is None or name not in tools or not (yield from reader.starts(">")):
        return False
    out.begin_call(name)
    return (yield from parse_tagged_arguments(reader, out, tools[name], INVOKE_END, _key, _value))


def _key(reader: IncrementalReader) -> Parse[str | None]:
    return (yield from _name(reader)) if (yield from reader.starts(PARAMETER)) else None


def _name(reader: IncrementalReader) -> Parse[str | None]:
    """Parses a name and the quote after it."""
    parts: list[str] = []
    mark = yield from reader.until(('"', "<", ">", "\n"), parts.append, take=False)
    if mark != '"':
        return None
    reader.take(1)
    return "".join(parts) or None


def _value(reader: IncrementalReader, out: DeltaCollector, schema: Any) -> Parse[bool]:
    """Parses the rest of a parameter's tag, its value, and the closing tag."""
    yield from reader.space()
    text = yield from reader.starts(_TEXT)
    if not text and not (yield from reader.starts(_OTHER)):
        text = is_string_schema(schema)
    yield from reader.space()
    if not (yield from reader.starts(">")):
        return False
    parts: list[str] = []
    if text:
        out.arguments('"')

    def escaped(piece: str) -> None:
        out.arguments(incremental_json.escape_json(piece))

    sink = escaped if text else parts.append
    if (yield from reader.until((PARAMETER_END,), sink, least=1)) is None:
        return False
    out.arguments('"' if text else incremental_json.value_as_json("".join(parts)))
    return True


def _grammar(lark: LarkGrammar, tools: Tools, template: str, several: bool) -> str:
    call = tagged_call_rule(lark, tools, TAGS)
    return f"{lark.text(f'{OPEN}\n')} {repeated(call, several)} {lark.text(CLOSE)}"


_read = partial(parse_call_list, marks=(OPEN, INVOKE, CLOSE), call=_call)
DSML = ToolCallFormat(
    "dsml", (OPEN, CLOSE, INVOKE, INVOKE_END, PARAMETER, PARAMETER_END), _read, _grammar
)
