"""Tag tool-call formats: arguments in tags, typed by the tags or by the tool's schema.

Qwen3-Coder, typed by the schema:
    <tool_call>
    <function=weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>
DSML (DeepSeek V3.2, with full-width bars), whose tags say whether a value is a string or JSON:
    <|DSML|function_calls>
    <|DSML|invoke name="weather">
    <|DSML|parameter name="city" string="true">Paris</|DSML|parameter>
    <|DSML|parameter name="days" string="false">3</|DSML|parameter>
    </|DSML|invoke>
    </|DSML|function_calls>
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from jinfer.server.tool_parsers.call_format import (
    LarkGrammar,
    ToolCallFormat,
    repeated,
    strict_parameters,
)
from jinfer.server.tool_parsers.incremental_reader import (
    IncrementalReader,
    Parse,
    Sink,
    escape_json,
    value_as_json,
)
from jinfer.server.tool_parsers.json_calls import (
    Tools,
    is_string_schema,
    parse_call_list,
    parse_json_calls,
)
from jinfer.server.tool_parsers.output_deltas import DeltaCollector


@dataclass(frozen=True)
class XmlTags:
    """The syntax of a call.

    Attributes:
        call, named: text before and after the tool's name.
        end: text after the last argument.
        parameter: text before an argument's name.
        as_text, as_json: text before a string value, and before a JSON value.
        line: text between a value and its closing tag.
        parameter_end: closing tag of a value; a line break follows.
    """

    call: str
    named: str
    end: str
    parameter: str
    as_text: str
    as_json: str
    line: str
    parameter_end: str


def parse_tagged_arguments(
    reader: IncrementalReader,
    out: DeltaCollector,
    schema: Mapping[str, Any],
    end: str,
    key: Callable[[IncrementalReader], Parse[str | None]],
    value: Callable[[IncrementalReader, DeltaCollector, Any], Parse[bool]],
) -> Parse[bool]:
    """Parse a call's arguments, after its name, up to its end.

    Args:
        schema: JSON schema of the tool's parameters.
        end: text that ends a call.
        key: parses an argument's tag; returns its name, or None if there is none.
        value: parses a value with its schema, writes it as JSON, and parses its closing tag.

    Returns:
        Whether the call is complete. An incomplete call that was not cut is rejected.
    """
    properties = schema.get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    known: set[str] = set()
    while True:
        yield from reader.space()
        if (yield from reader.starts(end)):
            out.arguments("}" if known else "{}")
            out.end_call()
            reader.mark()
            return True
        name = yield from key(reader)
        if name is None or name in known:
            break
        out.arguments(f"{', ' if known else '{'}{json.dumps(name, ensure_ascii=False)}: ")
        known.add(name)
        if not (yield from value(reader, out, schemas.get(name))):
            break
    out.abort_call(reader)
    return False


def tagged_call_rule(lark: LarkGrammar, tools: Tools, tags: XmlTags) -> str:
    """Add the rule of a call to a grammar; return its name."""
    calls = []
    for name, schema in tools.items():
        parameters = strict_parameters(schema)
        shared: dict[str, Any] = {
            key: parameters[key] for key in ("$defs", "definitions") if key in parameters
        }
        parts = []
        for key, value in parameters.get("properties", {}).items():
            part = _parameter(lark, key, value, shared, tags)
            parts.append(part if key in parameters.get("required", ()) else f"({part})?")
        head = lark.text(f"{tags.call}{name}{tags.named}")
        calls.append(" ".join([head, *parts, lark.text(tags.end)]))
    return lark.one_of("call", calls)


def _parameter(
    lark: LarkGrammar, key: str, schema: Any, shared: Mapping[str, Any], tags: XmlTags
) -> str:
    end = f"{tags.line}{tags.parameter_end}\n"
    if not is_string_schema(schema):
        inner = {**schema, **shared} if isinstance(schema, Mapping) else schema
        begin = lark.text(f"{tags.parameter}{key}{tags.as_json}")
        return f"{begin} {lark.json(inner)} {lark.text(end)}"
    begin = lark.text(f"{tags.parameter}{key}{tags.as_text}")
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if values:
        choice = lark.one_of("choice", (lark.text(value) or '""' for value in values))
        return f"{begin} {choice} {lark.text(end)}"
    return f'{begin} {lark.upto(tags.parameter_end)} "\\n"'


QWEN_OPEN, QWEN_CLOSE = "<tool_call>", "</tool_call>"
QWEN_FUNCTION, QWEN_FUNCTION_END = "<function=", "</function>"
QWEN_PARAMETER, QWEN_PARAMETER_END = "<parameter=", "</parameter>"
QWEN_TAGS = XmlTags(
    call=f"{QWEN_OPEN}\n{QWEN_FUNCTION}",
    named=">\n",
    end=f"{QWEN_FUNCTION_END}\n{QWEN_CLOSE}",
    parameter=QWEN_PARAMETER,
    as_text=">\n",
    as_json=">\n",
    line="\n",
    parameter_end=QWEN_PARAMETER_END,
)
_QWEN_MARKS = (
    QWEN_OPEN,
    QWEN_CLOSE,
    QWEN_FUNCTION,
    QWEN_FUNCTION_END,
    QWEN_PARAMETER,
    QWEN_PARAMETER_END,
)


def _read_qwen(reader: IncrementalReader, out: DeltaCollector, tools: Tools) -> Parse[None]:
    # The model sometimes omits the outer tag.
    while (mark := (yield from reader.until((QWEN_OPEN, QWEN_FUNCTION), out.content))) is not None:
        reader.mark(mark)
        yield from reader.space()
        going = mark == QWEN_FUNCTION or (yield from reader.starts(QWEN_FUNCTION))
        if not (yield from (_qwen_call if going else parse_json_calls)(reader, out, tools)):
            out.reject(reader)
            continue
        yield from reader.space()
        yield from reader.starts(QWEN_CLOSE)


def _qwen_call(reader: IncrementalReader, out: DeltaCollector, tools: Tools) -> Parse[bool]:
    """Parse a name, and parameters up to the function's end."""
    name = yield from _qwen_name(reader)
    if name is None or name not in tools:
        return False
    out.begin_call(name)
    return (
        yield from parse_tagged_arguments(
            reader, out, tools[name], QWEN_FUNCTION_END, _qwen_key, _qwen_value
        )
    )


