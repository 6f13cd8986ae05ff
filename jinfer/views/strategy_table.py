"""Strategies side by side: the same prompt answered in several ways, with a few figures of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from jinfer.html.completions_html import completion_text
from jinfer.progress import track
from jinfer.sampling.request_errors import RequestError
from jinfer.views.token_likelihoods import text_height
from jinfer.views.traced_values import check_llm
from jinfer.views.view import Drawn, Table, View

if TYPE_CHECKING:
    from jinfer.api.llm import LLM
    from jinfer.api.prompt_inputs import Params, Prompt
    from jinfer.engine.output.completion import Completion

USUAL: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"strategy": "greedy"},
    "sample": {"strategy": "sample", "temperature": 0.8, "seed": 1},
    "min_p": {"strategy": "sample", "temperature": 1.0, "min_p": 0.1, "seed": 1},
    "beam": {"strategy": "beam", "beams": 4},
    "contrastive": {"strategy": "contrastive", "penalty_alpha": 0.6, "top_k": 4},
}
_GRAM = 4  # tokens that count as a repetition
_HINT = "the likeliest at a token: point at it, or go to it with Tab and arrows"
_STYLE = """
.jv .cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(280px,100%),1fr));
gap:10px}
.jv .card{min-width:0;border:1px solid var(--line);border-radius:8px;
padding:8px 10px;background:var(--raised)}
.jv .card .text{border:0;padding:0}
.jv .card dl{display:grid;grid-template-columns:auto 1fr;gap:0 10px;margin:6px 0 0;
font:12px/1.5 var(--mono);color:var(--faint)}
.jv .card dt,.jv .card dd{float:none;width:auto;margin:0;padding:0;font-weight:400}
.jv .card dd{color:var(--ink)}
"""


@dataclass(frozen=True)
class Answered:
    """An answer by a strategy.

    Attributes:
        name: of the strategy.
        settings: its parameters.
        completion: the answer, with log-probabilities where the strategy has them.
    """

    name: str
    settings: Mapping[str, Any]
    completion: Completion

    @property
    def figures(self) -> Mapping[str, float]:
        """Tokens, mean log-probability, shares of distinct tokens and of repeated 4-grams, speed.

        The log-probability is that of the model, not as the strategy changed it; nan: a search
        gives none.
        """
        usage = self.completion.usage
        seconds = usage.prefill_seconds + usage.decode_seconds
        ids, logprobs = self.completion.token_ids, self.completion.logprobs or []
        grams = [tuple(ids[at : at + _GRAM]) for at in range(len(ids) - _GRAM + 1)]
        return {
            "tokens": len(ids),
            "mean logprob": sum(answered.logprob for answered in logprobs) / len(logprobs)
            if logprobs
            else float("nan"),
            "distinct": len(set(ids)) / max(1, len(ids)),
            "repeated": 1 - len(set(grams)) / len(grams) if grams else 0.0,
            "tokens/s": len(ids) / seconds if seconds else float("nan"),
        }


def strategies(
    llm: LLM,
    prompt: Prompt,
    chosen: Mapping[str, Params] | Sequence[str] | None = None,
    *,
    max_tokens: int = 48,
) -> View:
    """A prompt answered by several strategies.

    Args:
        chosen: names -> sampling parameters, or some of the names of `USUAL`; None: all of those.
        max_tokens: tokens of an answer.

    Raises:
        RequestError: an unknown name or parameter.
    """
    check_llm(llm)
    if chosen is None or not isinstance(chosen, Mapping):
        names = list(USUAL) if chosen is None else list(chosen)
        if unknown := [name for name in names if name not in USUAL]:
            known = ", ".join(USUAL)
            raise RequestError(f"there is no usual strategy {unknown[0]!r}; there are {known}")
        settings: dict[str, Any] = {name: dict(USUAL[name]) for name in names}
    else:
        settings = dict(chosen)
    ids = llm.encode(prompt)
    found = []
    for name in track(list(settings), "answering", unit="strategy"):
        (completion,) = llm.generate([ids], settings[name], max_tokens=max_tokens, logprobs=5)[:1]
        of = settings[name]
        shown = of if isinstance(of, Mapping) else _changed(of)
        found.append(Answered(name, shown, completion))
    return draw_strategies(found)


def _changed(params: Any) -> Mapping[str, Any]:
    """The parameters that are not as `SamplingParams()` has them."""
    from jinfer.sampling.sampling_params import SamplingParams

    usual = vars(SamplingParams())
    return {name: value for name, value in vars(params).items() if value != usual[name]}


def draw_strategies(answers: Sequence[Answered]) -> View:
    """The view of answers: a card each."""
    cards, heights = list[str](), list[int]()
    for at, answered in enumerate(answers):
        text, _ = completion_text(answered.completion)
        if at:  # Tab reaches each answer by its own card
            text = text.replace(' tabindex="0"', "")
        settings = ", ".join(f"{name} {value}" for name, value in answered.settings.items())
        figures = "".join(
            f"<dt>{escape(name)}</dt><dd>{_written(name, value)}</dd>"
            for name, value in answered.figures.items()
        )
        cards.append(
            f'<div class="card"><p class="title">{escape(answered.name)}</p>'
            f'<p>{escape(settings)}</p><div class="text">{text}</div><dl>{figures}</dl></div>'
        )
        heights.append(text_height([answered.completion.text], 240) + 180)
    markup = (
        f'<style>{_STYLE}</style><output data-hint="{_HINT}"></output>'
        f'<div class="cards" data-keys="0">{"".join(cards)}</div>'
    )
    rows = [max(heights[at : at + 2]) for at in range(0, len(heights), 2)]
    about = f"{len(answers)} strategies; the more shaded, the less likely"
    drawn = Drawn(markup, 0, sum(rows) + 10 * len(rows))
    return View("strategies side by side", about, drawn, lambda: _table(answers))


def _written(name: str, value: float) -> str:
    if value != value:  # nan
        return "-"
    if name == "tokens":
        return f"{value:.0f}"
    return f"{value:.0%}" if name in ("distinct", "repeated") else f"{value:.2f}"


def _table(answers: Sequence[Answered]) -> Table:
    figures = [answered.figures for answered in answers]
    names = list(figures[0]) if figures else []
    return {
        "strategy": [answered.name for answered in answers],
        "text": [answered.completion.text for answered in answers],
        **{name: [of[name] for of in figures] for name in names},
    }
