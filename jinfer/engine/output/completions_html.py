"""Notebook view of completions: HTML text whose tokens are shaded by how unlikely they were."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Protocol

from jinfer.engine.output.token_logprob import TokenLogprob

_BOX = (
    "white-space:pre-wrap;overflow-wrap:anywhere;font-family:ui-monospace,Menlo,Consolas,monospace;"
    "font-size:13px;line-height:1.6;margin:4px 0 10px;padding:6px 10px;border-left:3px solid #8888"
)
_SMALL = "font-size:12px;opacity:.7"
_MOST = 20_000  # characters, or tokens, shown of an answer
_SHADE = "217,95,2"  # legible on white and on black


class Completion(Protocol):
    """What is shown of a `generation.Completion`, which imports this module."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def logprobs(self) -> Sequence[TokenLogprob] | None: ...


def completions_html(answers: Sequence[Completion]) -> str:
    """Each answer in a box, with its number of tokens and its finish reason."""
    return f"<div>{''.join(map(_completion, answers))}</div>"


def _completion(answer: Completion) -> str:
    if answer.logprobs:
        shown = "".join(map(_token, answer.logprobs[:_MOST]))
        hint = "the darker, the less likely; hover for the likeliest"
    elif answer.text or not answer.token_ids:
        shown, hint = escape(answer.text[:_MOST]), "logprobs=5 shades its tokens"
    else:
        shown, hint = escape(str(answer.token_ids[:_MOST])[1:-1]), "token ids: no tokenizer"
    count = len(answer.token_ids)
    caption = f"{count} token{'s' * (count != 1)}, {answer.finish_reason}; {hint}"
    return f'<div style="{_BOX}">{shown}<div style="{_SMALL}">{escape(caption)}</div></div>'


def _token(entry: TokenLogprob) -> str:
    shade = 1 - math.exp(min(0.0, entry.logprob))
    title = "\n".join(_lines(entry, [one for one in entry.top if one.id != entry.id]))
    text = escape(entry.text or f"[{entry.id}]").replace("\n", "↵\n")
    style = f"background:rgba({_SHADE},{0.75 * shade:.2f});border-radius:3px"
    return f'<span style="{style}" title="{escape(title)}">{text}</span>'


def _lines(entry: TokenLogprob, others: Iterable[TokenLogprob]) -> Iterable[str]:
    for one in (entry, *others):
        yield f"{math.exp(min(0.0, one.logprob)):6.1%}  {one.text!r}  {one.id}"
