"""Text embeddings: tokenization with prompts, pooling, normalization, similarity functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jinfer.api.forward_results import forward_results
from jinfer.api.prompt_inputs import parse_prompts
from jinfer.api.session import Session
from jinfer.engine.requests import NotFiniteError, RequestError
from jinfer.loader.config.pooling_config import (
    POOLINGS,
    Pooling,
    Similarity,
    Vectors,
    cut,
    pool,
    to_length_1,
)
from jinfer.modelspec.spec_errors import nearest_hint, show_value

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class EmbeddingTokens:
    """A tokenized text to be embedded.

    Attributes:
        ids: its tokens.
        skipped: how many tokens at the beginning are a prompt's, which pooling leaves out.
    """

    ids: list[int]
    skipped: int = 0


def max_text_tokens(session: Session) -> int:
    """The most tokens of a text; longer ones are truncated."""
    opened = session.opened
    return min(opened.context, opened.pooling.max_tokens or opened.context)


def tokenize_texts(
    session: Session, given: object, prompt_name: str | None
) -> list[EmbeddingTokens]:
    """Tokenizes one text or several, truncated to `max_text_tokens`; arguments as `LLM.embed`.

    Raises:
        RequestError: an unknown prompt name, or a prompt name for token ids; as `LLM.encode`.
    """
    prompt, skipped = embedding_prompt(session, prompt_name)
    max_tokens = max_text_tokens(session)
    tokens = []
    for text in parse_prompts(given):
        if isinstance(text, str):
            ids = cut(session.encode(session.opened.pooling.text(text, prompt)), max_tokens)
            tokens.append(EmbeddingTokens(ids, min(skipped, len(ids) - 1)))
        elif prompt_name is None:
            tokens.append(EmbeddingTokens(cut(session.encode(text), max_tokens)))
        else:
            raise RequestError("prompt_name is for texts, and this is none; put the prompt into it")
    return tokens


def embedding_prompt(session: Session, name: str | None) -> tuple[str, int]:
    """A prompt's text, and how many tokens at the beginning pooling leaves out for it.

    Raises:
        RequestError: there is no prompt of that name.
    """
    pooling = session.opened.pooling
    try:
        prompt = pooling.prompt(name)
    except ValueError as error:
        raise RequestError(str(error)) from None
    if not prompt or pooling.include_prompt:
        return prompt, 0
    # The prompt's tokens, with BOS or CLS before them but without what the tokenizer appends.
    prompt_text = pooling.text("", prompt)
    encode = session.tokenizer.encode
    ids, bare = (encode(prompt_text, special=special) for special in (True, False))
    begins = (at for at in range(len(ids)) if ids[at : at + len(bare)] == bare)
    return prompt, next(begins, 0) + len(bare)


def embed_texts(
    session: Session,
    texts: Sequence[EmbeddingTokens],
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    token_type_ids: Sequence[Sequence[int]] | None = None,
) -> Vectors:
    """One vector per text; arguments as `LLM.embed`. Raises `RequestError`."""
    config = session.opened.pooling
    take = config.take if pooling is None else (_pooling(pooling),)
    if not take:
        raise RequestError(f"{config.refusal}; use hidden, or give pooling, such as 'mean'")
    if config.layers and len(take) != len(config.take):
        raise RequestError(f"pooling has to be the model's own, {' + '.join(config.take)}, here")
    hidden = forward_results(session, [text.ids for text in texts], "hidden", None, token_type_ids)
    pooled = pool(hidden, take, [text.skipped for text in texts])
    for layer in config.layers:
        pooled = layer(pooled)
    unit = config.normalize if normalize is None else normalize
    return _checked(to_length_1(pooled) if unit else pooled)


def token_vectors(
    session: Session, texts: Sequence[EmbeddingTokens], *, normalize: bool | None = None
) -> list[Vectors]:
    """A vector per token of each text; arguments as `LLM.token_vectors`. Raises `RequestError`."""
    config = session.opened.pooling
    hidden = forward_results(session, [text.ids for text in texts], "hidden")
    found = []
    for vectors in hidden:
        for layer in config.layers if config.late else ():
            vectors = layer(vectors)
        unit = config.normalize if normalize is None else normalize
        found.append(_checked(to_length_1(vectors) if unit else vectors))
    return found


def _checked(vectors: Vectors) -> Vectors:
    """The vectors in float32. Raises `NotFiniteError`."""
    if not np.isfinite(vectors).all():
        raise NotFiniteError("vectors")
    return vectors.astype(np.float32)


def max_similarity(
    query: Float[np.ndarray, "query width"], document: Float[np.ndarray, "document width"]
) -> float:
    """MaxSim (ColBERT): each token of the query with the nearest one of the document, summed."""
    return float((query @ document.T).max(axis=1).sum())


def _pooling(name: Any) -> Pooling:
    if name not in POOLINGS:
        raise RequestError(f"pooling is {show_value(name)}; {nearest_hint(str(name), POOLINGS)}")
    return name


# Similarity functions of two batches of vectors; larger is more similar.
SIMILARITIES: dict[Similarity, Callable[[Vectors, Vectors], Float[np.ndarray, " texts"]]] = {
    "cosine": lambda a, b: np.sum(to_length_1(a) * to_length_1(b), axis=1),
    "dot": lambda a, b: np.sum(a * b, axis=1),
    "euclidean": lambda a, b: -np.linalg.norm(a - b, axis=1),
    "manhattan": lambda a, b: -np.abs(a - b).sum(axis=1),
}
