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

from jinfer.server.tool_parsers.call_format import Format, json_object, repeated
from jinfer.server.tool_parsers.incremental_reader import Parse, Reader
from jinfer.server.tool_parsers.json_calls import Tools, json_calls
from jinfer.server.tool_parsers.lark_grammar import Lark, parameters
from jinfer.server.tool_parsers.parsed_deltas import Output

TAG, TAG_END = "<|tool_call|>", "<|/tool_call|>"
WORD, WORD_END = "<tool_call>", "</tool_call>"  # Granite's, for tokenizers without the tag
FUNCTOOLS = "functools["
ACTION, ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
SAID, FENCE, FENCE_END = "Action:", "```json", "```"


def _read(
    begins: Sequence[str], ends: Sequence[str], reader: Reader, out: Output, tools: Tools
) -> Parse[None]:
    while (mark := (yield from reader.until(begins, out.content, take=False))) is not None:
        reader.mark()
        reader.take(len(mark.removesuffix("[")))
        yield from reader.space()
        sure = mark != SAID or (yield from reader.starts(FENCE))
        yield from reader.space()
        if not (yield from json_calls(reader, out, tools)):
            out.rejected(reader, sure=sure)
            continue
        yield from reader.space()
        for end in ends:
            if (yield from reader.starts(end)):
                break


def _grammar(begin: str, end: str, lark: Lark, tools: Tools, template: str, several: bool) -> str:
    calls = (
        json_object(lark, name, "arguments", lark.json(parameters(schema)))
        for name, schema in tools.items()
    )
    return _list(lark, f"{begin}[", calls, f"]{end}", several)


def _list(lark: Lark, begin: str, calls: Iterable[str], end: str, several: bool) -> str:
    call = lark.one_of("call", calls)
    inner = repeated(call, '", "') if several else call
    return f"{lark.text(begin)} {inner} {lark.text(end)}"


def _command(lark: Lark, tools: Tools, template: str, several: bool) -> str:
    schemas = {name: lark.json(parameters(schema)) for name, schema in tools.items()}
    if ACTION not in template:
        calls = (
            json_object(lark, name, "parameters", args, named="tool_name")
            for name, args in schemas.items()
        )
        return _list(lark, f"{SAID} {FENCE}\n[", calls, f"]\n{FENCE_END}", several)
    number = lark.rule("NUMBER", "/[0-9]{1,2}/")
    head = f"{lark.text('{"tool_call_id": "')} {number}"
    calls = (
        f'{head} {lark.text(f'", "tool_name": "{name}", "parameters": ')} {args} "}}"'
        for name, args in schemas.items()
    )
    return _list(lark, f"{ACTION}[", calls, f"]{ACTION_END}", several)


GRANITE = Format(
    "granite",
    (TAG, WORD, WORD_END),
    partial(_read, (TAG, WORD), (WORD_END,)),
    partial(_grammar, TAG, ""),
)
PHI = Format(
    "phi",
    (TAG, TAG_END, FUNCTOOLS),
    partial(_read, (TAG, FUNCTOOLS), (TAG_END,)),
    partial(_grammar, TAG, TAG_END),
)
COMMAND = Format(
    "command",
    (ACTION, ACTION_END, SAID, FENCE),
    partial(_read, (ACTION, SAID), (ACTION_END, FENCE_END)),
    _command,
)
