"""Classification settings (`[classification]`): labels, activation, the text of a pair."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any, Literal

from jinfer.modelspec.block import Block
from jinfer.modelspec.bounded_types import Count
from jinfer.modelspec.layer_spec import StackSpec
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_values import SpecValues
from jinfer.modelspec.table_reader import fields, read_value
from jinfer.modelspec.toml_tables import as_table, check_keys, check_text, check_texts

Activation = Literal["identity", "sigmoid", "softmax"]
PLACES = ("{query}", "{document}")


@dataclass(frozen=True)
class ClassificationSpec:
    """How scores of classes are read: `[classification]`.

    Attributes:
        labels: names of the classes; none: as the checkpoint says, else LABEL_0, LABEL_1, ...
        activation: what makes a probability of a score; none: as the checkpoint says, else
            `sigmoid` of one class, `softmax` of several.
        relevance: the number of the class whose score ranks documents; none: the only one, or as
            the checkpoint says.
        pair: the text that a pair becomes, with {query} and {document} in it; none: as the
            tokenizer joins two texts.
    """

    labels: tuple[str, ...] | None = None
    activation: Activation | None = None
    relevance: Count | None = None
    pair: str | None = None


def read_classification(written: Any, values: SpecValues) -> ClassificationSpec:
    """Reads the table. Raises `SpecError`."""
    path, where = values.path, "classification"
    types = {name: type_ for name, (_, type_) in fields(ClassificationSpec).items()}
    table = check_keys(as_table(written, path, where), types, path, where)
    found: dict[str, Any] = {
        name: read_value(types[name], table[name], values, f"{where}.{name}")
        for name in ("activation", "relevance")
        if name in table
    }
    if "labels" in table:
        found["labels"] = tuple(check_texts(table["labels"], path, f"{where}.labels"))
    if "pair" in table:
        found["pair"] = check_pair(check_text(table["pair"], path, f"{where}.pair"), path)
    return ClassificationSpec(**found)


def check_pair(text: str, path: object) -> str:
    """A text of a pair. Raises `SpecError` unless it has both places once."""
    for place in PLACES:
        if text.count(place) != 1:
            reason = f"has {place} {text.count(place)} times; it has to be there once"
            raise SpecError(path, "classification.pair", reason)
    return text


def class_count(stack: StackSpec, shared: tuple[tuple[str, Block], ...]) -> int | None:
    """How many classes a stack's head gives; None: none, or its formula does not show it."""
    known = {**dict(shared), **dict(stack.modules)}
    for target, expression in stack.head.statements:
        if target == "classes":
            called = (n.func for n in ast.walk(expression) if isinstance(n, ast.Call))
            blocks = (known.get(f.id) for f in called if isinstance(f, ast.Name))
            sizes = (getattr(block, "outputs", None) for block in blocks)
            return next((size for size in sizes if size is not None), None)
    return None
