"""JSON tool-call formats: calls whose arguments are JSON, with the marks of each family.

Hermes (Qwen 2.5, Qwen 3, SmolLM and many others):
    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>
Llama 3: an answer that is a JSON object, or follows a special token:
    {"name": "weather", "parameters": {"city": "Paris"}}
    <|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}; {"name": …}
Mistral: a list in older models, names and arguments in newer models:
    [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}]
    [TOOL_CALLS]weather[ARGS]{"city": "Paris"}
    [TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}
DeepSeek V3 and R1, whose marks are special tokens with full-width bars:
    <|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>weather
    ```json
    {"city": "Paris"}
    ```<|tool▁call▁end|><|tool▁calls▁end|>
DeepSeek V3.1 writes `weather<|tool▁sep|>{"city": "Paris"}` between the marks of a call.
Granite 3: <|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}]
Phi-4-mini: the same followed by <|/tool_call|>, or functools[{"name": …}]
Command R:
    Action: ```json
    [{"tool_name": "weather", "parameters": {"city": "Paris"}}]
    ```
Command R7B and A: <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather",
    "parameters": {"city": "Paris"}}]<|END_ACTION|>
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from functools import partial

from jinfer.server.tool_parsers.call_format import (
    LarkGrammar,
    ToolCallFormat,
    calls_rule,
    json_call_rule,
)
from jinfer.server.tool_parsers.incremental_reader import IncrementalReader, Parse
from jinfer.server.tool_parsers.json_calls import (
    Tools,
    parse_call_list,
    parse_json_call,
    parse_json_calls,
    parse_named_call,
)
from jinfer.server.tool_parsers.output_deltas import DeltaCollector

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"


def _read_hermes(reader: IncrementalReader, out: DeltaCollector, tools: Tools) -> Parse[None]:
    while (yield from reader.until((HERMES_OPEN,), out.content)) is not None:
        reader.mark(HERMES_OPEN)
        yield from reader.space()
        if (yield from parse_json_calls(reader, out, tools)):
            yield from reader.space()
            yield from reader.starts(HERMES_CLOSE)
        else:
            out.reject(reader)


def _hermes_grammar(lark: LarkGrammar, tools: Tools, template: str, several: bool) -> str:
    begin, end = lark.text(f"{HERMES_OPEN}\n"), lark.text(f"\n{HERMES_CLOSE}")
    calls = (
        f"{begin} {json_call_rule(lark, name, 'arguments', args)} {end}"
        for name, args in lark.arguments(tools).items()
    )
    return calls_rule(lark, calls, several, r'"\n"')


HERMES = ToolCallFormat("hermes", (HERMES_OPEN, HERMES_CLOSE), _read_hermes, _hermes_grammar)


PYTHON_TAG = "<|python_tag|>"


def _read_llama(reader: IncrementalReader, out: DeltaCollector, tools: Tools) -> Parse[None]:
    reader.mark()
    marked = False
    while True:
        yield from reader.space()
        marked = marked or (yield from reader.starts(PYTHON_TAG))
        yield from reader.space()
        while (yield from parse_json_call(reader, out, tools, certain=marked)):
            reader.mark()
            yield from reader.space()
            yield from reader.starts(";")
            yield from reader.space()
        out.reject(reader, certain=marked)
        if (yield from reader.until((PYTHON_TAG,), out.content)) is None:
            return
        reader.mark(PYTHON_TAG)
        marked = True


def _llama_grammar(lark: LarkGrammar, tools: Tools, template: str, several: bool) -> str:
    # Llama's templates reject several calls in one turn, so an answer has at most one.
    schemas = lark.arguments(tools).items()
    return lark.one_of(
        "call", (json_call_rule(lark, name, "parameters", args) for name, args in schemas)
    )


LLAMA = ToolCallFormat("llama", (PYTHON_TAG,), _read_llama, _llama_grammar)


MISTRAL_CALLS, MISTRAL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _read_mistral(reader: IncrementalReader, out: DeltaCollector, tools: Tools) -> Parse[None]:
    while (yield from reader.until((MISTRAL_CALLS,), out.content)) is not None:
        reader.mark(MISTRAL_CALLS)
        yield from reader.space()
        listed = (yield from reader.char()) in ("[", "{")
        if not (yield from (parse_json_calls if listed else _mistral_call)(reader, out, tools)):
            out.reject(reader)


def _mistral_call(reader: IncrementalReader, out: DeltaCollector, tools: Tools) -> Parse[bool]:
    """Parse a name and its arguments."""
    name: list[str] = []
    mark = yield from reader.until(
        (MISTRAL_ID, MISTRAL_ARGS, MISTRAL_CALLS, "{"), name.append, take=False
    )
    if mark == MISTRAL_ID:
        mark = yield from reader.until(
            (MISTRAL_ARGS, MISTRAL_CALLS, "{"), lambda _: None, take=False
        )
    if mark in (None, MISTRAL_CALLS):
        return False
    yield from reader.starts(MISTRAL_ARGS)
    yield from reader.space()
    return (yield from parse_named_call(reader, out, "".join(name).strip(), tools))


def _mistral_grammar(lark: LarkGrammar, tools: Tools, template: str, several: bool) -> str:
    schemas = lark.arguments(tools).items()
    if MISTRAL_ARGS in template:
        calls = (
            lark.text(f"{MISTRAL_CALLS}{name}{MISTRAL_ARGS}") + f" {args}" for name, args in schemas
        )
        return calls_rule(lark, calls, several)
    calls = (json_call_rule(lark, name, "arguments", args) for name, args in schemas)
    return f'{lark.text(f"{MISTRAL_CALLS} [")} {calls_rule(lark, calls, several, '", "')} "]"'


def _new_mistral_id() -> str:
    """Return an id of nine letters and digits, as Mistral's templates require."""
    return uuid.uuid4().hex[:9]


