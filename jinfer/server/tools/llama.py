"""Llama 3: an answer that is nothing but a JSON object, or follows a token.

{"name": "weather", "parameters": {"city": "Paris"}}
<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}; {"name": …}
"""

from __future__ import annotations

from jinfer.server.tools.calls import Tools, json_call
from jinfer.server.tools.format import Format, json_object
from jinfer.server.tools.lark import Lark, parameters
from jinfer.server.tools.output import Output
from jinfer.server.tools.reader import Reader, Reading

TAG = "<|python_tag|>"


def _read(reader: Reader, out: Output, tools: Tools) -> Reading[None]:
    reader.mark()
    marked = False
    while True:
        yield from reader.space()
        marked = marked or (yield from reader.starts(TAG))
        yield from reader.space()
        while (yield from json_call(reader, out, tools, sure=marked)):
            reader.mark()
            yield from reader.space()
            yield from reader.starts(";")
            yield from reader.space()
        out.rejected(reader, sure=marked)
        if (yield from reader.until((TAG,), out.content)) is None:
            return
        reader.mark(TAG)
        marked = True


def _grammar(lark: Lark, tools: Tools, template: str, several: bool) -> str:
    # Its templates refuse a turn with several calls, so that an answer has one.
    calls = (
        json_object(lark, name, "parameters", lark.json(parameters(schema)))
        for name, schema in tools.items()
    )
    return lark.one_of("call", calls)


LLAMA = Format("llama", (TAG,), _read, _grammar)
