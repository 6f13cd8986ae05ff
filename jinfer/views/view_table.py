"""View table: the views by the names that `jinfer look` has for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jinfer import views
from jinfer.views.view import View


@dataclass(frozen=True)
class Listed:
    """A view.

    Attributes:
        make: the function, of an `LLM` and, where it takes one, a prompt.
        about: a line of help.
        takes: keywords of the function that are flags.
        prompt: whether there has to be a prompt.
    """

    make: Callable[..., View]
    about: str
    takes: tuple[str, ...] = ()
    prompt: bool = True


VIEWS = {
    "tokens": Listed(
        views.tokens, "tokens by log-probability, with alternatives", ("top", "max_tokens")
    ),
    "lens": Listed(views.logit_lens, "logit lens: next tokens after each layer", ("top",)),
    "patterns": Listed(
        views.attention_patterns, "attention patterns of a layer's heads", ("layer", "module")
    ),
    "attribution": Listed(
        views.attribution,
        "what layers and heads add to a token's logit",
        ("answer", "against", "position"),
    ),
    "experts": Listed(views.router_loads, "how often each expert is chosen"),
    "quantization": Listed(
        views.quantization_error, "quantization error, matrix by matrix", ("reference",), False
    ),
    "outliers": Listed(views.outliers, "the largest activations of each layer"),
    "memory": Listed(views.memory, "what weights and cache take", prompt=False),
    "alternatives": Listed(
        views.alternatives,
        "an answer's close alternatives as a tree",
        ("max_tokens", "branches", "ahead"),
    ),
    "strategies": Listed(
        views.strategies, "answers by several strategies side by side", ("chosen", "max_tokens")
    ),
    "speculation": Listed(views.speculation, "trees of drafted tokens", ("max_tokens",)),
}


def keywords(view: str, given: dict[str, Any]) -> dict[str, Any]:
    """Select the keywords that are set.

    Args:
        given: keyword -> value; None: not set.

    Raises:
        LookupError: the view does not take a keyword; its name, and the views that take it.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    for name in chosen:
        if name not in VIEWS[view].takes:
            raise LookupError(
                name, [other for other, listed in VIEWS.items() if name in listed.takes]
            )
    return chosen
