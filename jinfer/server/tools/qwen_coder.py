"""Qwen3-Coder: arguments in tags, whose types the tool's schema tells.

<tool_call>
<function=weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinfer.server.tools import json_text
from jinfer.server.tools.calls import Tools, is_text, json_calls
from jinfer.server.tools.format import Format, repeated
from jinfer.server.tools.lark import Lark, parameters
from jinfer.server.tools.output import Output
from jinfer.server.tools.reader import Reader, Reading, Sink

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_MARKS = (OPEN, CLOSE, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)


def _read(reader: Reader, out: Output, tools: Tools) -> Reading[None]:
    # It forgets the outer tag now and then.
    while (mark := (yield from reader.until((OPEN, FUNCTION), out.content))) is not None:
        reader.mark(mark)
        yield from reader.space()
        going = mark == FUNCTION or (yield from reader.starts(FUNCTION))
        if not (yield from (_call if going else json_calls)(reader, out, tools)):
            out.content(reader.raw())
            continue
        yield from reader.space()
        yield from reader.starts(CLOSE)


def _call(reader: Reader, out: Output, tools: Tools) -> Reading[bool]:
    """Reads a name, and parameters up to the function's end."""
    name = yield from _name(reader)
    if name is None or name not in tools:
        return False
    out.open(name)
    properties = tools[name].get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    known: set[str] = set()
    while True:
        yield from reader.space()
        if (yield from reader.starts(FUNCTION_END)):
            out.arguments("}" if known else "{}")
            out.done()
            reader.mark()
            return True
        key = (yield from _name(reader)) if (yield from reader.starts(PARAMETER)) else None
        if key is None or key in known:
            break
        out.arguments(f"{', ' if known else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        known.add(key)
        if not (yield from _value(reader, out, is_text(schemas.get(key)))):
            break
    out.void()
    return False


def _name(reader: Reader) -> Reading[str | None]:
    """Reads a name up to the end of its tag."""
    parts: list[str] = []
    if (yield from reader.until((">", "<", "\n"), parts.append, take=False)) != ">":
        return None
    reader.take(1)
    return "".join(parts).strip()


def _value(reader: Reader, out: Output, is_text: bool) -> Reading[bool]:
    """Reads a value and its closing tag."""
    parts: list[str] = []
    text = _Line(lambda piece: out.arguments(json_text.escaped(piece)))
    if is_text:
        out.arguments('"')
    sink = text.push if is_text else parts.append
    if (yield from reader.until((PARAMETER_END,), sink)) is None:
        return False
    out.arguments('"' if is_text else json_text.plain("".join(parts)))
    return True


class _Line:
    """A text less the line break before it, and that after it."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._kept = ""
        self._begun = False

    def push(self, text: str) -> None:
        """More of it."""
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
        text = self._kept + text
        shown = text.removesuffix("\n")
        self._kept = text[len(shown) :]
        self._sink(shown)


def _grammar(lark: Lark, tools: Tools, template: str, several: bool) -> str:
    calls = []
    for name, schema in tools.items():
        given = parameters(schema)
        shared: dict[str, Any] = {
            key: given[key] for key in ("$defs", "definitions") if key in given
        }
        required = given.get("required", ())
        parts = []
        for key, one in given.get("properties", {}).items():
            value = _rule(lark, one, shared)
            part = f"{lark.text(f'{PARAMETER}{key}>\n')} {value}"
            parts.append(part if key in required else f"({part})?")
        head, tail = (
            lark.text(f"{OPEN}\n{FUNCTION}{name}>\n"),
            lark.text(f"{FUNCTION_END}\n{CLOSE}"),
        )
        calls.append(" ".join([head, *parts, tail]))
    call = lark.one_of("call", calls)
    return repeated(call, r'"\n"') if several else call


def _rule(lark: Lark, schema: Any, shared: Mapping[str, Any]) -> str:
    """A value and its closing tag."""
    end = f"\n{PARAMETER_END}\n"
    if not is_text(schema):
        inner = {**schema, **shared} if isinstance(schema, Mapping) else schema
        return f"{lark.json(inner)} {lark.text(end)}"
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if values:
        choice = lark.one_of("choice", (lark.text(value) or '""' for value in values))
        return f"{choice} {lark.text(end)}"
    return f'{lark.upto(end.strip())} "\\n"'


QWEN_CODER = Format("qwen_coder", _MARKS, _read, _grammar)
