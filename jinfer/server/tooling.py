"""How the answers to a request are read, and what makes wanted calls come."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from jinfer.frontend import Frontend
from jinfer.sampling.errors import ConstraintError
from jinfer.sampling.structured.schema import prepare_schema
from jinfer.server.errors import invalid
from jinfer.server.parsing import Tooling
from jinfer.server.schemas.chat import NamedTool, Rendering
from jinfer.server.tools.calls import Tools
from jinfer.server.tools.format import Format
from jinfer.server.tools.formats import format_of, shown, thinking_of
from jinfer.server.tools.lark import Lark, parameters
from jinfer.server.tools.output import Machine, Output
from jinfer.server.tools.reader import Reader, Reading
from jinfer.server.tools.thinking import State, Thinking

_TAIL = 16  # tokens at a prompt's end that tell whether it has begun a thought


def tooling(body: Rendering, parallel: bool, frontend: Frontend, prompt: list[int]) -> Tooling:
    """Chooses how the answers to a request are read; takes its time.

    Args:
        body: has the tools, and which of them is to be called.
        parallel: whether several may be called at once.
        frontend: of the model, whose chat template says how it writes calls.
        prompt: tells whether the answer begins in the middle of a thought.

    Raises:
        ApiError: tools that cannot be, or none where one is to be called.
    """
    tools = tools_of(body)
    conversation, tokenizer = frontend.opened.conversation, frontend.opened.tokenizer
    if body.tools and body.tool_choice != "none":
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
    changes: Mapping[str, Any] = {}
    if body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool):
        several = parallel and body.tool_choice == "required"
        lark = Lark(tokenizer)
        thought = "" if thinking is None else thinking.grammar(lark, state)
        calls = how.grammar(lark, tools, template, several)
        lark.rule("start", f"{thought} {calls}".strip())
        changes = {"grammar": str(lark)}

    def parser(tools: Tools) -> Machine:
        output = Output(how.new_id, None if parallel else 1)
        return Machine(partial(_read, how, tools, thinking, state), output, bound=bool(changes))

    special = shown(marks, tokenizer)

    def bound(schema: Any) -> Tooling:
        lark = Lark(tokenizer)
        content = lark.json(schema)
        if how.answer is not None:
            lark.rule("start", how.answer(lark, content))
        elif thinking is not None and state != "closed":
            lark.rule("start", f"{thinking.grammar(lark, state)} {content}")
        else:
            return Tooling()
        return Tooling(partial(parser, {}), {"grammar": str(lark)}, special)

    return Tooling(partial(parser, tools), changes, special, bound)


def tools_of(body: Rendering) -> Tools:
    """The tools that an answer may call: name -> schema of the arguments.

    Raises:
        ApiError: two of one name, a schema that cannot be kept, or none where one is wanted.
    """
    wanted = body.tool_choice
    if wanted == "none":
        return {}
    tools: dict[str, Mapping[str, Any]] = {}
    for number, one in enumerate(body.tools or ()):
        name, place = one.function.name, f"tools.{number}.function"
        if name in tools:
            raise invalid(f"there are two tools called {name}", f"{place}.name")
        try:
            prepare_schema(parameters(one.function.parameters))
        except ConstraintError as error:
            if wanted is not None and wanted != "auto":
                raise invalid(str(error), f"{place}.parameters") from error
        tools[name] = one.function.parameters or {}
    if isinstance(wanted, NamedTool):
        name = wanted.function.name
        if name not in tools:
            raise invalid(f"there is no tool called {name[:80]}", "tool_choice")
        return {name: tools[name]}
    if wanted == "required" and not tools:
        raise invalid("there are no tools to choose from", "tool_choice")
    return tools


def _state(thinking: Thinking, body: Rendering, tail: str) -> State:
    """Where the prompt leaves the model."""
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
    """Reads an answer: what was thought, then calls and content."""
    if thinking is not None:
        yield from thinking.read(reader, out, state)
    if tools or how.thinks:
        yield from how.read(reader, out, tools)
    else:
        yield from reader.until(("\0",), out.content)
