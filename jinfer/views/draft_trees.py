"""Speculation: the draft trees of an answer, and their accepted tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jinfer.engine.output.draft_trace import MOST_DRAWN, Steps
from jinfer.html.draft_tree_svg import draw
from jinfer.sampling.request_errors import RequestError
from jinfer.views.traced_values import check_llm
from jinfer.views.view import Drawn, Table, View

if TYPE_CHECKING:
    from jinfer.api.llm import LLM
    from jinfer.api.prompt_inputs import Prompt

# The drawing has the colours of the page.
_STYLE = """
.jv .trees{max-height:none}
.jv .jt text{fill:var(--ink)}.jv .jt .soft{fill:var(--faint)}.jv .jt .page{fill:none}
.jv .jt .box{fill:var(--raised)}.jv .jt .wire{stroke:var(--line)}.jv .jt .way{stroke:var(--ink)}
"""


def speculation(llm: LLM, prompt: Prompt, *, max_tokens: int = 48) -> View:
    """The draft trees of an answer.

    Raises:
        RequestError: the model was opened without a draft source, or nothing was drafted.
    """
    check_llm(llm)
    if llm.session.engine.speculator is None:
        raise RequestError(
            "this model has no draft source; open it with one: speculation.draft=ngram"
        )
    (answer,) = llm.generate([llm.encode(prompt)], max_tokens=max_tokens)
    if answer.speculation is None:
        raise RequestError("nothing was drafted for this answer; take a longer one (max_tokens)")
    return draw_speculation(answer.speculation)


def draw_speculation(steps: Steps) -> View:
    """The view of draft trees, one below the other."""
    picture = draw(steps.drafted[:MOST_DRAWN], steps.text, len(steps) - MOST_DRAWN)
    drafted = sum(len(step.tokens) for step in steps.drafted)
    right = sum(len(step.accepted) for step in steps.drafted)
    about = f"{len(steps)} calls, {drafted} tokens drafted, {right} of them right"
    width, height = (int(float(_attribute(picture, name))) for name in ("width", "height"))
    markup = f'<style>{_STYLE}</style><div class="scroll trees" tabindex="0">{picture}</div>'
    return View("speculation", about, Drawn(markup, width, height), lambda: _table(steps))


def _attribute(picture: str, name: str) -> str:
    return picture.split(f' {name}="', 1)[1].split('"', 1)[0]


def _table(steps: Steps) -> Table:
    rows = [
        (call, depth, steps.text(token), source, node in step.accepted)
        for call, step in enumerate(steps.drafted)
        for node, (token, source, depth) in enumerate(
            zip(step.tokens, step.sources, step.depths(), strict=True)
        )
    ]
    names = ("call", "depth", "token", "source", "accepted")
    return {name: [row[at] for row in rows] for at, name in enumerate(names)}
