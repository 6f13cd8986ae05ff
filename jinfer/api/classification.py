"""Text classification: scores of classes for texts and pairs of texts (cross-encoders)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from jinfer.api.forward_results import forward_results
from jinfer.api.prompt_inputs import parse_prompts
from jinfer.api.session import Session
from jinfer.api.text_embeddings import max_text_tokens
from jinfer.engine.output.completion import data_frame
from jinfer.engine.requests import NotFiniteError, RequestError
from jinfer.html.html_page import table_html
from jinfer.loader.config.classification_config import ClassificationConfig
from jinfer.loader.config.pooling_config import cut

if TYPE_CHECKING:
    from jaxtyping import Float


_SHOWN = 8  # texts that a short text lists


@dataclass(frozen=True, repr=False)
class Classes:
    """Scores of classes.

    Attributes:
        scores: as the head gives them (logits), a row per text, float32.
        labels: the classes' names.
    """

    scores: Float[NDArray[np.float32], "texts labels"]
    labels: tuple[str, ...]
    _config: ClassificationConfig

    @property
    def probabilities(self) -> Float[NDArray[np.float32], "texts labels"]:
        """Scores after the checkpoint's activation: sigmoid, softmax, or none."""
        return self._config.activated(self.scores)

    @property
    def best(self) -> list[str]:
        """The label of the highest score of each text."""
        return [self.labels[i] for i in np.argmax(self.scores, axis=1)]

    def to_pandas(self) -> Any:
        """A row for each text, a column of probabilities for each label.

        Raises:
            RequestError: pandas is not installed.
        """
        return data_frame(dict(zip(self.labels, self.probabilities.T, strict=True)))

    def __repr__(self) -> str:
        shown = [f"{label} {p:.2f}" for label, p in self._likeliest()[:_SHOWN]]
        shown += ["..."] if len(self.scores) > _SHOWN else []
        return f"Classes({', '.join(shown)})"

    def _repr_html_(self) -> str:
        rows = [
            (number, label, round(probability, 3))
            for number, (label, probability) in enumerate(self._likeliest())
        ]
        return table_html(("text", "class", "probability"), rows)

    def _likeliest(self) -> list[tuple[str, float]]:
        return list(zip(self.best, self.probabilities.max(axis=1).tolist(), strict=True))


@dataclass(frozen=True)
class TypedTokens:
    """A tokenized text or pair.

    Attributes:
        ids: its tokens.
        types: which of two texts each belongs to (0, 1).
    """

    ids: list[int]
    types: list[int]

    def cut(self, limit: int) -> TypedTokens:
        """At most `limit` tokens; the last one, which ends the text, stays."""
        return TypedTokens(cut(self.ids, limit), cut(self.types, limit))


def classification_of(session: Session) -> ClassificationConfig:
    """How the model's classes are read. Raises `RequestError` if it has none."""
    found = session.opened.classification
    if found is None:
        raise RequestError("the model has no head that gives classes; use embed, or generate")
    return found


def tokenize_pair(session: Session, first: str, second: str) -> TypedTokens:
    """Tokenizes a pair of texts as the checkpoint wants it: by its own text, or its tokenizer.

    Raises:
        RequestError: there is no tokenizer, or it has no form for pairs.
    """
    tokenizer, form = session.tokenizer, classification_of(session).pair
    if form is None:
        ids, types = tokenizer.encode_pair(first, second)
        many = session.opened.spec.dims.get("types")
        return TypedTokens(ids, types if many is None or many > 1 else [0] * len(ids))
    hidden = map(tokenizer.hide_control, (first, second))
    before, _, rest = form.partition("{query}")
    if "{document}" in before:
        before, _, middle = before.partition("{document}")
        after, (query, document) = rest, hidden
        text = before + document + middle + query + after
    else:
        middle, _, after = rest.partition("{document}")
        query, document = hidden
        text = before + query + middle + document + after
    special = tokenizer.special
    ids = [*special.prefix, *tokenizer.encode_marked(text), *special.suffix]
    return TypedTokens(ids, [0] * len(ids))


def is_pair(given: object) -> bool:
    """Whether something is two texts."""
    return (
        isinstance(given, list | tuple)
        and len(given) == 2
        and all(isinstance(text, str) for text in given)
    )


def tokenize(session: Session, given: object) -> list[TypedTokens]:
    """Tokenizes texts, token ids and pairs; arguments as `LLM.classify`. Raises `RequestError`."""
    paired = isinstance(given, list | tuple) and any(map(is_pair, given))
    listed: list[Any] = list(cast("Any", given)) if paired else parse_prompts(given)
    found = []
    for item in listed:
        if is_pair(item):
            found.append(tokenize_pair(session, *item))
        else:
            ids = session.encode(item)
            found.append(TypedTokens(ids, [0] * len(ids)))
    return found


def classify(session: Session, texts: Sequence[TypedTokens]) -> Classes:
    """Scores of classes for tokenized texts. Raises `RequestError`."""
    config, max_tokens = classification_of(session), max_text_tokens(session)
    shorter = [text.cut(max_tokens) for text in texts]
    ids = [text.ids for text in shorter]
    decodes = session.opened.spec.decoder is not None
    types: Any = None if decodes else [text.types for text in shorter]
    rows = forward_results(session, ids, "classes", None, types, last=decodes)
    scores = np.stack(rows).astype(np.float32)
    if not np.isfinite(scores).all():
        raise NotFiniteError("scores")
    return Classes(scores, config.labels, config)
