"""Tool calling: chooses the output parser of a request, and the grammar that forces tool calls."""

from __future__ import annotations

from functools import partial
from typing import Any

from jinfer.api.session import Frontend
from jinfer.sampling.request_errors import ConstraintError
from jinfer.server.http_errors import as_api_error
from jinfer.server.ignored_fields import Ignore
from jinfer.server.output_deltas import Tooling
from jinfer.server.schemas.chat import NamedTool, Rendering
from jinfer.server.tool_choice import offered
from jinfer.server.tool_parsers.call_format import Format
from jinfer.server.tool_parsers.incremental_reader import Reader, Reading
from jinfer.server.tool_parsers.json_calls import Tools
from jinfer.server.tool_parsers.lark_grammar import Lark
from jinfer.server.tool_parsers.parsed_deltas import Machine, Output
from jinfer.server.tool_parsers.parser_registry import format_of, shown, thinking_of
from jinfer.server.tool_parsers.reasoning import State, Thinking

_TAIL = 16  # tokens at a prompt's end that show whether it opens a reasoning block


def tooling(
    body: Rendering, parallel: bool, frontend: Frontend, prompt: list[int], ignore: Ignore
) -> Tooling:
    """Chooses how answers are parsed and constrained. Slow: call it in a worker thread.

    Args:
        body: the tools and the tool choice.
        parallel: whether several calls are allowed (`parallel_tool_calls`).
        frontend: the model's session, whose chat template determines the call format.
        prompt: the token ids; the answer may begin inside reasoning.
        ignore: records schema keywords that a forced call does not enforce.

    Raises:
        ApiError: invalid tools, or none where a call is required.
    """
    offer = offered(body)
    tools = offer.tools
    conversation, tokenizer = frontend.opened.conversation, frontend.opened.tokenizer
    if tools:
        conversation = conversation.for_tools()
    if tokenizer is None:
        return Tooling()
    template = body.chat_template or conversation.jinja or ""
    how = format_of(template, conversation.prompt.tool_calls)
    thinking = None
    if not how.thinks:
        thinking = thinking_of(template, tokenizer, conversation.prompt.reasoning)
    if not (tools or thinking or how.thinks):
        return Tooling()
    state: State = "free"
    if thinking is not None:
        state = _state(thinking, body, tokenizer.decode(prompt[-_TAIL:], skip_special=False))
    marks = [*(how.marks if tools or how.thinks else ())]
    if thinking is not None:
        marks += [thinking.begin, thinking.end]
    special = shown(marks, tokenizer)
    several = parallel and not isinstance(body.tool_choice, NamedTool)

    def parser(tools: Tools) -> Machine:
        output = Output(how.new_id, None if parallel else 1)
        return Machine(partial(_read, how, tools, thinking, state), output, bound=offer.wanted)

    def calling(tools: Tools, schema: Any = None) -> str:
        """The grammar of an answer that calls some tools, or matches a JSON schema."""
        lark = Lark(tokenizer)
        thought = "" if thinking is None else thinking.grammar(lark, state)
        ways = [how.grammar(lark, tools, template, several)] if tools else []
        if schema is not None:
            content = lark.json(schema)
            ways.append(content if how.answer is None else how.answer(lark, content))
        lark.rule("start", f"{thought} {lark.one_of('way', ways)}".strip())
        return str(lark)

    def bound(schema: Any) -> Tooling:
        if not (tools or how.thinks or (thinking is not None and state != "closed")):
            return Tooling()
        called, grammar = offer.grammar(tokenizer, partial(calling, schema=schema), ignore)
        return Tooling(partial(parser, called), {"grammar": grammar}, special)

    if not offer.wanted:
        return Tooling(partial(parser, tools), {}, special, bound)
    try:
        called, grammar = offer.grammar(tokenizer, calling, ignore)
    except ConstraintError as error:
        raise as_api_error(error, param="tools") from error
    return Tooling(partial(parser, called), {"grammar": grammar}, special)


def _state(thinking: Thinking, body: Rendering, tail: str) -> State:
    """Whether the prompt leaves the model inside, after or before reasoning."""
    if body.continue_final_message:
        content = body.messages[-1].content
        said = content if isinstance(content, str) else ""
        return "open" if said.rfind(thinking.begin) > said.rfind(thinking.end) else "closed"
    return thinking.state(tail)


def _read(
    how: Format,
    tools: Tools,
    thinking: Thinking | None,
    state: State,
    reader: Reader,
    out: Output,
) -> Reading[None]:
    """Parses an answer: reasoning first, then tool calls and content."""
    if thinking is not None:
        yield from thinking.read(reader, out, state)
    if tools or how.thinks:
        yield from how.read(reader, out, tools)
    else:
        yield from reader.until(("\0",), out.content)
