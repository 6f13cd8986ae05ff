"""What a model thinks before it answers, between two marks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jinfer.server.tool_parsers.incremental_reader import Reader, Reading
from jinfer.server.tool_parsers.lark_grammar import Lark
from jinfer.server.tool_parsers.parsed_deltas import Output

# Where the prompt leaves the model: in a thought, after one, or free to begin one.
State = Literal["open", "closed", "free"]


@dataclass(frozen=True)
class Thinking:
    """How a family of models writes thoughts.

    Attributes:
        name: what it is chosen by.
        begin, end: the marks.
    """

    name: str
    begin: str
    end: str

    def state(self, prompt: str) -> State:
        """Where a prompt, or the end of one, leaves the model."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.begin):
            return "open"
        return "closed" if prompt.endswith(self.end) else "free"

    def read(self, reader: Reader, out: Output, state: State) -> Reading[None]:
        """Reads the thought at the beginning of an answer, if there is one."""
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
        """A thought, where there may be one."""
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
