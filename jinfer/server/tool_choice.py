"""Tool choice: the tools that an answer may or must call, and the grammar of such an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jinfer.sampling.request_errors import ConstraintError
from jinfer.sampling.structured import compile_constraint, relaxed, supported
from jinfer.sampling.structured.schema_relaxation import Relaxed
from jinfer.server.http_errors import ApiError, invalid_request
from jinfer.server.ignored_fields import Ignore
from jinfer.server.schemas.chat import ChatTemplateFields, NamedTool, Tool
from jinfer.server.tool_parsers.json_calls import Tools
from jinfer.server.tool_parsers.lark_grammar import strict_parameters
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
        """Compiles a grammar with tool calls. Slow: call it in a worker thread.

        Args:
            make_grammar: makes the grammar of an answer that may call some tools.
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
                lambda schema: relaxed(schema, lambda one: wrong(one) is None), ignore
            )
        try:
            return tools, compiled(tools)
        except ConstraintError:
            for name, schema in tools.items():
                if (error := wrong(schema)) is not None:
                    raise self._refusal(name, error) from error
            raise

    def _relaxed(self, relax: Callable[[Any], Relaxed], ignore: Ignore) -> Tools:
        """The tools with relaxed schemas; records what was left out."""
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
    """The tools that an answer may call.

    Raises:
        ApiError: two tools with the same name, or no tool where a call is required.
    """
    wanted = body.tool_choice
    if wanted == "none":
        return OfferedTools({}, {})
    tools: dict[str, Mapping[str, Any]] = {}
    places: dict[str, str] = {}
    for number, one in enumerate(body.tools or ()):
        if not isinstance(one, Tool):
            continue
        name, place = one.function.name, f"tools.{number}.function"
        if name in tools:
            raise invalid_request(f"there are two tools called {name}", f"{place}.name")
        tools[name] = one.function.parameters or {}
        places[name] = f"{place}.parameters"
    if isinstance(wanted, NamedTool):
        name = wanted.function.name
        if name not in tools:
            raise invalid_request(f"there is no tool called {name[:80]}", "tool_choice")
        return OfferedTools({name: tools[name]}, places, required=True)
    if wanted == "required" and not tools:
        raise invalid_request("there are no tools to choose from", "tool_choice")
    return OfferedTools(tools, places, wanted == "required")
