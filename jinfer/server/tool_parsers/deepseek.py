"""DeepSeek tool calls (V3, R1 and V3.1), whose marks are special tokens with full-width bars.

    <|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>weather
    ```json
    {"city": "Paris"}
    ```<|tool▁call▁end|><|tool▁calls▁end|>

V3.1 writes `weather<|tool▁sep|>{"city": "Paris"}` between the begin and end marks of a call.
"""

from __future__ import annotations

from functools import partial

from jinfer.server.tool_parsers.call_format import ToolCallFormat, calls_rule
from jinfer.server.tool_parsers.incremental_reader import IncrementalReader, Parse
from jinfer.server.tool_parsers.json_calls import Tools, parse_call_list, parse_named_call
from jinfer.server.tool_parsers.lark_grammar import LarkGrammar
from jinfer.server.tool_parsers.parsed_deltas import DeltaCollector

_WORDS = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
_MARKS = tuple(f"<\uff5ctool▁{word}\uff5c>" for word in _WORDS)
CALLS, CALLS_END, CALL, CALL_END, SEPARATOR = _MARKS


def _call(reader: IncrementalReader, out: DeltaCollector, tools: Tools) -> Parse[bool]:
    """Parses a call up to its end mark, which may be missing."""
    head: list[str] = []
    if (yield from reader.until(_MARKS, head.append, take=False)) != SEPARATOR:
        return False
    yield from reader.starts(SEPARATOR)
    name = "".join(head).strip()
    if name == "function" and name not in tools:
        line: list[str] = []
        if (yield from reader.until(("\n", *_MARKS), line.append, take=False)) is None:
            return False
        name = "".join(line).strip()
    yield from reader.space()
    fenced = yield from reader.starts("```json")
    yield from reader.space()
    if not (yield from parse_named_call(reader, out, name, tools)):
        return False
    for end in ("```", CALL_END) if fenced else (CALL_END,):
        reader.mark()
        yield from reader.space()
        yield from reader.starts(end)
    return True


def _grammar(lark: LarkGrammar, tools: Tools, template: str, several: bool) -> str:
    calls = []
    fenced = "```json" in template
    for name, args in lark.arguments(tools).items():
        head, tail = f"{CALL}{name}{SEPARATOR}", CALL_END
        if fenced:
            head, tail = f"{CALL}function{SEPARATOR}{name}\n```json\n", f"\n```{CALL_END}"
        calls.append(f"{lark.text(head)} {args} {lark.text(tail)}")
    inner = calls_rule(lark, calls, several, r'"\n"' if fenced else "")
    return f"{lark.text(CALLS)} {inner} {lark.text(CALLS_END)}"


_read = partial(parse_call_list, marks=(CALLS, CALL, CALLS_END), call=_call)
DEEPSEEK = ToolCallFormat("deepseek", _MARKS, _read, _grammar)