MISTRAL = ToolCallFormat(
    "mistral",
    (MISTRAL_CALLS, MISTRAL_ID, MISTRAL_ARGS),
    _read_mistral,
    _mistral_grammar,
    _new_mistral_id,
)


_DEEPSEEK_WORDS = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
_DEEPSEEK_MARKS = tuple(f"<\uff5ctool▁{word}\uff5c>" for word in _DEEPSEEK_WORDS)
DEEPSEEK_CALLS, DEEPSEEK_CALLS_END, DEEPSEEK_CALL, DEEPSEEK_CALL_END, DEEPSEEK_SEPARATOR = (
    _DEEPSEEK_MARKS
)


def _deepseek_call(reader: IncrementalReader, out: DeltaCollector, tools: Tools) -> Parse[bool]:
    """Parse a call up to its end mark, which may be missing."""
    head: list[str] = []
    if (yield from reader.until(_DEEPSEEK_MARKS, head.append, take=False)) != DEEPSEEK_SEPARATOR:
        return False
    yield from reader.starts(DEEPSEEK_SEPARATOR)
    name = "".join(head).strip()
    if name == "function" and name not in tools:
        line: list[str] = []
        if (yield from reader.until(("\n", *_DEEPSEEK_MARKS), line.append, take=False)) is None:
            return False
        name = "".join(line).strip()
    yield from reader.space()
    fenced = yield from reader.starts("```json")
    yield from reader.space()
    if not (yield from parse_named_call(reader, out, name, tools)):
        return False
    for end in ("```", DEEPSEEK_CALL_END) if fenced else (DEEPSEEK_CALL_END,):
        reader.mark()
        yield from reader.space()
        yield from reader.starts(end)
    return True


def _deepseek_grammar(lark: LarkGrammar, tools: Tools, template: str, several: bool) -> str:
    calls = []
    fenced = "```json" in template
    for name, args in lark.arguments(tools).items():
        head, tail = f"{DEEPSEEK_CALL}{name}{DEEPSEEK_SEPARATOR}", DEEPSEEK_CALL_END
        if fenced:
            head, tail = (
                f"{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}{name}\n```json\n",
                f"\n```{DEEPSEEK_CALL_END}",
            )
        calls.append(f"{lark.text(head)} {args} {lark.text(tail)}")
    inner = calls_rule(lark, calls, several, r'"\n"' if fenced else "")
    return f"{lark.text(DEEPSEEK_CALLS)} {inner} {lark.text(DEEPSEEK_CALLS_END)}"


_read_deepseek = partial(
    parse_call_list, marks=(DEEPSEEK_CALLS, DEEPSEEK_CALL, DEEPSEEK_CALLS_END), call=_deepseek_call
)
DEEPSEEK = ToolCallFormat("deepseek", _DEEPSEEK_MARKS, _read_deepseek, _deepseek_grammar)


TAG, TAG_END = "<|tool_call|>", "<|/tool_call|>"
GRANITE_TAG, GRANITE_TAG_END = "<tool_call>", "</tool_call>"  # for tokenizers without the tag
FUNCTOOLS = "functools["
ACTION, ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
ACTION_WORD, FENCE, FENCE_END = "Action:", "```json", "```"


def _read_list(
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


def _list_grammar(
    begin: str, end: str, lark: LarkGrammar, tools: Tools, template: str, several: bool
) -> str:
    schemas = lark.arguments(tools).items()
    calls = (json_call_rule(lark, name, "arguments", args) for name, args in schemas)
    return _list_rule(lark, f"{begin}[", calls, f"]{end}", several)


def _list_rule(lark: LarkGrammar, begin: str, calls: Iterable[str], end: str, several: bool) -> str:
    inner = calls_rule(lark, calls, several, '", "')
    return f"{lark.text(begin)} {inner} {lark.text(end)}"


def _command_grammar(lark: LarkGrammar, tools: Tools, template: str, several: bool) -> str:
    schemas = lark.arguments(tools)
    if ACTION not in template:
        calls = (
            json_call_rule(lark, name, "parameters", args, named="tool_name")
            for name, args in schemas.items()
        )
        return _list_rule(lark, f"{ACTION_WORD} {FENCE}\n[", calls, f"]\n{FENCE_END}", several)
    number = lark.rule("NUMBER", "/[0-9]{1,2}/")
    head = f"{lark.text('{"tool_call_id": "')} {number}"
    calls = (
        f'{head} {lark.text(f'", "tool_name": "{name}", "parameters": ')} {args} "}}"'
        for name, args in schemas.items()
    )
    return _list_rule(lark, f"{ACTION}[", calls, f"]{ACTION_END}", several)


GRANITE = ToolCallFormat(
    "granite",
    (TAG, GRANITE_TAG, GRANITE_TAG_END),
    partial(_read_list, (TAG, GRANITE_TAG), (GRANITE_TAG_END,)),
    partial(_list_grammar, TAG, ""),
)
PHI = ToolCallFormat(
    "phi",
    (TAG, TAG_END, FUNCTOOLS),
    partial(_read_list, (TAG, FUNCTOOLS), (TAG_END,)),
    partial(_list_grammar, TAG, TAG_END),
)
COMMAND = ToolCallFormat(
    "command",
    (ACTION, ACTION_END, ACTION_WORD, FENCE),
    partial(_read_list, (ACTION, ACTION_WORD), (ACTION_END, FENCE_END)),
    _command_grammar,
)
