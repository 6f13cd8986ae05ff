"""Attention patterns: what each head of a layer attends to, position by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jinfer.sampling.request_errors import RequestError
from jinfer.views.heat_map import Matrix, heat_maps
from jinfer.views.view import Table, View

if TYPE_CHECKING:
    from jaxtyping import Float

    from jinfer.api.llm import LLM
    from jinfer.api.prompt_inputs import Prompt

_MOST = 1024  # tokens of a picture


@dataclass(frozen=True)
class HeadScores:
    """What a head mostly does, each from 0 to 1.

    Attributes:
        own, previous, first: mean attention to the token itself, to the one before, to the first.
        induction: to the token behind the last one that was the same (arXiv 2209.11895), mean over
            the positions that have one; nan: no token comes twice.
    """

    own: float
    previous: float
    first: float
    induction: float


def attention_patterns(llm: LLM, prompt: Prompt, *, layer: int = 0, module: str = "attn") -> View:
    """The attention patterns of all heads of a layer.

    Args:
        layer: its number; -1: the last one.
        module: name of the attention in the layer's formula.

    Raises:
        RequestError: there is no such layer or attention, or the prompt is too long for a picture.
    """
    from jinfer.views.token_likelihoods import token_names
    from jinfer.views.traced_values import captured, layer_name

    ids = llm.encode(prompt)
    if len(ids) > _MOST:
        raise RequestError(f"a picture has room for {_MOST} tokens, and the prompt has {len(ids)}")
    name = f"{layer_name(llm, layer)}.{module}"
    pattern = captured(llm, ids, [f"{name}.pattern"])[f"{name}.pattern"]
    return draw_patterns(pattern, token_names(llm, ids), name, ids)


def draw_patterns(
    patterns: Float[np.ndarray, "heads tokens keys"],
    tokens: Sequence[str],
    name: str,
    ids: Sequence[int] | None = None,
) -> View:
    """The view of patterns.

    Args:
        tokens: texts of the positions; keys are the last ones of them where there are fewer.
        name: of the attention.
        ids: the tokens' ids, for induction scores; None: equal texts are equal tokens.
    """
    same = list(tokens if ids is None else ids)
    scores = [head_scores(pattern, same) for pattern in patterns]
    matrices = [
        Matrix(str(head), _said(head, of), pattern)
        for head, (pattern, of) in enumerate(zip(patterns, scores, strict=True))
    ]
    keys = tokens[: patterns.shape[2]]
    about = (
        f"{name}: {len(patterns)} heads, {len(tokens)} tokens; a row is a token, and what it "
        "attends to; choose a head"
    )
    drawn = heat_maps(matrices, tokens, keys, "attention")
    return View("attention patterns", about, drawn, lambda: _table(patterns, tokens, keys))


def head_scores(pattern: Float[np.ndarray, "tokens keys"], tokens: Sequence[object]) -> HeadScores:
    """How much a head attends to a few positions that circuits are made of.

    Args:
        tokens: what tells tokens apart.
    """
    count = min(pattern.shape)
    rows = np.arange(count)
    last: dict[object, int] = {}
    pairs = list[tuple[int, int]]()
    for at, token in enumerate(tokens[:count]):
        if token in last:
            pairs.append((at, last[token] + 1))
        last[token] = at
    to = np.array([pattern[pair] for pair in pairs])
    return HeadScores(
        own=float(pattern[rows, rows].mean()),
        previous=float(pattern[rows[1:], rows[:-1]].mean()) if count > 1 else 0.0,
        first=float(pattern[1:, 0].mean()) if count > 1 else float(pattern[0, 0]),
        induction=float(to.mean()) if len(to) else float("nan"),
    )


def _said(head: int, of: HeadScores) -> str:
    parts = {"itself": of.own, "the token before": of.previous, "the first": of.first}
    if of.induction == of.induction:  # no token comes twice: nan
        parts["what followed the same token"] = of.induction
    return f"head {head}, mean attention: " + ", ".join(
        f"{value:.2f} to {what}" for what, value in parts.items()
    )


def _table(
    patterns: Float[np.ndarray, "heads tokens keys"], tokens: Sequence[str], keys: Sequence[str]
) -> Table:
    heads, rows, columns = patterns.shape
    found: Mapping[str, np.ndarray] = {
        "head": np.repeat(np.arange(heads), rows * columns),
        "position": np.tile(np.repeat(np.arange(rows), columns), heads),
        "token": np.tile(np.repeat(np.array(tokens, object), columns), heads),
        "key_position": np.tile(np.arange(columns), heads * rows),
        "key": np.tile(np.array(keys, object), heads * rows),
        "attention": patterns.ravel(),
    }
    return found
