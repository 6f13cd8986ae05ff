"""Tool calling: chooses the output parser of a request, and the grammar that forces tool calls."""

from __future__ import annotations

from functools import partial
from typing import Any

from jinfer.api.session import Session
from jinfer.sampling.request_errors import ConstraintError
from jinfer.server.http_errors import as_api_error
from jinfer.server.ignored_fields import Ignore
from jinfer.server.output_deltas import OutputParsing
from jinfer.server.schemas.chat import ChatTemplateFields, NamedTool
from jinfer.server.tool_choice import offered_tools
from jinfer.server.tool_parsers.call_format import ToolCallFormat
from jinfer.server.tool_parsers.incremental_reader import IncrementalReader, Parse
from jinfer.server.tool_parsers.json_calls import Tools
from jinfer.server.tool_parsers.lark_grammar import LarkGrammar
from jinfer.server.tool_parsers.parsed_deltas import DeltaCollector, ToolCallParser
from jinfer.server.tool_parsers.parser_registry import (
    reasoning_format,
    special_token_ids,
    tool_call_format,
)
from jinfer.server.tool_parsers.reasoning import ReasoningFormat, ReasoningState

_TAIL_TOKENS = 16  # tokens at a prompt's end that show whether it opens a reasoning block


def output_parsing(
    body: ChatTemplateFields, parallel: bool, session: Session, prompt: list[int], ignore: Ignore
) -> OutputParsing:
    """Chooses how answers are parsed and constrained. Slow: call it in a worker thread.

    Args:
        body: the tools and the tool choice.
        parallel: whether several calls are allowed (`parallel_tool_calls`).
        session: the model's session, whose chat template determines the call format.
        prompt: the token ids; the answer may begin inside reasoning.
        ignore: records schema keywords that a forced call does not enforce.

    Raises:
        ApiError: invalid tools, or none where a call is required.
    """
    offer = offered_tools(body)
    tools = offer.tools
    conversation, tokenizer = session.opened.conversation, session.opened.tokenizer
    if tools:
        conversation = conversation.for_tools()
    if tokenizer is None:
        return OutputParsing()
    template = body.chat_template or conversation.jinja or ""
    format = tool_call_format(template, conversation.prompt.tool_calls)
    reasoning = None
    if not format.has_reasoning:
        reasoning = reasoning_format(template, tokenizer, conversation.prompt.reasoning)
    if not (tools or reasoning or format.has_reasoning):
        return OutputParsing()
    state: ReasoningState = "free"
    if reasoning is not None:
        state = _reasoning_state(
            reasoning, body, tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special=False)
        )
    marks = [*(format.marks if tools or format.has_reasoning else ())]
    if reasoning is not None:
        marks += [reasoning.begin, reasoning.end]
    special = special_token_ids(marks, tokenizer)
    several = parallel and not isinstance(body.tool_choice, NamedTool)

    def parser(tools: Tools) -> ToolCallParser:
        output = DeltaCollector(format.new_id, None if parallel else 1)
        return ToolCallParser(
            partial(_parse_answer, format, tools, reasoning, state), output, bound=offer.required
        )

    def calling(tools: Tools, schema: Any = None) -> str:
        """The grammar of an answer that calls some tools, or matches a JSON schema."""
        lark = LarkGrammar(tokenizer)
        thought = "" if reasoning is None else reasoning.grammar(lark, state)
        ways = [format.grammar(lark, tools, template, several)] if tools else []
        if schema is not None:
            content = lark.json(schema)
            ways.append(content if format.answer is None else format.answer(lark, content))
        lark.rule("start", f"{thought} {lark.one_of('way', ways)}".strip())
        return str(lark)

    def bound(schema: Any) -> OutputParsing:
        if not (tools or format.has_reasoning or (reasoning is not None and state != "closed")):
            return OutputParsing()
        called, grammar = offer.grammar(tokenizer, partial(calling, schema=schema), ignore)
        return OutputParsing(partial(parser, called), {"grammar": grammar}, special)

    if not offer.required:
        return OutputParsing(partial(parser, tools), {}, special, bound)
    try:
        called, grammar = offer.grammar(tokenizer, calling, ignore)
    except ConstraintError as error:
        raise as_api_error(error, param="tools") from error
    return OutputParsing(partial(parser, called), {"grammar": grammar}, special)


def _reasoning_state(
    reasoning: ReasoningFormat, body: ChatTemplateFields, tail: str
) -> ReasoningState:
    """Whether the prompt leaves the model inside, after or before reasoning."""
    if body.continue_final_message:
        content = body.messages[-1].content
        said = content if isinstance(content, str) else ""
        return "open" if said.rfind(reasoning.begin) > said.rfind(reasoning.end) else "closed"
    return reasoning.state(tail)


def _parse_answer(
    format: ToolCallFormat,
    tools: Tools,
    reasoning: ReasoningFormat | None,
    state: ReasoningState,
    reader: IncrementalReader,
    out: DeltaCollector,
) -> Parse[None]:
    """Parses an answer: reasoning first, then tool calls and content."""
    if reasoning is not None:
        yield from reasoning.parse(reader, out, state)
    if tools or format.has_reasoning:
        yield from format.parse(reader, out, tools)
    else:
        yield from reader.until(("\0",), out.content)
