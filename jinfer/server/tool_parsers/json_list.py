"""JSON list tool calls: a list of JSON objects after a mark (Granite, Phi, Command R).

Granite 3:          <|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}]
Phi-4-mini:         <|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}]<|/tool_call|>
                    functools[{"name": "weather", "arguments": {"city": "Paris"}}]
Command R:          Action: ```json
                    [{"tool_name": "weather", "parameters": {"city": "Paris"}}]
                    ```
Command R7B and A:  <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather",
                    "parameters": {"city": "Paris"}}]<|END_ACTION|>
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from jinfer.server.tool_parsers.call_format import ToolCallFormat, calls_rule, json_call_rule
from jinfer.server.tool_parsers.incremental_reader import IncrementalReader, Parse
from jinfer.server.tool_parsers.json_calls import Tools, parse_json_calls
from jinfer.server.tool_parsers.lark_grammar import LarkGrammar
from jinfer.server.tool_parsers.parsed_deltas import DeltaCollector

TAG, TAG_END = "<|tool_call|>", "<|/tool_call|>"
GRANITE_TAG, GRANITE_TAG_END = "<tool_call>", "</tool_call>"  # where the tokenizer lacks the tag
FUNCTOOLS = "functools["
ACTION, ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
ACTION_WORD, FENCE, FENCE_END = "Action:", "```json", "```"


def _read(
    begins: Sequence[str],
    ends: Sequence[str],
    reader: IncrementalReader,
    out: DeltaCollector,
    tools: Tools,
) -> Parse[None]:
    while (mark := (yield from reader.until(begins, out.content, take=False))) is not None:
        reader.mark()
        reader.take(len(mark.removesuffix("[")))
        yield from reader.space()
        sure = mark != ACTION_WORD or (yield from reader.starts(FENCE))
        yield from reader.space()
        if not (yield from parse_json_calls(reader, out, tools)):
            out.reject(reader, certain=sure)
            continue
        yield from reader.space()
        for end in ends:
            if (yield from reader.starts(end)):
                break


def _grammar(
    begin: str, end: str, lark: LarkGrammar, tools: Tools, template: str, several: bool
) -> str:
    schemas = lark.arguments(tools).items()
    calls = (json_call_rule(lark, name, "arguments", args) for name, args in schemas)
    return _list(lark, f"{begin}[", calls, f"]{end}", several)


def _list(lark: LarkGrammar, begin: str, calls: Iterable[str], end: str, several: bool) -> str:
    inner = calls_rule(lark, calls, several, '", "')
    return f"{lark.text(begin)} {inner} {lark.text(end)}"


def _command(lark: LarkGrammar, tools: Tools, template: str, several: bool) -> str:
    schemas = lark.arguments(tools)
    if ACTION not in template:
        calls = (
            json_call_rule(lark, name, "parameters", args, named="tool_name")
            for name, args in schemas.items()
        )
        return _list(lark, f"{ACTION_WORD} {FENCE}\n[", calls, f"]\n{FENCE_END}", several)
    number = lark.rule("NUMBER", "/[0-9]{1,2}/")
    head = f"{lark.text('{"tool_call_id": "')} {number}"
    calls = (
        f'{head} {lark.text(f'", "tool_name": "{name}", "parameters": ')} {args} "}}"'
        for name, args in schemas.items()
    )
    return _list(lark, f"{ACTION}[", calls, f"]{ACTION_END}", several)


GRANITE = ToolCallFormat(
    "granite",
    (TAG, GRANITE_TAG, GRANITE_TAG_END),
    partial(_read, (TAG, GRANITE_TAG), (GRANITE_TAG_END,)),
    partial(_grammar, TAG, ""),
)
PHI = ToolCallFormat(
    "phi",
    (TAG, TAG_END, FUNCTOOLS),
    partial(_read, (TAG, FUNCTOOLS), (TAG_END,)),
    partial(_grammar, TAG, TAG_END),
)
COMMAND = ToolCallFormat(
    "command",
    (ACTION, ACTION_END, ACTION_WORD, FENCE),
    partial(_read, (ACTION, ACTION_WORD), (ACTION_END, FENCE_END)),
    _command,
)
