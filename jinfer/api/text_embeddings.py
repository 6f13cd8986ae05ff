"""Embeddings of texts: their tokens, the vectors made of these, and how near two vectors are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jinfer.api.forward_results import results
from jinfer.api.prompt_inputs import Prompt, prompts
from jinfer.api.session import Frontend
from jinfer.engine.requests import RequestError
from jinfer.modelspec.spec_errors import nearest, show
from jinfer.opening.pooling_config import (
    POOLINGS,
    Pooling,
    Similarity,
    Vectors,
    cut,
    pool,
    to_length_1,
)

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Tokens:
    """A text to be embedded.

    Attributes:
        ids: its tokens.
        skipped: how many of them, at the beginning, are a prompt's that does not count.
    """

    ids: list[int]
    skipped: int = 0


def limit(frontend: Frontend) -> int:
    """Tokens that a text may have."""
    opened = frontend.opened
    return min(opened.context, opened.pooling.max_tokens or opened.context)


def tokens_of(frontend: Frontend, given: object, prompt_name: str | None) -> list[Tokens]:
    """The tokens of one text or several, cut to what the model reads; arguments as `LLM.embed`.

    Raises:
        RequestError: there is no such prompt, or a prompt for what is no text; as `LLM.encode`.
    """
    prompt, skipped = prompt_of(frontend, prompt_name)
    most = limit(frontend)
    return [_tokens(frontend, one, prompt, skipped, prompt_name, most) for one in prompts(given)]


def _tokens(
    frontend: Frontend, given: Prompt, prompt: str, skipped: int, name: str | None, most: int
) -> Tokens:
    if isinstance(given, str):
        ids = cut(frontend.encode(frontend.opened.pooling.text(given, prompt)), most)
        return Tokens(ids, min(skipped, len(ids) - 1))
    if name is not None:
        raise RequestError("prompt_name is for texts, and this is none; put the prompt into it")
    return Tokens(cut(frontend.encode(given), most))


def prompt_of(frontend: Frontend, name: str | None) -> tuple[str, int]:
    """A prompt's text, and how many tokens at the beginning of its texts do not count.

    Raises:
        RequestError: there is no prompt of that name.
    """
    pooling = frontend.opened.pooling
    try:
        prompt = pooling.prompt(name)
    except ValueError as error:
        raise RequestError(str(error)) from None
    if not prompt or pooling.include_prompt:
        return prompt, 0
    # What the tokenizer puts behind a text comes after the prompt's tokens.
    worded = pooling.text("", prompt)
    ids, bare = (frontend.tokenizer.encode(worded, special=special) for special in (True, False))
    begins = (at for at in range(len(ids)) if ids[at : at + len(bare)] == bare)
    return prompt, next(begins, 0) + len(bare)


def vectors(
    frontend: Frontend,
    texts: Sequence[Tokens],
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    token_type_ids: Sequence[Sequence[int]] | None = None,
) -> Vectors:
    """One vector per text; arguments as `LLM.embed`. Raises `RequestError`."""
    own = frontend.opened.pooling
    take = own.take if pooling is None else (_pooling(pooling),)
    if not take:
        raise RequestError(f"{own.refusal}; use hidden, or give pooling, such as 'mean'")
    if own.layers and len(take) != len(own.take):
        raise RequestError(f"pooling has to be the model's own, {' + '.join(own.take)}, here")
    hidden = results(frontend, [text.ids for text in texts], "hidden", None, token_type_ids)
    found = pool(hidden, take, [text.skipped for text in texts])
    for layer in own.layers:
        found = layer(found)
    unit = own.normalize if normalize is None else normalize
    return (to_length_1(found) if unit else found).astype(np.float32)


def _pooling(name: Any) -> Pooling:
    if name not in POOLINGS:
        raise RequestError(f"pooling is {show(name)}; {nearest(str(name), POOLINGS)}")
    return name


def _cosine(a: Vectors, b: Vectors) -> np.ndarray:
    return np.sum(to_length_1(a) * to_length_1(b), axis=1)


# How near vectors are: the larger, the nearer.
SIMILARITIES: dict[Similarity, Callable[[Vectors, Vectors], Float[np.ndarray, " texts"]]] = {
    "cosine": _cosine,
    "dot": lambda a, b: np.sum(a * b, axis=1),
    "euclidean": lambda a, b: -np.linalg.norm(a - b, axis=1),
    "manhattan": lambda a, b: -np.abs(a - b).sum(axis=1),
}
