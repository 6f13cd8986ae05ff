"""Logit lens: the next token that the residual stream after each layer already predicts.

Final norm and vocabulary head are applied to it (nostalgebraist, "interpreting GPT: the logit
lens", 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jinfer.html.token_text import visible
from jinfer.views.cell_grid import Cell, cell_grid
from jinfer.views.view import Table, View

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from jinfer.api.llm import LLM
    from jinfer.api.prompt_inputs import Prompt

_WIDE, _NAME = 8, 40  # columns of a token in a cell, and in its title


@dataclass(frozen=True)
class Lens:
    """What a logit lens shows.

    Attributes:
        layers: names of the places, from the embedding to the last layer.
        tokens: the prompt's tokens.
        likeliest: ids, likeliest first.
        logprobs: their log-probabilities.
        texts: those of `likeliest`.
        next_logprobs: of the token that follows in the prompt; the last position has none.
    """

    layers: Sequence[str]
    tokens: Sequence[str]
    likeliest: Int[np.ndarray, "layers tokens top"]
    logprobs: Float[np.ndarray, "layers tokens top"]
    texts: dict[int, str]
    next_logprobs: Float[np.ndarray, "layers tokens-1"]


def logit_lens(llm: LLM, prompt: Prompt, *, top: int = 4) -> View:
    """The likeliest next tokens by the residual stream after each layer.

    Args:
        top: how many tokens are kept of each place and position.

    Raises:
        RequestError: the model has no vocabulary head, or one that reads more than the last
            layer's output; or `top` is out of range.
    """
    from jinfer.views.lm_head import likeliest_tokens
    from jinfer.views.token_likelihoods import token_names
    from jinfer.views.traced_values import check_top, residual_streams

    check_top(top)
    ids = llm.encode(prompt)
    names, streams = residual_streams(llm, ids)
    following = [*ids[1:], ids[0]] * len(names)
    found = likeliest_tokens(llm, np.concatenate(streams), following, top)
    likeliest, logprobs, nexts = (
        part.reshape(len(names), len(ids), *part.shape[1:]) for part in found
    )
    shown = sorted(set(likeliest.ravel().tolist()))
    texts = dict(zip(shown, token_names(llm, shown), strict=True))
    return draw_lens(Lens(names, token_names(llm, ids), likeliest, logprobs, texts, nexts[:, :-1]))


def draw_lens(lens: Lens) -> View:
    """The view of a lens: a row for each layer, from top to bottom as the stream flows.

    Bold is the token that the last layer gives.
    """
    rows = [
        (name, [_cell(lens, layer, position) for position in range(len(lens.tokens))])
        for layer, name in enumerate(lens.layers)
    ]
    columns = [visible(token, _WIDE) for token in lens.tokens]
    about = (
        f"{len(lens.layers)} places × {len(lens.tokens)} tokens; the likeliest next token at each, "
        "the more shaded, the likelier; bold as at the end"
    )
    grid = cell_grid("after", columns, rows, wide=_WIDE + 1, few=False)
    return View("logit lens", about, grid, lambda: _table(lens))


def _cell(lens: Lens, layer: int, position: int) -> Cell:
    ids, logprobs = lens.likeliest[layer, position], lens.logprobs[layer, position]
    lines = [f"after {lens.layers[layer]}, at {position} {visible(lens.tokens[position], _NAME)}"]
    for id, logprob in zip(ids.tolist(), np.exp(logprobs).tolist(), strict=True):
        lines.append(f"{logprob:6.1%}  {visible(lens.texts[id], _NAME)}  {id}")
    if position < len(lens.tokens) - 1:
        share = float(np.exp(lens.next_logprobs[layer, position]))
        lines.append(f"{share:6.1%}  {visible(lens.tokens[position + 1], _NAME)}, which follows")
    final = lens.likeliest[-1, position, 0] == ids[0]
    text = visible(lens.texts[int(ids[0])], _WIDE)
    return Cell(text, "\n".join(lines), float(np.exp(logprobs[0])), bool(final))


def _table(lens: Lens) -> Table:
    layers, count, top = lens.likeliest.shape
    return {
        "layer": np.repeat(np.array(lens.layers), count * top),
        "position": np.tile(np.repeat(np.arange(count), top), layers),
        "token": np.tile(np.repeat(np.array(lens.tokens, object), top), layers),
        "rank": np.tile(np.arange(top), layers * count),
        "predicted": [lens.texts[int(id)] for id in lens.likeliest.ravel()],
        "logprob": lens.logprobs.ravel(),
    }
