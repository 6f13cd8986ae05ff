"""Tool calling: chooses the output parser of a request, and the grammar that forces tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from jinfer.sampling.request_errors import ConstraintError
from jinfer.sampling.structured import compile_constraint, relaxed, supported
from jinfer.sampling.structured.schema_relaxation import Relaxed
from jinfer.server.core.chat_schemas import ChatRequest, ChatTemplateFields, NamedTool, Tool
from jinfer.server.http.http_errors import ApiError, as_api_error, invalid_request
from jinfer.server.http.request_body import Ignore
from jinfer.server.tool_parsers.call_format import LarkGrammar, ToolCallFormat, strict_parameters
from jinfer.server.tool_parsers.incremental_reader import IncrementalReader, Parse
from jinfer.server.tool_parsers.json_calls import Tools
from jinfer.server.tool_parsers.output_deltas import DeltaCollector, OutputParsing, ToolCallParser
from jinfer.server.tool_parsers.parser_registry import (
    ReasoningFormat,
    ReasoningState,
    reasoning_format,
    special_token_ids,
    tool_call_format,
)
from jinfer.template.chat_prompt import Conversation
from jinfer.tokenizer import Tokenizer

_MAX_TRIALS = 32  # schemas of one request that are compiled to find what cannot be enforced


@dataclass(frozen=True)
class OfferedTools:
    """The tools of a request.

    Attributes:
        tools: name -> JSON schema of the arguments, as sent.
        paths: name -> path of that schema in the request.
        required: whether a call is required.
    """

    tools: Tools
    paths: Mapping[str, str]
    required: bool = False

    def grammar(
        self, tokenizer: Tokenizer, made: Callable[[Tools], str], ignore: Ignore
    ) -> tuple[Tools, str]:
        """Compile a grammar with tool calls. Slow: call it in a worker thread.

        Args:
            made: makes the grammar of an answer that may call some tools.
            ignore: records schema keywords that cannot be enforced.

        Returns:
            The tools with the schemas that are enforced, and the grammar.

        Raises:
            ApiError: a tool's schema is invalid or cannot be enforced.
            ConstraintError: another part of the grammar is invalid.
        """

        def compiled(tools: Tools) -> str:
            grammar = made(tools)
            compile_constraint(tokenizer, grammar=grammar)
            return grammar

        trials = iter(range(_MAX_TRIALS))

        def wrong(schema: Any) -> ConstraintError | None:
            try:
                if next(trials, None) is not None:
                    compile_constraint(tokenizer, json_schema=schema)
            except ConstraintError as error:
                return error
            return None

        try:
            tools = self._relaxed(supported, ignore)
            return tools, compiled(tools)
        except ConstraintError:
            tools = self._relaxed(
                lambda schema: relaxed(schema, lambda candidate: wrong(candidate) is None), ignore
            )
        try:
            return tools, compiled(tools)
        except ConstraintError:
            for name, schema in tools.items():
                if (error := wrong(schema)) is not None:
                    raise self._refusal(name, error) from error
            raise

    def _relaxed(self, relax: Callable[[Any], Relaxed], ignore: Ignore) -> Tools:
        """Relax the schemas; report the keywords that are left out."""
        result: dict[str, Mapping[str, Any]] = {}
        for name, schema in self.tools.items():
            try:
                result[name], left_out = relax(strict_parameters(schema))
            except ConstraintError as error:
                raise self._refusal(name, error) from error
            for pointer in left_out:
                place, _, key = pointer.rpartition("/")
                why = f"json_schema at {place}: {key} is not supported"
                ignore(self.paths[name] + pointer, f"the tool {name}: {why}")
        return result

    def _refusal(self, name: str, error: ConstraintError) -> ApiError:
        return invalid_request(f"the tool {name}: {error}", self.paths[name])


def offered_tools(body: ChatTemplateFields) -> OfferedTools:
    """Return the tools that an answer may call.

    Raises:
        ApiError: two tools with the same name, or no tool where a call is required.
    """
    choice = body.tool_choice
    if choice == "none":
        return OfferedTools({}, {})
    tools: dict[str, Mapping[str, Any]] = {}
    places: dict[str, str] = {}
    for number, tool in enumerate(body.tools or ()):
        if not isinstance(tool, Tool):
            continue
        name, place = tool.function.name, f"tools.{number}.function"
        if name in tools:
            raise invalid_request(f"there are two tools called {name}", f"{place}.name")
        tools[name] = tool.function.parameters or {}
        places[name] = f"{place}.parameters"
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in tools:
            raise invalid_request(f"there is no tool called {name[:80]}", "tool_choice")
        return OfferedTools({name: tools[name]}, places, required=True)
    if choice == "required" and not tools:
        raise invalid_request("the request has no tools", "tool_choice")
    return OfferedTools(tools, places, choice == "required")


_TAIL_TOKENS = 16  # tokens at a prompt's end that show whether it opens a reasoning block


def output_parsing(
    chat: ChatRequest,
    template: Conversation,
    tokenizer: Tokenizer | None,
    prompt: list[int],
    ignore: Ignore,
) -> OutputParsing:
    """Choose how answers are parsed and constrained. Slow: call it in a worker thread.

    Args:
        chat: the tools and the tool choice.
        template: the chat template of the request, which determines the format of calls.
        prompt: the token ids; the answer may begin inside reasoning.
        ignore: records schema keywords that a forced call does not enforce.

    Raises:
        ApiError: invalid tools, or no tool where a call is required.
    """
    offer = offered_tools(chat)
    tools = offer.tools
    if tokenizer is None:
        return OutputParsing()
    source, prompt_format = template.jinja or "", template.prompt
    format = tool_call_format(source, prompt_format.tool_calls)
    reasoning = None
    if not format.has_reasoning:
        reasoning = reasoning_format(source, tokenizer, prompt_format.reasoning)
    if not (tools or reasoning or format.has_reasoning):
        return OutputParsing()
    state: ReasoningState = "free"
    if reasoning is not None:
        state = _reasoning_state(
            reasoning, chat, tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special=False)
        )
    marks = [*(format.marks if tools or format.has_reasoning else ())]
    if reasoning is not None:
        marks += [reasoning.begin, reasoning.end]
    special = special_token_ids(marks, tokenizer)
    parallel = chat.parallel_tool_calls is not False
    several = parallel and not isinstance(chat.tool_choice, NamedTool)

    def parser(tools: Tools) -> ToolCallParser:
        output = DeltaCollector(format.new_id, None if parallel else 1)
        return ToolCallParser(
            partial(_parse_answer, format, tools, reasoning, state), output, bound=offer.required
        )

    def calling(tools: Tools, schema: Any = None) -> str:
        """Return the grammar of an answer that calls tools, or matches a JSON schema."""
        lark = LarkGrammar(tokenizer)
        thought = "" if reasoning is None else reasoning.grammar(lark, state)
        ways = [format.grammar(lark, tools, source, several)] if tools else []
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
    """Return whether the prompt ends inside, after or before reasoning."""
    if body.continue_final_message:
        content = body.messages[-1].content
        text = content if isinstance(content, str) else ""
        return "open" if text.rfind(reasoning.begin) > text.rfind(reasoning.end) else "closed"
    return reasoning.state(tail)


def _parse_answer(
    format: ToolCallFormat,
    tools: Tools,
    reasoning: ReasoningFormat | None,
    state: ReasoningState,
    reader: IncrementalReader,
    out: DeltaCollector,
) -> Parse[None]:
    """Parse an answer: reasoning first, then tool calls and content."""
    if reasoning is not None:
        yield from reasoning.parse(reader, out, state)
    if tools or format.has_reasoning:
        yield from format.parse(reader, out, tools)
    else:
        yield from reader.until(("\0",), out.content)
