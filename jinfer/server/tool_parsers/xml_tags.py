"""XML-like tool calls: arguments in tags, typed by the tags or by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jinfer.server.tool_parsers.incremental_reader import IncrementalReader, Parse
from jinfer.server.tool_parsers.json_calls import Tools, is_string_schema
from jinfer.server.tool_parsers.lark_grammar import LarkGrammar, strict_parameters
from jinfer.server.tool_parsers.parsed_deltas import DeltaCollector


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
    """Parses a call's arguments, after its name, up to its end.

    Args:
        schema: JSON schema of the tool's parameters.
        end: text that ends a call.
        key: parses an argument's tag; returns its name, or None if there is none.
        value: parses a value with its schema, writes it as JSON, and parses its closing tag.

    Returns:
        Whether the call is complete. An incomplete one that was not cut is rejected.
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
    """Adds the rule of a call to a grammar; returns its name."""
    calls = []
    for name, schema in tools.items():
        given = strict_parameters(schema)
        shared: dict[str, Any] = {
            key: given[key] for key in ("$defs", "definitions") if key in given
        }
        parts = []
        for key, one in given.get("properties", {}).items():
            part = _parameter(lark, key, one, shared, tags)
            parts.append(part if key in given.get("required", ()) else f"({part})?")
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
