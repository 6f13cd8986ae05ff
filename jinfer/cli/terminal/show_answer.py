"""Streaming output in the terminal: prints an answer, handles Ctrl-C, reports usage and timings."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from jinfer.api.llm import LLM
from jinfer.engine.output.completion import Chunk, Completion, TokenLogprob, Usage
from jinfer.progress import task


def print_answer(
    stream: Iterator[Chunk],
    chunks: list[Chunk],
    show: Callable[[str], None],
    llm: LLM,
    prompt_tokens: int,
) -> bool:
    """Prints an answer while it is generated; returns whether Ctrl-C stopped it.

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
    """Prints what --json asks for: an answer with usage and timings, or a list of several."""
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
