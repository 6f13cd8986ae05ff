"""Alternatives: where an answer nearly went another way, and where it would have gone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from jinfer.engine.output.completion import TokenLogprob
from jinfer.html.completions_html import probability, token_spans
from jinfer.html.token_text import clipped, flowing, visible
from jinfer.sampling.request_errors import RequestError
from jinfer.views.token_likelihoods import named, text_height, token_names
from jinfer.views.traced_values import check_llm
from jinfer.views.view import Drawn, Table, View

if TYPE_CHECKING:
    from jinfer.api.llm import LLM
    from jinfer.api.prompt_inputs import Prompt

_MARGINS = 20  # pixels of a text's margins, which parts of an answer do not have
_TOKEN, _PROMPT = 20, 400  # columns of a token, and characters of a prompt that are shown
_HINT = "the likeliest at a token: point at it, or go to it with Tab and arrows"
_STYLE = """
.jv .trunk{border-left:3px solid var(--second);padding-left:12px;margin-left:4px}
.jv .trunk .text{border:0;padding:0;margin:0}
.jv .fork{position:relative;margin:4px 0 6px;padding-left:26px}
.jv .fork::before{content:"";position:absolute;left:-12px;top:13px;width:30px;
border-top:3px solid var(--line)}
.jv .fork.kept::before{border-color:var(--second)}
.jv .fork b{display:inline-block;min-width:5ch;font:12px/1.6 var(--mono);text-align:right;
margin-right:1ch;color:var(--faint)}
.jv .fork .text{display:inline}
.jv .fork .first{font-weight:700}
.jv .fork.kept{color:var(--ink)}
"""


@dataclass(frozen=True)
class Branch:
    """Another way that an answer might have gone.

    Attributes:
        at: number of the answer's token that it replaces.
        tokens: its tokens, the first of which is the alternative.
        ended: whether the model ended it.
    """

    at: int
    tokens: Sequence[TokenLogprob]
    ended: bool = False


def alternatives(
    llm: LLM, prompt: Prompt, *, max_tokens: int = 32, branches: int = 4, ahead: int = 8
) -> View:
    """The likeliest answer as a tree, with its closest alternatives.

    Args:
        max_tokens: tokens of the answer.
        branches: how many alternatives to follow, likeliest first.
        ahead: tokens of each.

    Raises:
        RequestError: a prompt or a number that cannot be.
    """
    from jinfer.sampling.sampling_params import SamplingParams

    check_llm(llm)
    for name, value in (("branches", branches), ("ahead", ahead)):
        if type(value) is not int or value < 1:
            raise RequestError(f"{name} is {value!r}; give how many, from 1")
    ids = llm.encode(prompt)
    params = SamplingParams(strategy="greedy", logprobs=5)
    (answer,) = llm.generate([ids], params, max_tokens=max_tokens)
    entries = named(llm, answer.logprobs or [])
    close = sorted(_alternatives(entries), key=lambda entry: -entry[1].logprob)[:branches]
    prompts = [[*ids, *answer.token_ids[:at], other.id] for at, other in close]
    ways = llm.generate(prompts, params, max_tokens=ahead) if prompts else []
    found = [
        Branch(at, [other, *named(llm, way.logprobs or [])], way.finish_reason == "stop")
        for (at, other), way in zip(close, ways, strict=True)
    ]
    return draw_alternatives("".join(token_names(llm, ids)), entries, found)


def _alternatives(entries: Sequence[TokenLogprob]) -> Iterator[tuple[int, TokenLogprob]]:
    for at, entry in enumerate(entries):
        for other in entry.top:
            if other.id != entry.id:
                yield at, other


def draw_alternatives(
    prompt: str, answer: Sequence[TokenLogprob], branches: Sequence[Branch]
) -> View:
    """The view of a tree: the answer from top to bottom, with branches where they leave it."""
    forks = sorted({branch.at for branch in branches})
    parts, height, begin = list[str](), 20, 0
    for at in [*forks, len(answer)]:
        if at > begin:
            parts.append(_text(answer[begin:at], begin == 0))
            height += text_height([token.text for token in answer[begin:at]]) - _MARGINS
        if at < len(answer):
            own = answer[at]
            others = [branch for branch in branches if branch.at == at]
            parts.append(_fork(own, "", kept=True))
            for branch in others:
                rest = token_spans(branch.tokens[1:], first=False)
                parts.append(_fork(branch.tokens[0], rest + (" ∎" if branch.ended else "")))
                height += text_height([token.text for token in branch.tokens], 540) - _MARGINS + 10
            height += 32
        begin = at + 1
    shown = clipped(prompt, _PROMPT)
    markup = (
        f'<style>{_STYLE}</style><output data-hint="{_HINT}"></output>'
        f"<small>{escape(flowing(shown, '↵ '))}</small>"
        f'<div class="trunk" data-keys="0">{"".join(parts)}</div>'
    )
    count = len(branches)
    about = (
        f"{len(answer)} tokens, {count} close alternative{'s' * (count != 1)}; the more "
        "shaded, the less likely; ∎: the model ended there"
    )
    drawn = Drawn(markup, 0, height + text_height([shown]))
    return View("close alternatives", about, drawn, lambda: _table(answer, branches))


def _text(tokens: Sequence[TokenLogprob], first: bool) -> str:
    return f'<div class="text">{token_spans(tokens, first=first)}</div>'


def _fork(token: TokenLogprob, rest: str, kept: bool = False) -> str:
    text = escape(visible(token.text, _TOKEN) or f"[{token.id}]")
    share = f"{probability(token.logprob):.0%}"
    title = escape(f"{share}  {visible(token.text)}  {token.id}")
    kind = "fork kept" if kept else "fork"
    tokens = f'<span class="token first" title="{title}">{text}</span>{rest}'
    return f'<div class="{kind}"><b>{share}</b><span class="text">{tokens}</span></div>'


def _table(answer: Sequence[TokenLogprob], branches: Sequence[Branch]) -> Table:
    rows = [(-1, at, token) for at, token in enumerate(answer)]
    rows += [
        (number, branch.at + step, token)
        for number, branch in enumerate(branches)
        for step, token in enumerate(branch.tokens)
    ]
    return {
        "branch": [number for number, _, _ in rows],
        "position": [at for _, at, _ in rows],
        "token": [token.text for _, _, token in rows],
        "id": [token.id for _, _, token in rows],
        "logprob": [token.logprob for _, _, token in rows],
    }
