"""Speculative decoding explained: colours tokens by their draft source, with acceptance rates."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence

from jinfer import progress
from jinfer.api.llm import LLM
from jinfer.cli.terminal import INTERRUPTED, show_answer
from jinfer.cli.terminal.flag_conflicts import FlagError
from jinfer.engine.output.completion import Chunk
from jinfer.speculate.speculative_decoding import SpeculativeDecoder

_COLOURS = ("32", "36", "35", "33", "34", "31")  # ANSI codes of text colours
_PLAIN = "0"


def explain(llm: LLM, ids: list[int]) -> int:
    """Generates an answer; returns the exit status. Raises `FlagError` without a draft source."""
    speculator = llm.session.engine.speculator
    params = llm.params()
    if not isinstance(speculator, SpeculativeDecoder) or not params.speculation:
        raise FlagError(
            "--explain-speculation: nobody drafts; say who, such as --set speculation.draft=ngram"
        )
    if params.strategy == "beam":
        raise FlagError("--explain-speculation: nothing is drafted for a beam search")
    colours, chunks = SourceColours(), list[Chunk]()
    with (
        contextlib.closing(llm.stream(ids, params)) as stream,
        show_answer.watch_ctrl_c() as pressed,
    ):
        for chunk in stream:
            chunks.append(chunk)
            text = show_answer.display_text(llm, chunk.text, chunk.token_ids)
            progress.write(colours.paint(text, chunk.origin), progress.NO_ROOM)
            if pressed():
                break
    interrupted = chunks[-1].finish_reason is None
    usage = show_answer.usage_of(llm, interrupted)
    progress.write("\n")
    accepted, drafted = usage.accepted_tokens, usage.drafted_tokens
    steps = max(1, usage.completion_tokens - accepted)
    print(
        f"{drafted} tokens drafted, {accepted} of them right; "
        f"{usage.completion_tokens / steps:.2f} tokens a step",
        *acceptance_table({} if usage.speculation is None else usage.speculation.tried()),
        f"colours: {colours.legend()}",
        show_answer.timings(llm, usage),
        sep="\n",
        file=sys.stderr,
    )
    return INTERRUPTED if interrupted else 0


class SourceColours:
    """Assigns a colour to each draft source, in order of appearance."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def paint(self, text: str, origin: str) -> str:
        """Colours a text by its draft source; text of the model itself stays plain."""
        if not origin or not text:
            return text
        colour = self._of.setdefault(origin, _COLOURS[len(self._of) % len(_COLOURS)])
        return f"\x1b[{colour}m{text}\x1b[{_PLAIN}m"

    def legend(self) -> str:
        """The legend of the colours."""
        return ", ".join(self.paint(origin, origin) for origin in self._of) or "none"


def acceptance_table(tried: Mapping[str, Mapping[int, tuple[int, int]]]) -> Sequence[str]:
    """The acceptance rate of each draft source by depth, given that the parent was accepted."""
    lines = []
    for source, depths in sorted(tried.items()):
        each = (f"{right}/{count}" for _, (right, count) in sorted(depths.items()))
        lines.append(f"{source}, right by depth: {' '.join(each)}")
    return lines