def _qwen_key(reader: IncrementalReader) -> Parse[str | None]:
    return (yield from _qwen_name(reader)) if (yield from reader.starts(QWEN_PARAMETER)) else None


def _qwen_name(reader: IncrementalReader) -> Parse[str | None]:
    """Parse a name up to the end of its tag."""
    parts: list[str] = []
    if (yield from reader.until((">", "<", "\n"), parts.append, take=False)) != ">":
        return None
    reader.take(1)
    return "".join(parts).strip()


def _qwen_value(reader: IncrementalReader, out: DeltaCollector, schema: Any) -> Parse[bool]:
    """Parse a value and its closing tag."""
    parts: list[str] = []
    line = _StripLineBreaks(lambda piece: out.arguments(escape_json(piece)))
    text = is_string_schema(schema)
    if text:
        out.arguments('"')
    sink = line.push if text else parts.append
    if (yield from reader.until((QWEN_PARAMETER_END,), sink, min_overlap=1)) is None:
        return False
    out.arguments('"' if text else value_as_json("".join(parts)))
    return True


class _StripLineBreaks:
    """Strips the line breaks around a value."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._kept = ""
        self._begun = False

    def push(self, text: str) -> None:
        """Add more text."""
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
        text = self._kept + text
        shown = text.removesuffix("\n")
        self._kept = text[len(shown) :]
        self._sink(shown)


def _qwen_grammar(lark: LarkGrammar, tools: Tools, template: str, several: bool) -> str:
    return repeated(tagged_call_rule(lark, tools, QWEN_TAGS), several, r'"\n"')


QWEN_CODER = ToolCallFormat("qwen_coder", _QWEN_MARKS, _read_qwen, _qwen_grammar)


DSML_MARK = "\uff5cDSML\uff5c"
DSML_OPEN, DSML_CLOSE = f"<{DSML_MARK}function_calls>", f"</{DSML_MARK}function_calls>"
DSML_INVOKE, DSML_INVOKE_END = f'<{DSML_MARK}invoke name="', f"</{DSML_MARK}invoke>"
DSML_PARAMETER, DSML_PARAMETER_END = f'<{DSML_MARK}parameter name="', f"</{DSML_MARK}parameter>"
_DSML_TEXT, _DSML_JSON = 'string="true"', 'string="false"'
DSML_TAGS = XmlTags(
    call=DSML_INVOKE,
    named='">\n',
    end=f"{DSML_INVOKE_END}\n",
    parameter=DSML_PARAMETER,
    as_text=f'" {_DSML_TEXT}>',
    as_json=f'" {_DSML_JSON}>',
    line="",
    parameter_end=DSML_PARAMETER_END,
)


def _dsml_call(reader: IncrementalReader, out: DeltaCollector, tools: Tools) -> Parse[bool]:
    """Parse a name, and parameters up to the call's end."""
    name = yield from _dsml_name(reader)
    if name is None or name not in tools or not (yield from reader.starts(">")):
        return False
    out.begin_call(name)
    return (
        yield from parse_tagged_arguments(
            reader, out, tools[name], DSML_INVOKE_END, _dsml_key, _dsml_value
        )
    )


