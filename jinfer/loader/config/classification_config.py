"""Classification config: labels, activation and pairs of texts of a classification head.

The keys are those of transformers (id2label, problem_type), sentence-transformers (activation_fn)
and llama.cpp (classifier.output_labels, pooling_type, chat_template.rerank).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from jinfer.loader.checkpoint import Checkpoint
from jinfer.loader.config.source_errors import SourceError
from jinfer.modelspec.model_spec import Activation, ModelSpec, check_pair, class_count
from jinfer.modelspec.spec_errors import SpecError, nearest_hint, show_value

if TYPE_CHECKING:
    from jaxtyping import Float

RANK = 4  # llama.cpp's pooling type of models that score pairs of texts

_PROBLEMS: dict[str, Activation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


@dataclass(frozen=True)
class ClassificationConfig:
    """How a model's scores of classes are interpreted.

    Attributes:
        labels: names of the classes.
        activation: turns a score into a probability.
        relevance: the number of the class whose score ranks documents; None: no class does.
        pair: the format of a pair of texts; None: the tokenizer joins two texts.
    """

    labels: tuple[str, ...]
    activation: Activation
    relevance: int | None
    pair: str | None = None

    def activated(
        self, scores: Float[np.ndarray, "texts labels"]
    ) -> Float[np.ndarray, "texts labels"]:
        """Return the probabilities of scores, or the scores without an activation."""
        return ACTIVATIONS[self.activation](scores)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.where(x < 0, np.exp(-np.logaddexp(0, -x)), 1 / (1 + np.exp(-np.abs(x))))


def _softmax(x: np.ndarray) -> np.ndarray:
    y = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return y / np.sum(y, axis=-1, keepdims=True)


ACTIVATIONS = {"identity": lambda x: x, "sigmoid": _sigmoid, "softmax": _softmax}


def find_classification(
    spec: ModelSpec, checkpoint: Checkpoint, config: Mapping[str, Any]
) -> ClassificationConfig | None:
    """Read a checkpoint's classes, which a specification may replace; None without a head.

    Raises:
        SourceError: the checkpoint has an unknown activation.
        SpecError: `[classification]` has other classes than the model.
    """
    stack, own = spec.decoder or spec.stacks[-1], spec.classification
    if "classes" not in stack.head.results:
        if own != type(own)():
            raise SpecError(spec.path, "classification", "is for a model with a head for classes")
        return None
    gguf = config if checkpoint.format == "gguf" else {}
    count = class_count(stack, spec.shared) or 1
    labels = own.labels or _labels(config, gguf)
    if own.labels is not None and len(own.labels) != count:
        reason = f"has {len(own.labels)} names for {count} classes"
        raise SpecError(spec.path, "classification.labels", reason)
    if len(labels) != count:
        labels = tuple(f"LABEL_{i}" for i in range(count))
    relevance = own.relevance
    if relevance is None:
        relevance = 0 if count == 1 or _architecture(gguf, "pooling_type") == RANK else None
    elif relevance >= count:
        raise SpecError(spec.path, "classification.relevance", f"is {relevance} of {count} classes")
    usual: Activation = "sigmoid" if count == 1 else "softmax"
    activation = own.activation or _activation(config, checkpoint) or usual
    pair = own.pair
    if pair is None and isinstance(given := gguf.get("tokenizer.chat_template.rerank"), str):
        pair = check_pair(given, checkpoint.path)
    return ClassificationConfig(labels, activation, relevance, pair)


def _architecture(gguf: Mapping[str, Any], key: str) -> Any:
    return gguf.get(f"{gguf.get('general.architecture', '')}.{key}")


def _labels(config: Mapping[str, Any], gguf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the classes in order; empty if there are none."""
    named = _architecture(gguf, "classifier.output_labels")
    if isinstance(named, list):
        return tuple(map(str, named))
    known = config.get("id2label")
    if not isinstance(known, Mapping):
        return ()
    numbers = {str(number): str(name) for number, name in known.items()}
    return tuple(numbers.get(str(i), f"LABEL_{i}") for i in range(len(numbers)))


def _activation(config: Mapping[str, Any], checkpoint: Checkpoint) -> Activation | None:
    """sentence-transformers' activation function, or what transformers' problem_type implies."""
    file = checkpoint.path / "config.json" if checkpoint.path.is_dir() else checkpoint.path
    table = config.get("sentence_transformers")
    settings = table if isinstance(table, Mapping) else {}
    key = "sentence_transformers.activation_fn"
    written = settings.get("activation_fn")
    if written is None:
        key = "sbert_ce_default_activation_function"
        written = config.get(key)
    if written is not None:
        name = str(written).rpartition(".")[2].lower()
        if name not in get_args(Activation):
            known = nearest_hint(name, get_args(Activation))
            raise SourceError(f"{file}: {key} is {show_value(written)}; {known}")
        return name  # type: ignore[return-value]
    problem = config.get("problem_type")
    if problem is None:
        return None
    if problem not in _PROBLEMS:
        known = nearest_hint(str(problem), _PROBLEMS)
        raise SourceError(f"{file}: problem_type is {show_value(problem)}; {known}")
    return _PROBLEMS[problem]
