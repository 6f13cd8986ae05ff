"""Streaming output in the terminal: prints an answer, handles Ctrl-C, reports usage and timings."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from jinfer import progress
from jinfer.api.image_inputs import EncodedPrompt
from jinfer.api.llm import LLM
from jinfer.cli.terminal import INTERRUPTED
from jinfer.cli.terminal.flag_conflicts import FlagError
from jinfer.engine.output.completion import Chunk, Completion, TokenLogprob, Usage
from jinfer.progress import task


def print_answer(
    stream: Iterator[Chunk],
    chunks: list[Chunk],
    show: Callable[[str], None],
    llm: LLM,
    prompt_tokens: int,
) -> bool:
    """Print an answer while it is generated; return whether Ctrl-C stopped it.

    Args:
        chunks: receives the chunks; before the first one, Ctrl-C interrupts at once.
        prompt_tokens: number of prompt tokens.
    """
    with watch_ctrl_c(lambda: bool(chunks)) as pressed:
        try:
            for chunk in _after_prompt(stream, llm, prompt_tokens):
                chunks.append(chunk)
                show(display_text(llm, chunk.text, chunk.token_ids))
                if pressed():
                    return True
        except KeyboardInterrupt:
            if chunks:
                raise
            return True
    return False


def _after_prompt(stream: Iterator[Chunk], llm: LLM, prompt_tokens: int) -> Iterator[Chunk]:
    """The chunks; shows prefill progress until the first one."""
    scheduler = llm.session.engine.scheduler

    def computed() -> int:
        return next((sequence.computed for sequence in scheduler.running), 0)

    with task("reading the prompt", prompt_tokens, unit="token", measure=computed):
        first = next(stream, None)
    if first is not None:
        yield first
        yield from stream


@contextlib.contextmanager
def watch_ctrl_c(waits: Callable[[], bool] = lambda: True) -> Iterator[Callable[[], bool]]:
    """Records Ctrl-C instead of interrupting a step; yields a function that tells whether it came.

    A second Ctrl-C interrupts.

    Args:
        waits: whether there is something to wait for; if not, the first Ctrl-C interrupts.
    """
    pressed = False

    def note(signum: int, frame: Any) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)
        if not waits():
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def display_text(llm: LLM, text: str, ids: Sequence[int]) -> str:
    """The text of an answer to print; without a tokenizer, its ids."""
    return text if llm.tokenizer else "".join(f"{id} " for id in ids)


def usage_of(llm: LLM, interrupted: bool) -> Usage:
    """The usage of the answer that has just ended."""
    if interrupted:  # the engine may not have processed the cancellation yet
        llm.session.thread.run(lambda engine: None)
    return llm.last_usage


def report_of_chunks(chunks: Sequence[Chunk]) -> dict[str, Any]:
    """The report of an answer from its chunks; it may have been stopped."""
    return _entry(
        "".join(chunk.text for chunk in chunks),
        [id for chunk in chunks for id in chunk.token_ids],
        chunks[-1].finish_reason if chunks else None,
        [entry for chunk in chunks for entry in chunk.logprobs],
    )


def report_of_completion(answer: Completion) -> dict[str, Any]:
    """The report of a complete answer."""
    return _entry(answer.text, answer.token_ids, answer.finish_reason, answer.logprobs or [])


def _entry(
    text: str, ids: list[int], reason: str | None, logprobs: list[TokenLogprob]
) -> dict[str, Any]:
    entry: dict[str, Any] = {"text": text, "token_ids": ids, "finish_reason": reason}
    return entry | ({"logprobs": [asdict(each) for each in logprobs]} if logprobs else {})


def print_report(llm: LLM, answers: list[dict[str, Any]], usage: Usage) -> None:
    """Print what --json asks for: an answer with usage and timings, or a list of several."""
    report = {
        **(answers[0] if len(answers) == 1 else {"answers": answers}),
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": sum(len(answer["token_ids"]) for answer in answers),
        },
        "timings": {
            "load_seconds": round(llm.load_seconds, 3),
            "compile_seconds": round(llm.compile_seconds, 3),
            "prefill_tokens_per_second": round(usage.prefill_rate, 1),
            "decode_tokens_per_second": round(usage.decode_rate, 1),
        },
    }
    print(json.dumps(report, ensure_ascii=False))


def timings(llm: LLM, usage: Usage) -> str:
    """One line: seconds to load and compile, tokens per second of prompt and answer."""
    return f"load {llm.load_seconds:.2f} s, compile {llm.compile_seconds:.2f} s | {rates(usage)}"


def rates(usage: Usage) -> str:
    """Token counts and tokens per second of prompt and answer."""
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    return (
        f"prefill {usage.prompt_tokens} tokens{cached}, {_rate(usage.prefill_rate)} | "
        f"decode {usage.completion_tokens}, {_rate(usage.decode_rate)}"
    )


def _rate(number: float) -> str:
    return f"{number:.{0 if number >= 100 else 1}f}/s"


_COLOURS = ("32", "36", "35", "33", "34", "31")  # ANSI codes of text colours
_PLAIN = "0"


def explain(llm: LLM, prompt: EncodedPrompt) -> int:
    """Generate an answer; return the exit status. Raises `FlagError` without a draft source."""
    # Imported here, because it imports Flax, which answers from cached programs do not need.
    from jinfer.speculate.speculative_decoding import SpeculativeDecoder

    speculator = llm.session.engine.speculator
    params = llm.params()
    if not isinstance(speculator, SpeculativeDecoder) or not params.speculation:
        raise FlagError(
            "--explain-speculation: there is no draft source; add --set speculation.draft=ngram"
        )
    if params.strategy == "beam":
        raise FlagError("--explain-speculation: nothing is drafted for a beam search")
    colours, chunks = SourceColours(), list[Chunk]()
    with (
        contextlib.closing(llm.stream(prompt, params)) as stream,
        watch_ctrl_c() as pressed,
    ):
        for chunk in stream:
            chunks.append(chunk)
            text = display_text(llm, chunk.text, chunk.token_ids)
            progress.write(colours.paint(text, chunk.origin), line_open=True)
            if pressed():
                break
    interrupted = chunks[-1].finish_reason is None
    usage = usage_of(llm, interrupted)
    progress.write("\n")
    accepted, drafted = usage.accepted_tokens, usage.drafted_tokens
    steps = max(1, usage.completion_tokens - accepted)
    print(
        f"{drafted} tokens drafted, {accepted} of them right; "
        f"{usage.completion_tokens / steps:.2f} tokens a step",
        *acceptance_table({} if usage.speculation is None else usage.speculation.tried()),
        f"colours: {colours.legend()}",
        timings(llm, usage),
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