def _dsml_key(reader: IncrementalReader) -> Parse[str | None]:
    return (yield from _dsml_name(reader)) if (yield from reader.starts(DSML_PARAMETER)) else None


def _dsml_name(reader: IncrementalReader) -> Parse[str | None]:
    """Parse a name and the quote after it."""
    parts: list[str] = []
    mark = yield from reader.until(('"', "<", ">", "\n"), parts.append, take=False)
    if mark != '"':
        return None
    reader.take(1)
    return "".join(parts) or None


def _dsml_value(reader: IncrementalReader, out: DeltaCollector, schema: Any) -> Parse[bool]:
    """Parse the rest of a parameter's tag, its value, and the closing tag."""
    yield from reader.space()
    text = yield from reader.starts(_DSML_TEXT)
    if not text and not (yield from reader.starts(_DSML_JSON)):
        text = is_string_schema(schema)
    yield from reader.space()
    if not (yield from reader.starts(">")):
        return False
    parts: list[str] = []
    if text:
        out.arguments('"')

    def escaped(piece: str) -> None:
        out.arguments(escape_json(piece))

    sink = escaped if text else parts.append
    if (yield from reader.until((DSML_PARAMETER_END,), sink, min_overlap=1)) is None:
        return False
    out.arguments('"' if text else value_as_json("".join(parts)))
    return True


def _dsml_grammar(lark: LarkGrammar, tools: Tools, template: str, several: bool) -> str:
    call = tagged_call_rule(lark, tools, DSML_TAGS)
    return f"{lark.text(f'{DSML_OPEN}\n')} {repeated(call, several)} {lark.text(DSML_CLOSE)}"


_read_dsml = partial(parse_call_list, marks=(DSML_OPEN, DSML_INVOKE, DSML_CLOSE), call=_dsml_call)
DSML = ToolCallFormat(
    "dsml",
    (DSML_OPEN, DSML_CLOSE, DSML_INVOKE, DSML_INVOKE_END, DSML_PARAMETER, DSML_PARAMETER_END),
    _read_dsml,
    _dsml_grammar,
)
