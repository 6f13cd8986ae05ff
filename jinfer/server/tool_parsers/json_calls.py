"""JSON tool calls: objects with a name and arguments, as in most formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jinfer.server.tool_parsers.incremental_reader import (
    IncrementalReader,
    Parse,
    Sink,
    decoded_prefix,
    is_object,
    parse_string,
    parse_value,
)
from jinfer.server.tool_parsers.output_deltas import DeltaCollector

type Tools = Mapping[str, Mapping[str, Any]]  # name -> JSON schema of its parameters

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("id", "type", "index", "tool_call_id")


def is_string_schema(schema: Any) -> bool:
    """Return whether a schema allows only strings, so that a value needs no quotes."""
    if not isinstance(schema, Mapping):
        return False
    values = schema.get("enum") or [schema.get("const")]
    return schema.get("type") == "string" or all(isinstance(value, str) for value in values)


def parse_arguments(reader: IncrementalReader, sink: Sink) -> Parse[bool]:
    """Parse a call's arguments: an object, a string that contains one, or null.

    Returns:
        Whether they are valid.
    """
    first = yield from reader.char()
    if first == "{":
        return (yield from parse_value(reader, sink)) is not None
    if first == '"':
        parts: list[str] = []
        value = yield from parse_string(reader, parts.append)
        if value is None and reader.cut:
            sink(decoded_prefix("".join(parts)))
    else:
        value = "" if (yield from parse_value(reader, lambda _: None)) == "null" else None
    if value is None or (value.strip() and not is_object(value)):
        return False
    sink(value.strip() or "{}")
    return True


def parse_named_call(
    reader: IncrementalReader, out: DeltaCollector, name: str, tools: Tools
) -> Parse[bool]:
    """Parse the arguments of a call to a known tool; return whether it is a call."""
    if name not in tools:
        return False
    out.begin_call(name)
    if (yield from parse_arguments(reader, out.arguments)):
        out.end_call()
        return True
    out.abort_call(reader)
    return False


def parse_json_calls(reader: IncrementalReader, out: DeltaCollector, tools: Tools) -> Parse[bool]:
    """Parse a call or several: objects, or a list. Sets a mark after each.

    Returns:
        Whether all of them were calls.
    """
    listed = yield from reader.starts("[")
    yield from reader.space()
    while True:
        if not (yield from parse_json_call(reader, out, tools)):
            return False
        reader.mark()
        yield from reader.space()
        if listed:
            if (yield from reader.starts("]")):
                return True
            yield from reader.starts(",")
            yield from reader.space()
        if (yield from reader.char()) != "{":
            return True


def parse_call_list(
    reader: IncrementalReader,
    out: DeltaCollector,
    tools: Tools,
    marks: tuple[str, str, str],
    call: Callable[[IncrementalReader, DeltaCollector, Tools], Parse[bool]],
) -> Parse[None]:
    """Parse an answer to its end, with a list of calls in it.

    Args:
        marks: beginning of the list (may be missing), beginning of a call, end of the list.
        call: parses a call after its beginning, and sets a mark after the certain part.
    """
    opens, begins, closes = marks
    while (mark := (yield from reader.until((opens, begins), out.content))) is not None:
        reader.mark(mark)
        yield from reader.space()
        going = mark == begins or (yield from reader.starts(begins))
        if not going:
            out.reject(reader)
            continue
        while going:
            if not (yield from call(reader, out, tools)):
                out.reject(reader)
                break
            yield from reader.space()
            reader.mark()
            going = yield from reader.starts(begins)
        else:
            yield from reader.starts(closes)


def parse_json_call(
    reader: IncrementalReader, out: DeltaCollector, tools: Tools, *, certain: bool = True
) -> Parse[bool]:
    """Parse an object that is a call. Missing text after its arguments is tolerated.

    Args:
        certain: whether it is known to be a call, which may have other members.

    Returns:
        Whether it is a call.
    """
    call = _Call(reader, out, tools, certain)
    if not (yield from reader.starts("{")):
        return False
    while True:
        yield from reader.space()
        if not (yield from call.member()):
            break
        yield from reader.space()
        if not (yield from reader.starts(",")):
            closed = yield from reader.starts("}")
            return call.end(whole=closed or not reader.cut)
    return call.end(whole=False)


class _Call:
    """A call whose object is being parsed."""

    def __init__(
        self, reader: IncrementalReader, out: DeltaCollector, tools: Tools, sure: bool
    ) -> None:
        self._reader, self._out, self._tools, self._sure = reader, out, tools, sure
        self._name: str | None = None
        self._early: list[str] = []  # arguments that came before the name
        self._opened = self._argued = False

    def member(self) -> Parse[bool]:
        """Parse a key and its value."""
        reader = self._reader
        key = yield from parse_string(reader)
        yield from reader.space()
        if key is None or not (yield from reader.starts(":")):
            return False
        yield from reader.space()
        if key in _NAMES and self._name is None:
            parts: list[str] = []
            self._name = yield from parse_string(reader, parts.append)
            if self._name is None and reader.cut:
                begun = decoded_prefix("".join(parts))
                if begun and any(tool.startswith(begun) for tool in self._tools):
                    reader.drop()  # a call to an unknown tool
            return self._name in self._tools
        if key in _ARGUMENTS and not self._argued:
            if self._name is not None:
                self._opened = True
                self._out.begin_call(self._name)
            sink = self._early.append if self._name is None else self._out.arguments
            self._argued = yield from parse_arguments(reader, sink)
            return self._argued
        if not self._sure and key not in _OTHERS:
            return False
        return (yield from parse_value(reader, lambda _: None)) is not None

    def end(self, *, whole: bool) -> bool:
        """End the object, complete or not."""
        if self._opened and not self._argued:
            self._out.abort_call(self._reader)
            return False
        cut = self._reader.cut and not (whole or self._argued)
        if self._name is None or self._name not in self._tools:
            return False
        if not (whole or self._argued or cut):
            return False
        if not self._opened:
            self._out.begin_call(self._name)
            self._out.arguments("".join(self._early) or ("" if cut else "{}"))
        if cut:
            self._out.abort_call(self._reader)
            return False
        self._out.end_call()
        return True
