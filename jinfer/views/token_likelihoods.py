"""Tokens by log-probability: a text whose tokens are shaded by how unlikely they were."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

from jinfer.engine.output.completion import TokenLogprob
from jinfer.html.completions_html import probability, token_spans
from jinfer.html.token_text import byte_text, columns_of, flowing
from jinfer.views.view import Drawn, Table, View, beneath

if TYPE_CHECKING:
    from jinfer.api.llm import LLM
    from jinfer.api.prompt_inputs import Prompt

_LINE, _CHARACTER, _WIDTH = 22, 7.9, 612  # pixels of a line, a character, and all there is
_HINT = "the likeliest at a token: point at it, or go to it with Tab and arrows"


def tokens(llm: LLM, prompt: Prompt, *, top: int = 5, max_tokens: int = 0) -> View:
    """A prompt's tokens by log-probability, with the likeliest alternatives on hover.

    Args:
        top: how many alternatives, at most 20.
        max_tokens: tokens of an answer to show behind it.

    Raises:
        RequestError: a prompt of fewer than two tokens, `top` out of range, or a model that gives
            no log-probabilities.
    """
    from jinfer.api.forward_results import prompt_logprobs
    from jinfer.engine.requests import RequestError
    from jinfer.views.traced_values import check_llm

    check_llm(llm)
    ids = llm.encode(prompt)
    if len(ids) < 2:
        raise RequestError("a prompt needs two tokens: the first has none before it")
    scored = named(llm, prompt_logprobs(llm.session, ids, top))
    answer: list[TokenLogprob] = []
    if max_tokens:
        (made,) = llm.generate([ids], max_tokens=max_tokens, logprobs=top)
        answer = named(llm, made.logprobs or [])
    return draw_tokens(token_names(llm, ids[:1])[0], scored, answer)


def draw_tokens(
    first: str, scored: Sequence[TokenLogprob], answer: Sequence[TokenLogprob] = ()
) -> View:
    """The view of tokens.

    Args:
        first: text of the first token, which has no log-probability.
        scored: the tokens behind it.
        answer: generated tokens, shown apart.
    """
    logprobs = [token.logprob for token in (*scored, *answer)]
    mean = sum(logprobs) / max(1, len(logprobs))
    about = f"{len(scored) + 1} tokens" + (f" and {len(answer)} generated" if answer else "")
    about += f"; perplexity {math.exp(-mean):.2f}; the more shaded, the less likely"
    parts = [_hint(), _text(f"<span>{escape(flowing(first))}</span>", first, scored, True)]
    if answer:
        label = Drawn("<p>answer</p>", 0, 26)
        parts += [label, _text("", "", answer, False)]
    return View(
        "tokens by log-probability", about, beneath(*parts), lambda: _table(first, scored, answer)
    )


def token_names(llm: LLM, ids: Sequence[int]) -> list[str]:
    """Tokens as texts, parts of characters as bytes; ids in brackets without a tokenizer."""
    if llm.tokenizer is None:
        return [f"[{id}]" for id in ids]
    return [byte_text(llm.tokenizer.spelled(id)) or llm.tokenizer.token(id) for id in ids]


def named(llm: LLM, entries: Sequence[TokenLogprob]) -> list[TokenLogprob]:
    """Entries with the texts of `token_names`, in which parts of characters are not U+FFFD."""

    def named(entry: TokenLogprob) -> TokenLogprob:
        text = token_names(llm, [entry.id])[0] if "\ufffd" in entry.text else entry.text
        return replace(entry, text=text, top=tuple(map(named, entry.top)))

    return [named(entry) for entry in entries]


def _hint() -> Drawn:
    return Drawn(f'<output data-hint="{_HINT}"></output>', 0, 0)


def _text(before: str, first: str, shown: Sequence[TokenLogprob], reached: bool) -> Drawn:
    spans = token_spans(shown, first=reached)
    texts = [first, *(entry.text or f"[{entry.id}]" for entry in shown)]
    return Drawn(f'<div class="text" data-keys="0">{before}{spans}</div>', 0, text_height(texts))


def text_height(texts: Sequence[str], width: int = _WIDTH) -> int:
    """Pixels that a text takes, at most: lines are broken between characters."""
    lines = flowing("".join(texts)).split("\n")
    room = int(width / _CHARACTER)
    return _LINE * sum(1 + columns_of(line) // room for line in lines) + 20


def _table(first: str, scored: Sequence[TokenLogprob], answer: Sequence[TokenLogprob]) -> Table:
    entries = [*scored, *answer]
    return {
        "position": list(range(1, len(entries) + 1)),
        "token": [entry.text for entry in entries],
        "id": [entry.id for entry in entries],
        "logprob": [entry.logprob for entry in entries],
        "probability": [probability(entry.logprob) for entry in entries],
        "likeliest": [entry.top[0].text if entry.top else None for entry in entries],
        "generated": [False] * len(scored) + [True] * len(answer),
    }
