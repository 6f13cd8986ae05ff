"""DeepSeek V3.2: tags with a mark of their own, each of which says whether its value is a text.

    <|DSML|function_calls>
    <|DSML|invoke name="weather">
    <|DSML|parameter name="city" string="true">Paris</|DSML|parameter>
    <|DSML|parameter name="days" string="false">3</|DSML|parameter>
    </|DSML|invoke>
    </|DSML|function_calls>

(with wide bars).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinfer.server.tools import json_text
from jinfer.server.tools.calls import Tools, is_text
from jinfer.server.tools.format import Format, repeated
from jinfer.server.tools.lark import Lark, parameters
from jinfer.server.tools.output import Output
from jinfer.server.tools.reader import Reader, Reading

MARK = "\uff5cDSML\uff5c"
OPEN, CLOSE = f"<{MARK}function_calls>", f"</{MARK}function_calls>"
INVOKE, INVOKE_END = f'<{MARK}invoke name="', f"</{MARK}invoke>"
PARAMETER, PARAMETER_END = f'<{MARK}parameter name="', f"</{MARK}parameter>"
_TEXT, _OTHER = 'string="true"', 'string="false"'


def _read(reader: Reader, out: Output, tools: Tools) -> Reading[None]:
    while (mark := (yield from reader.until((OPEN, INVOKE), out.content))) is not None:
        reader.mark(mark)
        yield from reader.space()
        going = mark == INVOKE or (yield from reader.starts(INVOKE))
        if not going:
            out.content(reader.raw())
            continue
        while going:
            if not (yield from _call(reader, out, tools)):
                out.content(reader.raw())
                break
            yield from reader.space()
            reader.mark()
            going = yield from reader.starts(INVOKE)
        else:
            yield from reader.starts(CLOSE)


def _call(reader: Reader, out: Output, tools: Tools) -> Reading[bool]:
    """Reads a name, and parameters up to the call's end."""
    name = yield from _name(reader)
    if name not in tools or not (yield from reader.starts(">")):
        return False
    out.open(name)
    properties = tools[name].get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    known: set[str] = set()
    while True:
        yield from reader.space()
        if (yield from reader.starts(INVOKE_END)):
            out.arguments("}" if known else "{}")
            out.done()
            reader.mark()
            return True
        key = (yield from _name(reader)) if (yield from reader.starts(PARAMETER)) else ""
        if not key or key in known:
            break
        out.arguments(f"{', ' if known else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        known.add(key)
        if not (yield from _value(reader, out, schemas.get(key))):
            break
    out.void()
    return False


def _name(reader: Reader) -> Reading[str]:
    """Reads a name and the quote after it."""
    parts: list[str] = []
    mark = yield from reader.until(('"', "<", ">", "\n"), parts.append, take=False)
    if mark != '"':
        return ""
    reader.take(1)
    return "".join(parts)


def _value(reader: Reader, out: Output, schema: Any) -> Reading[bool]:
    """Reads what is left of a parameter's tag, its value, and the closing tag."""
    yield from reader.space()
    text = yield from reader.starts(_TEXT)
    if not text and not (yield from reader.starts(_OTHER)):
        text = is_text(schema)
    yield from reader.space()
    if not (yield from reader.starts(">")):
        return False
    parts: list[str] = []
    if text:
        out.arguments('"')

    def escaped(piece: str) -> None:
        out.arguments(json_text.escaped(piece))

    if (yield from reader.until((PARAMETER_END,), escaped if text else parts.append)) is None:
        return False
    out.arguments('"' if text else json_text.plain("".join(parts)))
    return True


def _grammar(lark: Lark, tools: Tools, template: str, several: bool) -> str:
    calls = []
    for name, schema in tools.items():
        given = parameters(schema)
        shared: dict[str, Any] = {
            key: given[key] for key in ("$defs", "definitions") if key in given
        }
        parts = []
        for key, one in given.get("properties", {}).items():
            part = f"{lark.text(f'{PARAMETER}{key}" ')} {_rule(lark, one, shared)}"
            parts.append(part if key in given.get("required", ()) else f"({part})?")
        head, tail = lark.text(f'{INVOKE}{name}">\n'), lark.text(f"{INVOKE_END}\n")
        calls.append(" ".join([head, *parts, tail]))
    call = lark.one_of("call", calls)
    inner = repeated(call) if several else call
    return f"{lark.text(f'{OPEN}\n')} {inner} {lark.text(CLOSE)}"


def _rule(lark: Lark, schema: Any, shared: Mapping[str, Any]) -> str:
    """What follows a parameter's name, up to its closing tag."""
    end = lark.text(f"{PARAMETER_END}\n")
    if not is_text(schema):
        inner = {**schema, **shared} if isinstance(schema, Mapping) else schema
        return f"{lark.text(f'{_OTHER}>')} {lark.json(inner)} {end}"
    begin = lark.text(f"{_TEXT}>")
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if values:
        choice = lark.one_of("choice", (lark.text(value) or '""' for value in values))
        return f"{begin} {choice} {end}"
    return f'{begin} {lark.upto(PARAMETER_END)} "\\n"'


DSML = Format("dsml", (OPEN, CLOSE, INVOKE, INVOKE_END, PARAMETER, PARAMETER_END), _read, _grammar)
