"""Reads texts with the formats of calls, whole and in pieces."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from jinfer.server.tool_parsers.call_format import ToolCallFormat
from jinfer.server.tool_parsers.output_deltas import (
    DeltaCollector,
    OutputDelta,
    OutputParser,
    ToolCallDelta,
    ToolCallParser,
)

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
}
TOOLS: dict[str, Any] = {"weather": CITY, "now": {}}


@dataclass
class Read:
    """What an answer was understood as."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    cut: list[tuple[str, str]] = field(default_factory=list)
    void: int = 0


def parser(
    format: ToolCallFormat, tools: Any = TOOLS, most: int | None = None, *, bound: bool = False
) -> OutputParser:
    """A parser whose calls have no names, so that results can be compared."""
    output = DeltaCollector(lambda: "id", most)
    return ToolCallParser(lambda reader, out: format.parse(reader, out, tools), output, bound=bound)


def read(parser: OutputParser, pieces: Iterable[str], *, cut: bool = False) -> Read:
    """What comes of the pieces of a text; checks that calls come as they should."""
    deltas = [*map(parser.push, pieces), parser.finish(cut)]
    return joined(deltas)


def joined(deltas: Sequence[OutputDelta]) -> Read:
    """The whole of some deltas."""
    found = Read()
    calls: dict[int, ToolCallDelta] = {}
    ended: set[int] = set()
    for delta in deltas:
        found.content += delta.content
        found.reasoning += delta.reasoning
        for item in delta.calls:
            assert item.index not in ended
            if item.index not in calls:
                assert item.name is not None
                assert item.id == "id"
                assert item.index == len(calls)
                calls[item.index] = item
            else:
                assert item.name is None
                assert item.id is None
                known = calls[item.index]
                text = known.arguments + item.arguments
                calls[item.index] = ToolCallDelta(item.index, "id", known.name, text, item.end)
            if item.end:
                ended.add(item.index)
    assert ended == set(calls)
    for ends, listed in (("done", found.calls), ("cut", found.cut)):
        own = (call for call in calls.values() if call.end == ends)
        listed += [(item.name or "", item.arguments) for item in own]
    found.void = len(calls) - len(found.calls) - len(found.cut)
    return found


@st.composite
def pieces(draw: st.DrawFn, texts: Sequence[str]) -> tuple[str, list[str]]:
    """A text, and the same cut anywhere."""
    text = draw(st.sampled_from(texts))
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)))
    bounds = [0, *cuts, len(text)]
    return text, [text[a:b] for a, b in pairwise(bounds)]


def mixed(marks: Sequence[str]) -> st.SearchStrategy[str]:
    """Texts of a format's marks and other text, in any order."""
    words = ["weather", "now", '{"name": "now"', '"arguments": ', '{"city": "a"}', "{}", "}", "]"]
    signs = [*"{}[]\",: \n<>|'\\", "é", "name", "nul", "function", "json", "to=functions.now", "-1"]
    return st.lists(st.sampled_from([*marks, *words, *signs]), max_size=25).map("".join)
