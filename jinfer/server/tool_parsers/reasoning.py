"""Reasoning parser: reasoning (thinking) between two marks, before the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jinfer.server.tool_parsers.incremental_reader import Parse, Reader
from jinfer.server.tool_parsers.lark_grammar import Lark
from jinfer.server.tool_parsers.parsed_deltas import Output

# Where the prompt leaves the model: inside reasoning, after it, or free to begin it.
State = Literal["open", "closed", "free"]


@dataclass(frozen=True)
class Thinking:
    """The reasoning syntax of a family of models.

    Attributes:
        name: the value of `prompt.reasoning` in a specification.
        begin, end: the marks.
    """

    name: str
    begin: str
    end: str

    def state(self, prompt: str) -> State:
        """The state after a prompt, or its last tokens."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.begin):
            return "open"
        return "closed" if prompt.endswith(self.end) else "free"

    def read(self, reader: Reader, out: Output, state: State) -> Parse[None]:
        """Parses the reasoning at the beginning of an answer, if any."""
        if state == "closed":
            return
        reader.mark()
        yield from reader.space()
        if not (yield from reader.starts(self.begin)) and state != "open":
            out.content(reader.raw())
            return
        yield from reader.until((self.end,), out.reasoning)
        out.thought()

    def grammar(self, lark: Lark, state: State) -> str:
        """The grammar rule of reasoning, where it may come."""
        if state == "closed":
            return ""
        after = lark.rule("GAP", r"/[ \n]{0,4}/")
        thought = f"{lark.upto(self.end)} {after}"
        if state == "open":
            return thought
        whole = lark.rule("thought", f"{lark.text(self.begin)} {thought}")
        return f"{whole}?"


THINKINGS = (
    Thinking("think", "<think>", "</think>"),
    Thinking("mistral", "[THINK]", "[/THINK]"),
    Thinking("command", "<|START_THINKING|>", "<|END_THINKING|>"),
    Thinking("seed", "<seed:think>", "</seed:think>"),
)
